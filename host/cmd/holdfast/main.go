// Command holdfast runs jobs with CSI storage on this node, and is the command line of its agent.
//
//	holdfast run plugin.hcl notes.volume.hcl job.hcl    run everything in the foreground and stop it at the end
//	holdfast agent                                      run the agent; the other commands talk to it
//	holdfast validate FILE...
//	holdfast job run FILE... | plan FILE | stop ID... | status [ID] | inspect ID | logs ID [TASK]
//	holdfast plugin status [ID]
//	holdfast volume create FILE... | register FILE... | status [ID] | expand ID | delete ID... | deregister ID...
//	holdfast alloc status [ID] | logs ID [TASK] | exec ID [TASK] -- COMMAND... | restart ID [TASK] | stop ID...
//	holdfast shim status | swap PATH | rollback | history
//	holdfast doctor [--repair]                          find and repair inconsistencies, with or without an agent
//	holdfast events | version
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
