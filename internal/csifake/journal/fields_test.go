package journal

import (
	"testing"
)

const (
	writer  = "mount(ext4,0 flags) SINGLE_NODE_WRITER"
	sole    = "mount(ext4,0 flags) SINGLE_NODE_SINGLE_WRITER"
	several = "mount(ext4,0 flags) SINGLE_NODE_MULTI_WRITER"
	shared  = "mount(ext4,0 flags) MULTI_NODE_MULTI_WRITER"
)

func using(usage string, l Line) Line { return with(l, func(l *Line) { l.Usage = usage }) }

func at2(l Line) Line { return with(l, func(l *Line) { l.Target = "/t/2" }) }

var (
	inline  = Line{RPC: "NodePublishVolume", Volume: "e1", Target: "/t/e", Ephemeral: true, VolumeContext: "own"}
	outline = Line{RPC: "NodeUnpublishVolume", Volume: "e1", Target: "/t/e"}
	stats   = Line{RPC: "NodeGetVolumeStats", Volume: "v1", Staging: "/s/v1", Path: "/t/1"}
	list    = Line{RPC: "ListVolumes"}
	snap    = Line{RPC: "CreateSnapshot", Volume: "v1", Name: "snap"}
	modify  = Line{RPC: "ControllerModifyVolume", Volume: "v1", Hash: "m", Mutable: []string{"tier"}}
	unsnap  = Line{RPC: "DeleteSnapshot", Snapshot: "s1"}
)

// everything has all capabilities that a plugin can announce.
var everything = []string{"CREATE_DELETE_VOLUME", "PUBLISH_UNPUBLISH_VOLUME", "STAGE_UNSTAGE_VOLUME", "LIST_VOLUMES",
	"CREATE_DELETE_SNAPSHOT", "EXPAND_VOLUME", "GET_VOLUME_STATS", "SINGLE_NODE_MULTI_WRITER", "VOLUME_MOUNT_GROUP",
	"CLONE_VOLUME", "MODIFY_VOLUME"}

func (s *history) called(name string) *history {
	return s.call(Line{RPC: "GetPluginInfo"}, "OK", &Answer{Name: name})
}

func (s *history) validated(usage string, denied ...string) *history {
	l := Line{RPC: "ValidateVolumeCapabilities", Volume: "v1", VolumeContext: "vc", Usages: []string{usage}}
	return s.call(l, "OK", &Answer{Denied: denied})
}

// elsewhere adds a second node.
func (s *history) elsewhere() *history {
	return s.at("b", "b1").learn(everything...).call(Line{RPC: "NodeGetInfo"}, "OK", &Answer{Node: "n2"})
}

func on2(l Line) Line { return with(l, func(l *Line) { l.Node = "n2" }) }

// zoned creates a volume in zone z1 while node n1 is in the given zone.
func zoned(zone string) *history {
	zone1 := []map[string]string{{"Zone": "z1"}}
	at := &Answer{Node: "n1", Segments: []map[string]string{{"zone": zone}}}
	return newHistory().learn(everything...).call(Line{RPC: "NodeGetInfo"}, "OK", at).
		call(create, "OK", &Answer{Volume: "v1", VolumeContext: "vc", Segments: zone1})
}

func room(most int64) *history {
	return newHistory().learn().call(Line{RPC: "NodeGetInfo"}, "OK", &Answer{Node: "n1", MaxVolumes: most}).
		ok(create, attach, with(attach, func(l *Line) { l.Volume = "v2" }))
}

func expanding(how ...string) *history {
	return newHistory().call(Line{RPC: "GetPluginCapabilities"}, "OK",
		&Answer{Caps: []string{"CONTROLLER_SERVICE"}, Expansion: how}).
		call(Line{RPC: "ControllerGetCapabilities"}, "OK", &Answer{Caps: everything}).
		call(Line{RPC: "NodeGetCapabilities"}, "OK", &Answer{Caps: everything}).call(Line{RPC: "NodeGetInfo"}, "OK",
		&Answer{Node: "n1"})
}

func started(endpoint string) *history {
	return &history{lines: []Line{{Kind: Start, Run: "a1", Endpoint: endpoint}, {Kind: Begin, RPC: "Probe"}}}
}

