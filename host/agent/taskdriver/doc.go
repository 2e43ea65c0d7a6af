// Package driver runs the tasks of the reference orchestrator.
//
// There are two drivers. exec gives a task a mount namespace of its own (package mnt): it sees the host's directories as slaves,
// so any program of the host runs, with /local, /alloc and /secrets of its own and the plan's directories, binds and devices on
// top. It keeps file systems apart; it is no sandbox, and a task that runs as root can do what root can. raw_exec gives it nothing
// but the plan's environment; a plan that needs more is refused.
//
// Devices: a task of exec whose plan has devices or device rules can use those, with the access that the plan gives, and what every
// program needs (null, zero, full, random, urandom, tty, console, ptmx, pts), and no other device, by whatever node and also as
// root. Its cgroup sees to that, by the list of a version 1 group (devices) or a program in a version 2 group; both belong to the
// group, so they hold while the orchestrator or the parent is gone, and end with the task. At its target it has a node of its own
// that belongs to the user it runs as. A plan without any device leaves it all of the host's, and so does one that binds /dev, as
// plugins get it that mount: there a device of the plan is held to its access, and the others are free. The kernel knows devices by
// number, so one that a plan gives for reading here and for writing there is refused. Where no cgroup can be had the Handle's notes
// say so, and root of the machine is given no device that it may only read. A root task that means to can leave its cgroup: this
// keeps programs from each other's volumes, not an attacker.
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
package taskdriver
