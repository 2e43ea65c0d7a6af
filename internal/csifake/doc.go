// Package csifake is a CSI plugin for tests. It keeps the state of volumes as an honest plugin does. A script makes it
// slow, sick, hung or dead at a named point. It writes every call into a journal, which Check compares with what CSI
// demands of a client. It serves CSI 1.13.0 on a unix socket, in the process of the test (Start) or as a process of its
// own (cmd/csifake), which a test may kill; or without a socket, at a Port.
//
//	path := csifake.NewJournal(t, journal.Options{Settled: true}) // judged as the test ends
//	fake := csifake.Start(t, csifake.Config{Journal: path, Caps: []string{"STAGE_UNSTAGE"}})
//	fake.On("NodeStageVolume").Times(1).After().Code(codes.Internal, "stuck") // staged, but it says INTERNAL
//	... drive the code under test against fake.Socket() ...
//
// # The automaton
//
// For every volume on every node, with C = PUBLISH_UNPUBLISH_VOLUME and S = STAGE_UNSTAGE_VOLUME:
//
//	        CreateVolume         [C] ControllerPublish         [S] NodeStage           NodePublish t
//	ABSENT ------------> CREATED --------------------> NODE_READY ------------> VOL_READY ------------> PUBLISHED t
//	       <------------         <--------------------            <------------           <------------
//	        DeleteVolume         [C] ControllerUnpublish       [S] NodeUnstage         NodeUnpublish t
//
// An ephemeral inline volume goes from ABSENT to PUBLISHED t and back. A snapshot is an edge of its own.
//
// Every edge is down, up, failed or unsure. It is unsure from the moment its call is sent. An answer makes it certain:
// OK makes it up or down; a refusal leaves an edge that was up as it was, and makes any other failed, which is to say
// that part of the effect may be there. These answers say nothing, and neither does no answer, nor one that cannot be
// read, nor a volume without an id: CANCELLED, DEADLINE_EXCEEDED, UNAVAILABLE, ABORTED, RESOURCE_EXHAUSTED, UNKNOWN,
// INTERNAL, DATA_LOSS, and codes that gRPC does not have. An unsure edge may be sent the same call with the same
// fields, or its negation. A step up needs the edge before it up; a step down needs the edges after it down. Edges that
// do not depend on each other, say two targets, do not wait for each other.
//
// A call whose caller has gone (cancelled, past its deadline, connection lost) is no longer in flight for the caller,
// though it may still run, and its answer reaches no client.
//
// # The rules
//
// journal.Rules lists them. The numbers are those of the project's table of CSI rules; those that are missing cannot be
// seen from the plugin. R5, that publications are counted across restarts, is R4 seen from outside; R7, that an
// ambiguous creation is cleared up, is RU.
//
// # Scripts
//
// A script is a list of rules. A test writes a rule as Rule, or as On(rpc) and so on (Expect). The process reads a JSON
// list of rules from a file (--script), again for every call. It keeps how often each rule has matched in a file beside
// it, so that "crash once" is once also after the restart.
//
//	which       rpc        an RPC; empty is every one; fuse: requests of the kernel to a FUSE mount
//	            volume     its id; empty is every one
//	            nth times  the first matching call to act on, and on how many
//	            when       before the effect, in the middle of it (the first of two steps is done), after it
//	takes time  delay      so long; the effect may be late, it does not end with the caller
//	            until      until a file exists; a test in the process has a Gate
//	            hang       context: until the caller gives up; forever: until the plugin ends
//	ends it     drop       the connection is cut, with all its calls
//	            crash      the plugin dies
//	            code       any gRPC code, CODE_99 for an unknown one; message of the status
//	answers     not_ready  of Probe and CreateSnapshot
//	            condition  health of the volumes or storage in the answer: VolumeCondition up to CSI 1.12, then statuses
//	            bad_utf8   strings are invalid UTF-8
//	            ignore_source of CreateVolume: the volume is empty, and the answer names no source
//
// Config.Spec (--spec) makes it a plugin built on one version of CSI, 1.0 to 1.13 or a future one: without
// newer RPCs, capabilities and fields, or with unknown ones. To an unknown RPC the future one answers with the request.
//
// A test in the process may also rewrite answers with a function (Rule.Answer). What is mounted is Config.Mount and
// Config.Block (--mount, --block). How long ids are, and of which characters, is Config.IDs (--ids).
//
// A call for a volume that another call is changing, also at another plugin that shares the Backend in this process, is
// answered ABORTED, before any rule sees it. A plugin for Go cannot write invalid UTF-8, nor read it: bad_utf8 is
// INTERNAL for a caller in Go, and the journal marks the answer as Lost.
//
// # What survives
//
// A Backend with a file survives the plugin, and so does the journal. A killed plugin leaves its socket file, its calls
// open in the journal, and its mounts; FUSE mounts are dead then, and loop devices live on. With Config.Forgetful
// (--forgetful) its next start finds the Backend empty, as after a kill while the state file was being written: it
// answers NOT_FOUND for a volume that was not used since, and OK for a publication that it does not know, and takes
// nothing down for either. The journal says that it forgot; what its client knows, and may do, is the same as
// before. Nothing but tests and cmd/csifake may import this package.
package csifake
