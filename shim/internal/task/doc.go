// Package supervise watches one start of a plugin task: it waits for the plugin's socket, probes it, asks it what it is, registers it, and
// then lets it prove with a heartbeat that it lives. Each task has one connection and one prober; one that hangs delays no other.
//
//	starting ──good probe and identity──> healthy <──probe──> unhealthy (gone | missed heartbeats | not ready)
//	   └──health_timeout──> a restart is asked for, once
//
// A lost connection that nobody answers anew makes the plugin unhealthy at once; a probe that fails or gets no answer in time is a miss, and
// only Failures misses in a row do. Every change of health is one event of the task with its cause, for all its roles in one commit (V1.
// TestOneEventPerChange). A plugin that was healthy once is never restarted for its health: its mounts may be in use.
//
// What a plugin says of itself is asked for again every ten minutes and whenever its connection says that it may be outdated. A plugin that
// was gone is healthy again only after it has told what it is: it may be another one (V2. TestComesBackAsAnother).
//
// What survives the process is in the records: a new shim goes on with a registered plugin as it was, and with the health timeout of one
// that is still starting (V3. TestHealthTimeoutOverRestart). A full disk delays what is recorded and ends no watch (V4. TestFullDisk).
package task
