// Package taskdriver runs the tasks of the reference orchestrator.
//
// The drivers docker and podman (Container) run a task in a container of an engine. The drivers raw_exec and exec run
// its processes themselves. A task of raw_exec runs in the host's file system. Of its plan it gets the environment,
// and a plan that needs more is refused. A task of exec has a mount namespace of its own (package mount). It sees
// the host's directories as slave mounts, its own /local, /alloc and /secrets, and on top the directories, binds
// and devices of the plan. This separates file systems. It is no sandbox: a task that runs as root can do what root
// can. The next sections are about exec and raw_exec.
//
// # Devices
//
// If the plan of an exec task has devices or device rules, the task can use those, the devices that every program
// needs (null, zero, full, random, urandom, tty, console, ptmx, pts) and no other. This also holds for root, for
// each access that the plan does not give, and for nodes that the task makes. The task's cgroup enforces it, by the
// device list of version 1 or by a program in version 2. Both belong to the cgroup, so they hold without the
// orchestrator and the parent, until the task ends. At the target of a device the task has a node that belongs to
// its user.
//
// A task keeps all devices if its plan has none, or if its plan binds /dev, as plans of plugins do. The kernel
// knows devices by number. A plan that gives one device with different access at two places is therefore refused.
// Without a cgroup nothing enforces the rules. The Handle then has a warning; outside a user namespace, a plan that
// restricts the access to a device is refused. A root task can leave its cgroup on purpose. The rules keep programs
// from each other's volumes. They do not stop an attacker.
//
// # Resources
//
// The task's cgroup limits memory and processor: with the controllers of version 1 where the machine has them, else
// with those of version 2, which the agent's own cgroup has to offer. Warnings of Configure and of the Handle name each
// limit that is not enforced. Reaching the memory limit kills the task, and Exit.Err says so. The parent is not
// limited.
//
// # Parents
//
// Each task has a small parent process: holdfast-task beside this binary (host/cmd/holdfast-task), or else this
// binary under another name. Every main and TestMain therefore calls Main first. The parent starts the task,
// writes its output to log files, kills what the task leaves behind, and records its exit. It does not depend on
// the process that started it. Tasks continue when the orchestrator is killed, and a later orchestrator adopts
// them by their Handle. With systemd this needs KillMode=process in the orchestrator's unit.
//
// A program of Executor.Exec has such a process, too, which ends when the orchestrator closes a pipe or dies.
//
// # Promises
//
//   - A Handle names processes by pid, start time and boot. A process with a reused pid is never signalled.
//   - Wait returns when no process of the task is left, and so its mount namespace is gone too. What the task
//     mounted below a bidirectional bind stays on the host.
//   - If a parent was killed, the next Wait or Stop kills the task. The exit status is then unknown, and Exit.Err
//     says so.
//
// # Files
//
// A task's directory holds:
//
//	task.json     the Handle, from the start of the task
//	exit.json     the Exit
//	stop.json     the grace of a stop, for the parent
//	lock          locked by the parent while it lives
//	exec.lock     locked by the helper processes of Executor.Exec while they live
//	parent.log    errors of the parent
//	logs/         stdout.N and stderr.N, with growing N
//	local/        the task's /local, kept between attempts
//	alloc/        the task's /alloc, unless the alloc has one
//	secrets/      of raw_exec and of containers; exec has a tmpfs
//	dirs/         directories of the plan of a container
//	root/         where exec builds the task's root; empty on the host
package taskdriver
