// Package csifake is a CSI plugin for tests: an honest one that keeps what it is told, that a script makes slow, sick,
// hung, hostile, lying or dead at a named point, and that writes every call in a journal. The journal is then held
// against what CSI demands of a client. It serves CSI 1.13.0 on a unix socket, in the process of the test (Start) or as
// a process of its own (cmd/csifake), which a test may kill; or without a socket, at a Port.
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
// though it may still run, and its answer teaches nobody.
//
// # The rules
//
//	R0   a journal is readable and has calls in it
//	R1   capabilities are learnt, from every instance, before anything else, and only advertised RPCs, access modes,
//	     sources and mount groups are asked for; what was set up under a capability may be taken down after it has vanished
//	R2   order up: ControllerPublish OK, NodeStage OK, NodePublish; an ephemeral volume is only published and unpublished
//	R3   at most one call in flight per volume, across instances (Options.Strict, Options.ByNode)
//	R4   order down: NodeUnpublish all OK, NodeUnstage OK, ControllerUnpublish OK, DeleteVolume
//	R6   a retry after an uncertain outcome has identical fields, secrets aside
//	R8   in the end every target is unpublished, every staged path unstaged, every attachment undone (Options.Settled)
//	R9   the staging path is absolute and is a directory as NodeStage arrives
//	R10  one staging path per volume and node, of that volume alone
//	R11  target paths are unique; the parent exists and the target does not as NodePublish arrives
//	R12  staging_target_path is set on NodePublish, stats, health and NodeExpand if and only if the plugin stages;
//	     volume_path is where the volume is
//	R13  publish_context and volume_context are passed on unchanged
//	R14  node_id is what NodeGetInfo said, at most 256 bytes, and never empty: an empty one detaches from every node
//	R15  readonly is set on ControllerPublish only with PUBLISH_READONLY
//	R16  a capability that ValidateVolumeCapabilities did not confirm is not used
//	R17  a volume of a single-node mode is on one node, and at one target unless many may write; publications that are
//	     beside each other have one capability
//	R18  no field is longer than CSI allows; ids and contexts that the plugin gave come back whole, up to 4 KiB and 64 KiB
//	R19  no path is longer than Options.MaxPath
//	R20  a plugin whose name breaks the rules gets no volumes
//	R21  names have no control characters
//	R23  keys of secrets are of A-Z, a-z, 0-9, dot, underscore and dash
//	R25  ControllerUnpublish gets the secrets that ControllerPublish got, as far as their keys tell
//	R26  topology is asked for only if advertised; a volume goes only to nodes that it can be reached from
//	R27  Probe is not called more often than Options.ProbesPerMinute
//	R28  no node has more volumes attached than it said
//	R29  a list goes on with a token that the plugin gave, for no more than Options.MaxPages pages
//	R30  NodeExpand only after ControllerExpand asked for it, to no more than that, where the volume is staged or published,
//	     and not again after FAILED_PRECONDITION while it is; OFFLINE expansion only of a volume that is not in use
//	R31  CSI_ENDPOINT is unix:// and an absolute path that ends in .sock
//	RU   from an uncertain outcome only the same call or its negation; what was sent is undone in the end
//
// The numbers are those of the project's table of CSI rules; those that are missing cannot be seen from the plugin. R5,
// that publications are counted across restarts, is R4 seen from outside; R7, that an ambiguous creation is cleared up,
// is RU.
//
// # What can be scripted
//
// A Rule is a line of a script. A test writes it as Rule, or as On(rpc) and so on (Expect); the process form reads a
// JSON list of rules from a file (--script), anew for every call, and keeps how often they matched in a file beside it,
// so that "crash once" is once also after the restart. The words are those of the file.
//
//	which       rpc        an RPC; empty is every one; accept: a connection (a knock counts); fuse: what the kernel asks of a mount
//	            volume     its id; empty is every one
//	            nth times  the first matching call to act on, and on how many
//	            when       before the effect, in the middle of it (something is mounted or unmounted, not all is done), after it
//	takes time  delay      so long; the effect may be late, it does not end with the caller
//	            until      until a file exists; a test in the process has a Gate
//	            hang       context: until the caller gives up; forever: until the plugin ends
//	ends it     drop       the connection is cut, with all its calls
//	            crash      the plugin dies
//	            code       any gRPC code, CODE_99 for one that it does not have; message, text_bytes (1 MiB) and details of the status
//	            late       with code or drop: the effect comes so much later all the same, and the volume is busy until then
//	            mount_late with publish and unpublish: they answer OK, and the mount comes or goes so much later
//	flaps       pattern    ok, not_ready, error, hang or the name of a code, one after the other and over again: by the call, or
//	            every      so long each
//	lies (lie)  no-effect  OK, and nothing is done
//	            no-mount elsewhere symlink wrong-data stacked   of stage (but symlink) and publish
//	            writable   of publish: read-only was asked for
//	            keep-mount leave-target                         of unstage (but leave-target) and unpublish
//	            ignore-source                                   of CreateVolume: the volume is empty, and the answer names no source
//	answers     not_ready  of Probe and CreateSnapshot
//	            condition  abnormal and message of the volumes in the answer, as CSI had it up to 1.12
//	            reply      any message, in protobuf's JSON
//	  hostile   empty nil huge big-map id-empty id-4097 id-257 bad-utf8 negative unknown-enum   of all that have it in them
//	            name-changes name-empty name-64 name-illegal                                   of GetPluginInfo
//	            topology-illegal topology-twins                                                of NodeGetInfo and volumes
//	            confirm-part confirm-nothing confirm-more                                      of ValidateVolumeCapabilities
//	            same-id                                                                        of CreateVolume
//	            repeat-ids token-loop endless empty-pages many unknown-nodes                   of lists
//	connection  garbage    http1 tls random close silence, instead of gRPC
//
// Capabilities that change from one start to the next are Config.CapsLater (--caps-later); what is mounted is
// Config.Mount and Config.Block (--mount, --block); how long ids are and what they hold is Config.IDs (--ids). A test
// in the process may also rewrite answers with a function (Rule.Answer).
//
// A call for a volume that another call is changing, also at another plugin that shares the Backend in this process, is
// answered ABORTED, before any rule sees it. A plugin for Go cannot write invalid UTF-8, nor read it: bad-utf8 is
// INTERNAL for a caller in Go, and the journal says that the answer was Lost.
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
