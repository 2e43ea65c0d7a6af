// Command holdfast runs jobs with CSI storage on this node, and is the command line of its agent.
//
//	holdfast run FILE...    run jobs and create volumes in the foreground, and stop everything at the end
//	holdfast agent          run the agent; most other commands talk to it
//	holdfast help           list all commands
//
// The exit codes are constants in root.go and a table in docs/operators.md.
package main

import (
	"os"

	"holdfast/host/agent/taskdriver"
)

func main() {
	taskdriver.Main() // this program is also the parent process of each task
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}
