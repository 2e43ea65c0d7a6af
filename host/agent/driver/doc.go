// Package driver runs the tasks of the reference orchestrator.
//
// There are two drivers. exec gives a task a mount namespace of its own (package mnt): it sees the host's directories as slaves,
// so any program of the host runs, with /local, /alloc and /secrets of its own and the plan's directories, binds and devices on
// top. It keeps file systems apart; it is no sandbox, and a task that runs as root can do what root can. raw_exec gives it nothing
// but the plan's environment; a plan that needs more is refused.
//
// Each task has a small parent process: this same binary, called under another name, which is why a main (and a TestMain) calls
// Main first. The parent starts the task, writes its output to bounded log files, ends what the task leaves behind, and writes how
// it ended. It does not depend on the process that started it: tasks go on when the orchestrator is killed, and a later one adopts
// them by their Handle. (Under systemd the orchestrator's unit needs KillMode=process, or systemd ends the tasks with it.)
//
// Promises: a handle names processes by pid and start time within one boot, so a recycled pid is never touched. Wait returns when
// no process of the task is left, and with it its mount namespace. A parent that was killed takes the task with it as soon as
// anybody waits for the task or stops it; its exit status is lost then, and the Exit says so. The task's mounts are gone with its
// last process; what it mounted below a bidirectional bind stays on the host, as it should.
//
// What lies in a task's directory:
//
//	task.json     the Handle, from the moment the task runs
//	exit.json     the Exit
//	stop.json     how long a stop may take, for the parent
//	lock          held by the parent while it lives
//	parent.log    what the parent has to say, usually nothing
//	logs/         stdout.N and stderr.N, N growing
//	local/        the task's /local, kept between attempts
//	alloc/        the task's /alloc unless the alloc has one
//	secrets/      of raw_exec; exec has a tmpfs
//	root/         where exec builds the task's root; empty for the host
package driver
