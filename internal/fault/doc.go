// Package fault makes shims that fail on purpose, for tests. Such a shim is the program shim/internal/faulty: the real
// shim with faults at named points. The faults are lines after its executable:
//
//	path := fault.Binary(t, faulty, dir, "hangs", "Activate before hang") // a shim with a digest of its own
//	report, err := h.Swap(ctx, host.Binary{Path: path})
//
// A line has a point, an action, and how often. Lines of one point are executed in order. Without lines the shim is
// good.
//
// Points:
//
//	start                       in main, before the handshake
//	Activate before             before a method of the service Control: Hello, Status, Snapshot, Rehearse, Quiesce,
//	                            Release, Activate
//	Activate after              after it, if it succeeded, before the answer is sent
//	Allocs.Prepare before       before a method of another service
//	store before, store after   around a commit of shim.db, whose callers wait until after the second one. With etcd,
//	                            shim.db has a copy of the records that nodes share
//	etcd before                 before a transaction with shared records is sent to etcd
//	serving 200ms               so long after each activation that succeeded, on a goroutine of its own; a second line
//	                            counts from the end of the first. What ends the process within milliseconds may
//	                            overtake the answer to Activate; Callbacks.Serve before does not
//
// Actions:
//
//	hang              wait until the process is killed
//	exit, panic       end the process with code 3, or by a panic
//	kill-self         SIGKILL
//	freeze            SIGSTOP; SIGCONT from outside continues
//	error             answer with the gRPC code Internal without a detail, which no good shim does
//	error unavailable answer with an error of this kind: invalid, conflict, unavailable, fenced, exhausted, damaged,
//	                  internal
//	kill-host         SIGKILL to the parent process; not where that is the test's own process
//	kill-other        SIGKILL to the host's other shims; continue when they are dead
//	kill-at FILE      at a point of a commit: append the point and what the commit writes as a line to FILE.trace.
//	                  FILE may hold a number and such a line. At the commit of that number that has the same point and
//	                  writes all that the line names, remove FILE and SIGKILL
//	touch FILE        create the file, to tell the test that the point was reached
//	wait-for FILE     continue once the file exists; the test does something meanwhile
//	schema 99         turn the copy of the state that will be rehearsed into one of this schema (at Rehearse before)
//
// How often: always; with a final "times 2" at most twice per process; with a final "once FILE" once over all
// processes, which create FILE.
package fault
