// Package task keeps the records of the tasks that run plugins, and supervises running ones.
//
// Tasks receives the host's reports. It stores a record per task, so that a new shim continues the supervision of the
// task. A restart that the supervisor asks for is part of that record until the host reports a newer attempt.
//
// Supervisor supervises one attempt of a task. It waits for the plugin's socket, probes the plugin, asks it to describe
// itself, registers it, and then probes it with a heartbeat. Each task has one connection and one prober, so a plugin
// that hangs delays no other.
//
//	starting ──good probe and identity──> healthy <──probe──> unhealthy
//	   └──health_timeout──> a restart is asked for, once
//
// If the connection is lost and no process accepts a new one, the plugin becomes unhealthy at once. A probe that fails
// or has no answer in time is a miss, and only Failures misses in a row make the plugin unhealthy. Every change of
// health is one event of the task with its cause, for all its roles in one commit (V1. TestOneEventPerChange). A plugin
// that was healthy before is restarted for its health only if its stanza has restart_after, and not while it serves
// mounts in use.
//
// A plugin describes itself again every ten minutes, and whenever its connection reports that the description may be
// outdated. After a loss of the connection another process may answer, so the plugin is healthy again only after it has
// described itself (V2. TestReturningPluginDescribesItselfBeforeItIsHealthy).
//
// A new shim leaves a registered plugin as it is, and continues the health timeout of a plugin that is still starting
// (V3. TestHealthTimeoutOverRestart). A full disk delays records, and ends no supervision (V4.
// TestFullDiskDelaysRegistration).
package task
