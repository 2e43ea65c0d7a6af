// Package csifake is a CSI plugin for tests. It keeps the state of volumes as a correct plugin does. A script can make
// it slow, sick, hung or dead at a named point. It writes every call to a journal, which Check compares with what CSI
// demands of a client. It serves CSI 1.13.0 on a unix socket, either in the process of the test (Start) or as a
// separate process (cmd/csifake), which a test may kill. In a synctest bubble it serves on a bufconn.Listener
// (Config.Listener).
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
// An ephemeral inline volume goes from ABSENT to PUBLISHED t and back. A snapshot is a separate edge.
//
// Every edge is down, up, failed or unsure. It is unsure from the moment its call is sent. An answer makes it certain.
// OK makes it up or down. A refusal leaves an edge that was up as it was, and makes any other edge failed: part of the
// effect may exist. Some answers leave it unsure: CANCELLED, DEADLINE_EXCEEDED, UNAVAILABLE, ABORTED,
// RESOURCE_EXHAUSTED, UNKNOWN, INTERNAL, DATA_LOSS, and codes that gRPC does not define. So do a missing answer, an
// unreadable one, and a new volume without an ID. For an unsure edge, only the same call with the same fields or its
// undo may be sent. A step up needs the edge before it up. A step down needs the edges after it down. Independent
// edges, such as two targets, do not wait for each other.
//
// If the caller of a call is gone (cancelled, past its deadline, connection lost), the call is no longer in flight for
// the caller. It may still run, but its answer reaches no client.
//
// # The rules
//
// journal.Rules lists them. The numbers are those of the project's table of CSI rules. Missing numbers are rules that
// cannot be checked from the plugin's side. A breach of R5 (publishes are counted across restarts) shows as one of R4,
// a breach of R7 (an ambiguous creation is resolved) as one of RU.
//
// # Scripts
//
// A script is a list of rules. A test writes a rule as a Rule, or with On(rpc) and the methods of Expect. The process
// reads a JSON list of rules from a file (--script), again for every call. It stores how often each rule has matched in
// a file beside it, so that "crash once" also means once over restarts.
//
//	which       rpc        an RPC; empty is every one; fuse: requests of the kernel to a FUSE mount
//	            volume     its id; empty is every one
//	            nth times  the first matching call to act on, and on how many
//	            when       before the effect, in the middle of it (the first of two steps is done), after it
//	takes time  delay      a duration; it does not end with the caller, so the effect may come late
//	            until      until a file exists; a test in the same process uses a Gate instead
//	            hang       context: until the caller gives up; forever: until the plugin ends
//	ends it     drop       the connection is cut, with all its calls
//	            crash      the plugin dies
//	            code       any gRPC code, CODE_99 for an undefined one; message is the text of the status
//	answers     not_ready  of Probe, CreateSnapshot and group snapshots
//	            condition  health of the volumes or storage in the answer: VolumeCondition up to CSI 1.12, then statuses
//	            bad_utf8   strings are invalid UTF-8
//	            ignore_source of CreateVolume: the volume is empty, and the answer names no source
//
// Config.Spec (--spec) makes it a plugin built on one version of CSI, 1.0 to 1.13 or a future one: without newer RPCs,
// capabilities and fields, or with unknown ones. The future plugin answers an unknown RPC with the request.
//
// A test in the same process may also rewrite answers with a function (Rule.Answer). Config.Mount and Config.Block
// (--mount, --block) select what is mounted. Config.IDs (--ids) selects the length and the characters of IDs.
//
// A call for a volume that another call is changing is answered ABORTED, before any rule sees it. That includes calls
// at other plugins that share the Backend in this process. Go's protobuf can neither write nor read invalid UTF-8. With
// bad_utf8, a caller in Go therefore gets INTERNAL, and the journal marks the answer as Lost.
//
// # What survives
//
// A Backend with a file survives the plugin, and so does the journal. A killed plugin leaves its socket file, its
// mounts, and its calls, which are open in the journal. FUSE mounts are dead then, and loop devices continue. With
// Config.Forgetful (--forgetful), the start after a kill finds the Backend empty, as if the kill came while the state
// file was being written. The plugin then answers NOT_FOUND for a volume that was not used since, and OK for the
// unpublish of an unknown publish. In both cases it unmounts nothing. The journal has a line that it forgot. The rules
// for its client stay the same. Only tests and cmd/csifake may import this package.
package csifake
