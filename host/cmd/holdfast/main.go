// Command holdfast runs jobs with CSI storage on this machine, and looks at what runs.
//
//	holdfast run plugin.hcl notes.volume.hcl job.hcl    everything in the foreground, taken down at the end
//	holdfast agent                                      for good; the other commands speak to it
//	holdfast validate FILE...
//	holdfast job run FILE | stop ID | status [ID]
//	holdfast plugin status [ID]
//	holdfast volume create FILE | register FILE | status [ID] | delete ID | deregister ID
//	holdfast alloc status [ID] | logs ID TASK
//	holdfast doctor [--repair]                          what is not as it is recorded, with or without an agent
//	holdfast events | shim status | version
//
// Exit codes: 0 success; 1 failure; 2 usage error; 3 no agent answers; 4 doctor could not look; 5 doctor
// could not examine everything, and the rest is well; 129, 130, 143 ended by SIGHUP, SIGINT, SIGTERM.
package main

import (
	"os"

	"holdfast/host/agent/taskdriver"
)

func main() {
	taskdriver.Main() // this binary is also the parent of each task
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}
