// Package host is the SDK that an orchestrator imports for CSI storage. It starts the shim, keeps it running, and
// calls it.
//
//	h, err := host.Open(ctx, host.Config{StateDir: "/var/lib/mine/csi", Shim: host.Binary{Path: "/usr/bin/shim"}})
//	job, _, err := h.Parse(ctx, host.Source{Name: "plugin.hcl", Text: text}, host.ParseOptions{})
//	plan, err := h.TaskStarting(ctx, host.AllocTask{...})   // apply the plan, then start the plugin's task
//	err = h.TaskStarted(ctx, task, attempt)                 // ... and later TaskExited
//	plans, err := h.PrepareAlloc(ctx, host.AllocGroup{...}) // before the tasks that use volumes start
//	err = h.ReleaseAlloc(ctx, alloc)                        // after they have ended
//
// Open verifies the shim's binary, starts it as a process and returns when it is active. A shim that dies is started
// again. Meanwhile calls wait (gate.go), at most Config.MaxHold, and their own deadlines run. A call that was cut off
// is repeated with the same operation ID, so it is done once. Watch continues at the next shim.
//
// A call that needs a plugin waits for a healthy one until ctx ends. Meanwhile Allocs and Volumes say what it waits
// for.
//
// Swap replaces the running shim with another binary. Calls wait for a few milliseconds and none fails; swap.go
// is the protocol. ShimState returns the shim's state without a call to it, Swaps the outcome of earlier swaps.
//
// A state directory has one host at a time, held by a lock. The shim's state in it outlives both. After a restart of
// the host, Open with Config.Workload tells the shim what still runs; the shim takes down the rest.
//
// This package holds no schema: not csi_plugin, not HCL, not CSI. Those are in the shim, so they can change without a
// new host.
package host
