// Package task keeps the tasks that run plugins: their records, and the supervision of those that run.
//
// Tasks takes the host's reports. It stores a record per task, so that a new shim supervises the task where the last
// one stopped. A restart that the supervisor asks for is part of that record until the host reports a newer attempt.
//
// Supervisor watches over one attempt: it waits for the plugin's socket, probes it, asks it what it is, registers it,
// and then probes it with a heartbeat. Each task has one connection and one prober; a plugin that hangs delays no
// other.
//
//	starting ──good probe and identity──> healthy <──probe──> unhealthy
//	   └──health_timeout──> a restart is asked for, once
//
// A lost connection that no process accepts anew makes the plugin unhealthy at once. A probe that fails or is not
// answered in time is a miss, and only Failures misses in a row make it unhealthy. Every change of health is one event
// of the task with its cause, for all its roles in one commit (V1. TestOneEventPerChange). A plugin that was healthy
// once is restarted for its health only if its stanza has restart_after, and not while it serves mounts in use.
//
// A plugin describes itself again every ten minutes and whenever its connection reports that the description may be
// outdated. After a loss it is healthy again only once it has described itself: it may be another process (V2.
// TestReturningPluginDescribesItselfBeforeItIsHealthy).
//
// What survives the process is in the records. A new shim leaves a registered plugin as it is, and continues the health
// timeout of one that is still starting (V3. TestHealthTimeoutOverRestart). A full disk delays what is recorded and
// ends no supervision (V4. TestFullDiskDelaysRegistration).
package task
