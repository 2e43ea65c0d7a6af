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
//	store before, store after   before and after a commit of shim.db; the callers of the commit wait for both. With
//	                            etcd, shim.db has a copy of the records that nodes share
//	etcd before                 before a transaction with shared records is sent to etcd
//	serving 200ms               so long after each activation that succeeded, on a goroutine of its own; a second line
//	                            counts from the end of the first. If an action ends the process within milliseconds,
//	                            the answer to Activate may not be sent; at Callbacks.Serve before it was sent
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
//	kill-host         SIGKILL to the parent process, which must not be the test's own process
//	kill-other        SIGKILL to the host's other shims; continue when they are dead
//	kill-at FILE      at a point of a commit: append the point and what the commit writes as a line to FILE.trace.
//	                  FILE may hold a number n and such a line. At the n-th commit with that point whose writes
//	                  include those of the line, remove FILE and SIGKILL
//	touch FILE        create the file, to tell the test that the point was reached
//	wait-for FILE     continue once the file exists, which the test creates
//	schema 99         turn the copy of the state that will be rehearsed into one of this schema (at Rehearse before)
//
// How often: always; with a final "times 2" at most twice per process; with a final "once FILE" only in the process
// that creates FILE, and there once.
package fault