// fieldBreaches break rules about the content of a call.
var fieldBreaches = []breach{
	{"R1", "a mode that is not advertised", newHistory().learn().ok(create, using(sole, attach)), Options{}},
	{"R1", "a mode at creation that is not advertised",
		newHistory().learn().ok(with(create, func(l *Line) { l.Usages = []string{writer, several} })), Options{}},
	{"R1", "a mount group that is not advertised",
		newHistory().learn().ok(create, attach, with(stage, func(l *Line) { l.MountGroup = true })), Options{}},
	{"R1", "a clone that is not advertised", newHistory().learn().ok(with(create, func(l *Line) {
		l.Source = "volume v0"
	})), Options{}},
	{"R1", "a restored snapshot that is not advertised",
		newHistory().learn().ok(with(create, func(l *Line) { l.Source = "snapshot s0" })), Options{}},
	{"R2", "an ephemeral volume is staged",
		newHistory().learn().ok(inline, with(stage, func(l *Line) { l.Volume, l.Staging = "e1", "/s/e" })), Options{}},
	{"R2", "a snapshot of a deleted volume", newHistory().learn(everything...).ok(create, remove, snap), Options{}},
	{"R2", "a volume of a deleted snapshot", newHistory().learn(everything...).ok(create).call(snap, "OK",
		&Answer{Snapshot: "s1"}).
		ok(unsnap, with(create, func(l *Line) { l.Name, l.Source = "two", "snapshot s1" })), Options{}},
	{"R6", "another request after an answer without an id", newHistory().learn().call(create, "OK", &Answer{}).
		call(with(create, func(l *Line) { l.Hash = "other" }), "OK", &Answer{Volume: "v1"}), Options{}},
	{"R6", "another request after an answer that could not be read", func() *history {
		s := newHistory().learn().ok(create)
		n := s.begin(attach)
		s.add(Line{Kind: End, Call: n, Run: s.run, Code: "OK", Lost: true})
		return s.ok(with(attach, func(l *Line) { l.Hash = "other" }))
	}(), Options{}},
	{"R1", "mutable parameters that are not advertised",
		newHistory().learn().ok(with(create, func(l *Line) { l.Mutable = []string{"tier"} })), Options{}},
	{"R6", "a modification that leaves out an uncertain parameter", newHistory().learn(everything...).ok(create).
		call(modify, "INTERNAL", nil).ok(with(modify, func(l *Line) { l.Hash, l.Mutable = "other", []string{"iops"} })),
		Options{}},
	{"R8", "an ephemeral volume in the end", newHistory().learn().ok(inline), Options{Settled: true}},
	{"R12", "an ephemeral volume with a staging path", newHistory().learn().ok(with(inline, func(l *Line) {
		l.Staging = "/s/e"
	})), Options{}},
	{"R12", "stats without the staging path", newHistory().learn(everything...).ok(create, attach, stage, publish).
		ok(with(stats, func(l *Line) { l.Staging = "" })), Options{}},
	{"R12", "stats where the volume is not",
		newHistory().learn(everything...).ok(create, attach, stage, publish, unpublish, stats), Options{}},
	{"R14", "a node without an id gets a volume",
		newHistory().learn().call(Line{RPC: "NodeGetInfo"}, "OK", &Answer{}).ok(create, stage), Options{}},
	{"R16", "a capability that was not confirmed",
		newHistory().learn().ok(create).validated(writer, writer).ok(using(writer, attach)), Options{}},
	{"R17", "a single-node volume on two nodes",
		newHistory().learn().ok(create, using(writer, attach)).elsewhere().ok(on2(using(writer, attach))), Options{}},
	{"R17", "a single-node volume at two targets",
		newHistory().learn().ok(create, attach, stage, using(writer, publish), at2(using(writer, publish))), Options{}},
	{"R18", "a name of 129 bytes", newHistory().learn().ok(with(create, func(l *Line) {
		l.Over = []string{"name: 129 bytes"}
	})), Options{}},
	{"R20", "a plugin with a name that is none", newHistory().learn().called("no name").ok(create), Options{}},
	{"R21", "a name with a control character", newHistory().learn().ok(with(create, func(l *Line) {
		l.Name = "a\x7fb"
	})), Options{}},
	{"R23", "a key with a slash", newHistory().learn().ok(with(create, func(l *Line) {
		l.SecretKeys = []string{"a/b"}
	})), Options{}},
	{"R25", "a detach without secrets",
		newHistory().learn().ok(create, with(attach, func(l *Line) { l.SecretKeys = []string{"k"} }), detach),
		Options{}},
	{"R26", "topology that is not advertised", newHistory().learn().ok(with(create, func(l *Line) {
		l.Topology = true
	})), Options{}},
	{"R26", "a node that is elsewhere", zoned("z2").ok(attach), Options{}},
	{"R28", "one volume too many", room(1), Options{}},
	{"R29", "a token out of nowhere", newHistory().learn(everything...).ok(with(list, func(l *Line) { l.Token = "t" })),
		Options{}},
	{"R30", "offline expansion of an attached volume", expanding("OFFLINE").ok(create, attach, enlarge), Options{}},
	{"R31", "an endpoint that is no socket", started("tcp://localhost:1"), Options{}},
	{"RU", "a snapshot of which nobody learn",
		newHistory().learn(everything...).ok(create).call(snap, "DEADLINE_EXCEEDED", nil), Options{Settled: true}},
}

