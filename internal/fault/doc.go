// Package fault makes shims that fail on purpose, for tests. Such a shim is the real one (program shim/internal/faulty: the same tenure, the
// same bootstrap) that does something else as well, at points of its life that are named in lines behind its executable:
//
//	faulty := fault.Build(dir, flags...)                                        // once per test package, in TestMain
//	path := fault.Binary(t, faulty, w.dir, "hangs", "Activate before hang")     // a shim of a digest of its own
//	report, err := w.host.Swap(ctx, host.Binary{Path: path})
//
// A line is a point, an action, and how often. Several lines of one point are done in their order. Without lines it is a good shim.
//
// Points:
//
//	start                       in main, before the handshake
//	Activate before             a method of the service Control: Hello, Status, Snapshot, Rehearse, Quiesce, Release, Activate
//	Activate after              its work is done, without an error, and its answer not sent
//	Allocs.Prepare before       a method of another service
//	serving 200ms               so long after each activation that went well, on a goroutine of its own; a second line counts from the end of the first.
//	                            What ends the process within milliseconds may overtake the answer to Activate; Callbacks.Serve before is sure not to
//
// Actions:
//
//	hang              until the process is killed, whatever ends meanwhile
//	slow 300ms        goes on later
//	exit, panic       end the process, with code 3 and by a panic
//	kill-self         SIGKILL
//	freeze            SIGSTOP; SIGCONT from outside lets it go on
//	error             answers with an error that no shim of ours makes (the code Internal, without a detail)
//	error unavailable answers with an error of ours of that kind: invalid, conflict, unavailable, fenced, exhausted, damaged, internal
//	kill-host         SIGKILL for who has started it. Not where that is the test's own process
//	kill-other        SIGKILL for the host's other shims, and goes on when they are dead
//	touch FILE        makes the file: says that the point was reached
//	wait-for FILE     goes on once the file is there: the test does something from outside meanwhile
//	rubbish           prints lines that are no handshake to where the host reads it from, and goes on
//	noise             prints what breaks readers of logs to stderr, and goes on: {"@message":5}, a line of 1 MiB, no UTF-8
//	fork              leaves a child that holds the pipes, and goes on
//	protocol 7        speaks that version of the protocol only (at start)
//	arrivals FILE     notes each call from then on as the connection brings it, in a line: its name, and how long its caller waits (at start)
//	schema 99         turns the copy of the state that it is to rehearse into one of that schema (at Rehearse before)
//
// How often: always; with a final "times 2" so often in each process; with a final "once FILE" once over all processes, which make FILE.
package fault
