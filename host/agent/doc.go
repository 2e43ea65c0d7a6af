// Package agent is the reference orchestrator. It runs jobs on this node and gives them CSI storage through package
// host.
//
// A job has groups. A group is placed count times, and each placement is an alloc. An alloc has tasks. A task is
// started by a driver, and each start is an attempt. The agent creates the IDs of allocs. Before each step, it records
// the step in its ledger, <state>/agent/agent.db. Two facts are written only with the next step: that a task runs, and
// that it has ended as intended. An agent that finds the earlier record reads them from files in the task's directory.
//
// Promises:
//
//   - No task of an alloc starts before its volumes are prepared. The volumes are released only when all tasks have
//     ended. An alloc whose volumes are not available waits, reports the reason and retries, until it is stopped.
//   - Users of volumes are stopped before the plugins that serve them, when a job is stopped and when the agent
//     stops all jobs.
//   - A task that ends is restarted under its restart policy. A restart that the shim requests counts as a failure
//     under the same policy. It ends only the attempt that it was requested for.
//   - A job that is submitted again keeps the allocs of unchanged groups. An alloc of a changed group is stopped,
//     and replaced when it has ended. A plugin's old alloc is stopped when the new one is healthy and nothing needs
//     the old one.
//   - Tasks keep running when the agent ends, in whatever way. The next agent adopts those that still run, learns
//     how the others have ended, and tells the shim which tasks and allocs exist.
//
// The agent manages one node. It has no scheduler, and ignores constraints, networks, services and the like. Submit
// returns a warning for each. It knows jobs as data: no HCL, no csi_plugin and no CSI.
package agent
