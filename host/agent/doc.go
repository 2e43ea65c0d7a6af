// Package agent is the reference orchestrator: it runs jobs on this machine, and gives them CSI storage through package host.
//
// A job has groups, a group is placed count times, each placement is an alloc, an alloc has tasks, a task is started by a driver, and
// each start is an attempt. The agent mints the ids of allocs, keeps what it does in a ledger below <state>/agent, and writes each step
// there before it takes it.
//
// Promises:
//
//   - No task of an alloc with volumes starts before they are prepared, and they are released only when all its tasks have ended. An alloc
//     whose volumes are not to be had yet waits, says for what, and tries again; stopping it ends the wait.
//   - Users of volumes go before the plugins that serve them, in a job that is stopped and when everything is taken down.
//   - A task that ends is started again under its restart policy. A restart that the shim asks for counts as a failure under the same
//     policy, and happens once for each attempt.
//   - A job that is submitted again keeps the allocs of unchanged groups; a changed group's alloc is stopped, and its successor is made
//     when it is gone.
//   - An agent that ends, however it ends, leaves tasks running. The next one adopts them, learns how others have ended meanwhile, and
//     tells the shim what lives.
//
// It is one machine's orchestrator: there is no scheduler, and constraints, networks, services, templates and the like of a job are
// carried and not acted on; Submit says which. It knows jobs as data only: not HCL, not csi_plugin, not CSI.
package agent
