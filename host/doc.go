// Package host is what an orchestrator imports to have CSI storage: it starts the shim, keeps it running, and calls it.
//
//	h, err := host.Open(ctx, host.Config{StateDir: "/var/lib/mine/csi", Node: "node1", Shim: host.Binary{Path: "/usr/bin/holdfast-shim"}})
//	job, err := h.Parse(ctx, host.Source{Name: "plugin.hcl", Text: text}, host.ParseOptions{})
//	plan, err := h.TaskStarting(ctx, host.AllocTask{...})   // apply the plan, then start the task
//	err = h.TaskStarted(ctx, task, attempt)                 // ... and later TaskExited
//	plans, err := h.PrepareAlloc(ctx, host.AllocGroup{...}) // before the tasks that use volumes start
//	err = h.ReleaseAlloc(ctx, alloc)                        // after they have ended
//
// Open verifies the shim's binary, runs it as a process of its own and answers when it is active. A shim that dies is started again;
// calls wait for it (gate.go), at most Config.MaxHold, and their own deadline goes on running. A call that was cut off is made again with
// the same operation id, so it happens once. Watch, Fingerprints and Restarts go on over it.
//
// Swap replaces the running shim by another binary without any of that being noticed but by a few milliseconds in which calls wait (swap.go is
// the protocol). Standing tells how the shim stands without asking it, and Swaps what earlier swaps came to.
//
// One state directory has one host, held by a lock; what the shim keeps there outlives both. After a restart of the host, Open with
// Config.Living tells the shim what still runs, and what it does not name is taken down.
//
// This package knows no schema: not csi_plugin, not HCL, not CSI. Those live in the shim, which is why they can change without a new host.
package host
