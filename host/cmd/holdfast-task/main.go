// Command holdfast-task is the parent process of one task. If it lies beside the agent's binary, the agent starts it in
// place of that binary. Built with -tags taskparent,netgo,osusergo it is small and static, so that many tasks cost
// little memory and start fast. It then finds users in /etc/passwd only.
package main

import (
	"fmt"
	"os"

	"holdfast/host/agent/taskdriver"
)

func main() {
	taskdriver.Main()
	fmt.Fprintln(os.Stderr, "holdfast-task: this program is started by holdfast agent; see holdfast agent --help")
	os.Exit(2)
}