// The same fields with correct values break no rule.
func TestCheckAcceptsLegalFields(t *testing.T) {
	cases := map[string]struct {
		journal *history
		opts    Options
	}{
		"an ephemeral volume": {newHistory().learn().ok(inline).call(outline, "ABORTED", nil).ok(outline), Options{}},
		"twice an ephemeral volume": {newHistory().learn().ok(inline, outline).
			ok(with(inline, func(l *Line) { l.VolumeContext = "x" }), outline), Options{}},
		"details that are advertised": {newHistory().learn(everything...).ok(
			with(create, func(l *Line) { l.Usages, l.Source = []string{several}, "volume v0" }), using(several, attach),
			with(using(several, stage), func(l *Line) { l.MountGroup = true }), using(several, publish),
			at2(using(several, publish)), at2(unpublish)).ok(takeDown()...), Options{}},
		"stats where it is": {newHistory().learn(everything...).ok(create, attach, stage, publish, stats,
			with(stats, func(l *Line) { l.Path = "/s/v1" })).ok(takeDown()...), Options{}},
		"stats of an ephemeral volume": {newHistory().learn(everything...).ok(inline,
			with(stats, func(l *Line) { l.Volume, l.Staging, l.Path = "e1", "", "/t/e" }), outline), Options{}},
		"confirmed after all": {newHistory().learn().ok(create).validated(writer, writer).validated(writer).
			ok(using(writer, attach), detach, remove), Options{}},
		"another capability was denied": {newHistory().learn().ok(create).validated(shared, shared).
			ok(using(writer, attach), detach, remove), Options{}},
		"one node after the other": {newHistory().learn().ok(create, using(writer, attach), detach).elsewhere().
			ok(on2(using(writer, attach)), on2(detach), remove), Options{}},
		"many nodes at once": {newHistory().learn().ok(create, using(shared, attach)).elsewhere().
			ok(on2(using(shared, attach)), on2(detach), detach, remove), Options{}},
		"one target after the other": {newHistory().learn().ok(create, attach, stage, using(writer, publish),
			unpublish).
			ok(at2(using(writer, publish)), at2(unpublish), unstage, detach, remove), Options{}},
		"a good name":             {newHistory().learn().called("csi.example-1.org").ok(create, remove), Options{}},
		"a name that became good": {newHistory().learn().called("").called("good").ok(create, remove), Options{}},
		"the same secrets": {newHistory().learn().ok(create,
			with(attach, func(l *Line) { l.SecretKeys = []string{"k"} }),
			with(detach, func(l *Line) { l.SecretKeys = []string{"k"} }), remove), Options{}},
		"the right zone": {zoned("z1").ok(attach, detach, remove), Options{}},
		"as many as there is room for": {room(2).ok(with(detach, func(l *Line) { l.Volume = "v2" }),
			with(attach, func(l *Line) { l.Volume = "v3" }), with(detach,
				func(l *Line) { l.Volume = "v3" }), detach, remove), Options{}},
		"pages": {newHistory().learn(everything...).call(list, "OK", &Answer{Next: "t"}).
			call(with(list, func(l *Line) { l.Token = "t" }), "OK", &Answer{}).call(list, "OK",
			&Answer{}), Options{}},
		"offline expansion": {expanding("OFFLINE").ok(create, attach, detach, enlarge, remove), Options{}},
		"online expansion":  {expanding("OFFLINE", "ONLINE").ok(create, attach, enlarge, detach, remove), Options{}},
		"expansion on the node": {newHistory().learn("EXPAND_VOLUME").ok(direct).call(enlarge, "OK",
			&Answer{NodeExpand: true, Bytes: 3}).
			call(with(grow, func(l *Line) { l.Bytes = 3 }), "FAILED_PRECONDITION", nil).ok(unpublish, direct).
			call(with(grow, func(l *Line) { l.Bytes = 3 }), "INTERNAL", nil).ok(unpublish, direct).
			call(enlarge, "OK", &Answer{NodeExpand: true, Bytes: 4}).ok(with(grow, func(l *Line) { l.Bytes = 4 }),
			unpublish), Options{}},
		"a socket": {started("unix:///run/csi.sock"), Options{}},
		"a snapshot": {newHistory().learn(everything...).ok(create).call(snap, "INTERNAL", nil).call(snap, "OK",
			&Answer{Snapshot: "s1"}).
			call(unsnap, "ABORTED", nil).ok(unsnap, remove), Options{}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			c.opts.Settled, c.opts.Strict = true, true
			for _, v := range Check(c.journal.lines, c.opts) {
				t.Error(v)
			}
		})
	}
}
