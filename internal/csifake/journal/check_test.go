package journal

import (
	"slices"
	"strings"
	"testing"
)

// history builds a journal by hand.
type history struct {
	lines    []Line
	calls    uint64
	instance string
	run      string
}

func newHistory() *history { return &history{instance: "a", run: "a1"} }

func (s *history) add(l Line) { s.lines = append(s.lines, l) }

// at sets the instance and run of the following lines.
func (s *history) at(instance, run string) *history { s.instance, s.run = instance, run; return s }

func (s *history) begin(l Line) uint64 {
	s.calls++
	l.Kind, l.Call, l.Run, l.Instance, l.Plugin = Begin, s.calls, s.run, s.instance, "p"
	if l.Role == "" && strings.HasPrefix(l.RPC, "Node") {
		l.Role, l.Node = "node", "n1"
	}
	if l.Hash == "" {
		l.Hash = l.RPC + l.Volume + l.Name + l.Node + l.Staging + l.Target
	}
	s.add(l)
	return s.calls
}

func (s *history) end(call uint64, code string, a *Answer) *history {
	s.add(Line{Kind: End, Call: call, Run: s.run, Code: code, Answer: a})
	return s
}

func (s *history) abandoned(call uint64) *history {
	s.add(Line{Kind: Abandoned, Call: call, Run: s.run})
	return s
}

// call adds a call with its answer. An empty code means that there is no answer.
func (s *history) call(l Line, code string, a *Answer) *history {
	n := s.begin(l)
	if code != "" {
		s.end(n, code, a)
	}
	return s
}

// learn adds the calls that read all capabilities of a monolith.
func (s *history) learn(caps ...string) *history {
	if caps == nil {
		caps = []string{"CREATE_DELETE_VOLUME", "PUBLISH_UNPUBLISH_VOLUME", "STAGE_UNSTAGE_VOLUME"}
	}
	s.call(Line{RPC: "GetPluginCapabilities"}, "OK", &Answer{Caps: []string{"CONTROLLER_SERVICE"}})
	s.call(Line{RPC: "ControllerGetCapabilities"}, "OK", &Answer{Caps: caps})
	s.call(Line{RPC: "NodeGetCapabilities"}, "OK", &Answer{Caps: caps})
	return s.call(Line{RPC: "NodeGetInfo"}, "OK", &Answer{Node: "n1"})
}

var (
	create  = Line{RPC: "CreateVolume", Name: "one"}
	attach  = Line{RPC: "ControllerPublishVolume", Volume: "v1", Node: "n1", VolumeContext: "vc"}
	stage   = Line{RPC: "NodeStageVolume", Volume: "v1", Staging: "/s/v1", PublishContext: "pc", VolumeContext: "vc"}
	publish = Line{RPC: "NodePublishVolume", Volume: "v1", Staging: "/s/v1", Target: "/t/1", PublishContext: "pc",
		VolumeContext: "vc"}
	unpublish = Line{RPC: "NodeUnpublishVolume", Volume: "v1", Target: "/t/1"}
	unstage   = Line{RPC: "NodeUnstageVolume", Volume: "v1", Staging: "/s/v1"}
	detach    = Line{RPC: "ControllerUnpublishVolume", Volume: "v1", Node: "n1"}
	remove    = Line{RPC: "DeleteVolume", Volume: "v1"}

	direct  = with(publish, func(l *Line) { l.Staging, l.PublishContext = "", "" }) // without staging and attachment
	second  = with(publish, func(l *Line) { l.Target = "/t/2" })
	enlarge = Line{RPC: "ControllerExpandVolume", Volume: "v1"}
	grow    = Line{RPC: "NodeExpandVolume", Volume: "v1", Path: "/t/1"}
)

func (s *history) ok(lines ...Line) *history {
	for _, l := range lines {
		switch l.RPC {
		case "CreateVolume":
			s.call(l, "OK", &Answer{Volume: "v1", VolumeContext: "vc"})
		case "ControllerPublishVolume":
			s.call(l, "OK", &Answer{PublishContext: "pc"})
		default:
			s.call(l, "OK", nil)
		}
	}
	return s
}

func with(l Line, change func(*Line)) Line { change(&l); return l }

func published() *history { return newHistory().learn().ok(create, attach, stage, publish) }

func overlap(s *history, a, b Line) *history {
	first := s.begin(a)
	second := s.begin(b)
	return s.end(first, "OK", nil).end(second, "OK", nil)
}

// breach is a journal that breaks one rule.
type breach struct {
	rule    string
	name    string
	journal *history
	opts    Options
}

// orderBreaches break rules about the order of calls.
var orderBreaches = []breach{
	{"R0", "nothing was called", &history{lines: []Line{{Kind: Start, Run: "a1"}}}, Options{}},
	{"R1", "a call before capabilities are known",
		newHistory().ok(with(publish, func(l *Line) { l.Staging = "" })), Options{}},
	{"R1", "an RPC that is not advertised", newHistory().learn("STAGE_UNSTAGE_VOLUME").ok(create), Options{}},
	{"R1", "another instance has not been asked", published().at("b", "b1").ok(unpublish), Options{}},
	{"R1", "validate without a controller",
		newHistory().learn().at("b", "b1").ok(Line{RPC: "ValidateVolumeCapabilities", Volume: "v1"}), Options{}},
	{"R1", "capabilities whose answer nobody saw", func() *history {
		s := newHistory()
		n := s.begin(Line{RPC: "NodeGetCapabilities"})
		s.abandoned(n).end(n, "OK", &Answer{Caps: []string{"STAGE_UNSTAGE_VOLUME"}})
		return s.ok(stage)
	}(), Options{}},
	{"R2", "stage before attach",
		newHistory().learn().ok(create, with(stage, func(l *Line) { l.PublishContext = "" })), Options{}},
	{"R2", "publish before stage", newHistory().learn().ok(create, attach, publish), Options{}},
	{"R2", "attach after delete", published().ok(unpublish, unstage, detach, remove, attach), Options{}},
	{"R3", "two calls at a time",
		overlap(published().ok(unpublish), publish, second), Options{}},
	{"R3", "two calls at a time by two instances", func() *history {
		s := published().at("b", "b1").learn().at("a", "a1")
		n := s.begin(second)
		s.at("b", "b1").ok(unpublish)
		return s.at("a", "a1").end(n, "OK", nil)
	}(), Options{}},
	{"R3", "a call arrived beside one that has ended since",
		published().ok(with(unpublish, func(l *Line) { l.Beside = []uint64{8} })), Options{}},
	{"R3", "another call beside an abandoned one", func() *history {
		s := published()
		n := s.begin(unpublish)
		return s.abandoned(n).ok(publish)
	}(), Options{Strict: true}},
	{"R4", "unstage before unpublish", published().ok(unstage), Options{}},
	{"R4", "detach before unstage", published().ok(unpublish, detach), Options{}},
	{"R4", "detach after a refused unstage",
		published().ok(unpublish).call(unstage, "FAILED_PRECONDITION", nil).ok(detach), Options{}},
	{"R4", "delete of a published volume",
		newHistory().learn("CREATE_DELETE_VOLUME").ok(create, direct, remove), Options{}},
	{"R6", "another request after a lost answer", newHistory().learn().ok(create, attach).call(stage, "", nil).
		at("a", "a2").learn().ok(with(stage, func(l *Line) { l.Hash = "other" })), Options{}},
	{"R6", "another request after the undo failed too",
		newHistory().learn().ok(create, attach).call(stage, "ABORTED", nil).
			call(unstage, "UNAVAILABLE", nil).ok(with(stage, func(l *Line) { l.Hash = "other" })), Options{}},
	{"R8", "published in the end", published(), Options{Settled: true}},
	{"R9", "no staging directory",
		newHistory().learn().ok(create, attach, with(stage, func(l *Line) { l.Look = &Look{Staging: "absent"} })),
		Options{}},
	{"R10", "two staging paths",
		newHistory().learn().ok(create, attach, stage, with(stage, func(l *Line) { l.Staging = "/s/rw" })), Options{}},
	{"R10", "two volumes at one staging path",
		published().ok(with(attach, func(l *Line) { l.Volume = "v2" }),
			with(stage, func(l *Line) { l.Volume = "v2" })), Options{}},
	{"R11", "two volumes at one target", published().ok(with(attach, func(l *Line) { l.Volume = "v2" }),
		with(stage, func(l *Line) { l.Volume, l.Staging = "v2", "/s/v2" }),
		with(publish, func(l *Line) { l.Volume, l.Staging = "v2", "/s/v2" })), Options{}},
	{"R11", "no parent",
		newHistory().learn().ok(create, attach, stage, with(publish, func(l *Line) {
			l.Look = &Look{Parent: "absent", Target: "absent"}
		})), Options{}},
	{"R11", "the target was made",
		newHistory().learn().ok(create, attach, stage, with(publish, func(l *Line) {
			l.Look = &Look{Parent: "dir", Target: "dir"}
		})), Options{}},
	{"R11", "the staging path as target",
		newHistory().learn().ok(create, attach, stage, with(publish, func(l *Line) { l.Target = "/s/v1" })), Options{}},
	{"R12", "no staging path",
		newHistory().learn().ok(create, attach, stage, with(publish, func(l *Line) { l.Staging = "" })), Options{}},
	{"R12", "a staging path in stats of a plugin that does not stage", newHistory().learn("GET_VOLUME_STATS").
		ok(Line{RPC: "NodeGetVolumeStats", Volume: "v9", Staging: "/s/v9", Path: "/t/9"}), Options{}},
	{"R13", "another publish_context",
		newHistory().learn().ok(create, attach, with(stage, func(l *Line) { l.PublishContext = "x" })), Options{}},
	{"R13", "another volume_context",
		newHistory().learn().ok(create, with(attach, func(l *Line) { l.VolumeContext = "" })), Options{}},
	{"R13", "a publish_context out of nowhere", newHistory().learn("STAGE_UNSTAGE_VOLUME").ok(stage), Options{}},
	{"R14", "detach from every node",
		published().ok(unpublish, unstage, with(detach, func(l *Line) { l.Node = "" })), Options{}},
	{"R14", "a node that nobody learn",
		newHistory().learn().ok(create, with(attach, func(l *Line) { l.Node = "n7" })), Options{}},
	{"R15", "readonly that is not advertised",
		newHistory().learn().ok(create, with(attach, func(l *Line) { l.ReadOnly = true })), Options{}},
	{"R30", "node expansion that was not asked for",
		newHistory().learn("EXPAND_VOLUME").ok(direct).
			call(enlarge, "OK", &Answer{}).ok(grow), Options{}},
	{"R30", "node expansion where it may be published", newHistory().learn("EXPAND_VOLUME").ok(direct).
		call(enlarge, "OK", &Answer{NodeExpand: true}).call(with(direct, func(l *Line) {
		l.Target = "/t/2"
	}), "INTERNAL", nil).
		ok(with(grow, func(l *Line) { l.Path = "/t/2" })), Options{}},
	{"R30", "node expansion to more than the controller has made", newHistory().learn("EXPAND_VOLUME").ok(direct).
		call(enlarge, "OK", &Answer{NodeExpand: true, Bytes: 2}).ok(with(grow,
		func(l *Line) { l.Bytes = 3 })), Options{}},
	{"R30", "node expansion again after it was refused", newHistory().learn("EXPAND_VOLUME").ok(direct).
		call(enlarge, "OK", &Answer{NodeExpand: true}).call(grow, "FAILED_PRECONDITION", nil).ok(grow), Options{}},
	{"R32", "a snapshot of a group deleted alone",
		grouped().ok(Line{RPC: "DeleteSnapshot", Snapshot: "s1"}), Options{}},
	{"R32", "a group deleted without one of its snapshots",
		grouped().ok(Line{RPC: "DeleteVolumeGroupSnapshot", Group: "g", Snapshots: []string{"s1"}}), Options{}},
	{"R32", "a group read with other snapshots",
		grouped().ok(Line{RPC: "GetVolumeGroupSnapshot", Group: "g", Snapshots: []string{"s1", "s3"}}), Options{}},
	{"R3", "a volume changed while a group snapshot of it is taken", func() *history {
		s := newHistory().learn("EXPAND_VOLUME")
		s.begin(Line{RPC: "CreateVolumeGroupSnapshot", Name: "g", Volumes: []string{"v1", "v2"}})
		return s.ok(with(enlarge, func(l *Line) { l.Volume = "v2" }))
	}(), Options{}},
	{"R33", "blocks of a snapshot that is gone", grouped().
		ok(Line{RPC: "DeleteVolumeGroupSnapshot", Group: "g", Snapshots: []string{"s2", "s1"}},
			Line{RPC: "GetMetadataDelta", Snapshot: "s1", Base: "s9"}), Options{}},
	{"RU", "a group snapshot of which nobody knows", newHistory().learn().
		call(Line{RPC: "CreateVolumeGroupSnapshot", Name: "g"}, "INTERNAL", nil), Options{Settled: true}},
	{"RU", "publish after an uncertain stage",
		newHistory().learn().ok(create, attach).call(stage, "DEADLINE_EXCEEDED", nil).ok(publish), Options{}},
	{"RU", "unstage after a lost unpublish",
		published().call(unpublish, "", nil).at("a", "a2").learn().ok(unstage), Options{}},
	{"RU", "stage after an attach whose caller had gone", func() *history {
		s := newHistory().learn().ok(create)
		n := s.begin(attach)
		return s.abandoned(n).end(n, "OK", &Answer{PublishContext: "pc"}).ok(stage)
	}(), Options{}},
	{"RU", "an uncertain publish in the end",
		published().ok(unpublish).call(publish, "ABORTED", nil), Options{Settled: true}},
	{"RU", "a refused stage that was not undone",
		newHistory().learn().ok(create, attach).call(stage, "INVALID_ARGUMENT", nil), Options{Settled: true}},
	{"RU", "a volume of which nobody learn", newHistory().learn().call(create, "INTERNAL", nil),
		Options{Settled: true}},
}

// Check finds a breach of each rule.
func TestCheckFindsABreachOfEachRule(t *testing.T) {
	covered := map[string]bool{}
	for _, c := range slices.Concat(orderBreaches, fieldBreaches) {
		covered[c.rule] = true
		t.Run(c.rule+" "+c.name, func(t *testing.T) {
			found := Check(c.journal.lines, c.opts)
			if !slices.ContainsFunc(found, func(v Violation) bool { return v.Rule == c.rule }) {
				t.Errorf("Check finds %v, want a violation of %s", found, c.rule)
			}
			c.opts.Allow = []string{c.rule}
			for _, v := range Check(c.journal.lines, c.opts) {
				if v.Rule == c.rule {
					t.Errorf("allowed, and yet: %v", v)
				}
			}
		})
	}
	for _, r := range Rules {
		if !covered[r.ID] {
			t.Errorf("no journal breaks %s", r.ID)
		}
	}
}

// grouped is a history with group snapshot g of the snapshots s1 and s2.
func grouped() *history {
	return newHistory().learn().call(Line{RPC: "CreateVolumeGroupSnapshot", Name: "g", Volumes: []string{"v1", "v2"}},
		"OK", &Answer{Group: "g", Snapshots: []string{"s1", "s2"}})
}

func takeDown() []Line { return []Line{unpublish, unstage, detach, remove} }

// Calls of a correct client break no rule.
func TestCheckAcceptsLegalCalls(t *testing.T) {
	cases := map[string]*history{
		"up and down": published().ok(takeDown()...),
		"twice up":    published().ok(takeDown()...).ok(create, attach, stage, publish).ok(takeDown()...),
		"two targets": published().ok(second, unpublish, with(unpublish, func(l *Line) {
			l.Target = "/t/2"
		})).ok(takeDown()[1:]...),
		"everything twice": published().ok(attach, stage, publish, unpublish, unpublish, unstage, unstage, detach,
			detach, remove, remove),
		"the same again": newHistory().learn().call(create, "INTERNAL", nil).ok(create).call(attach, "UNAVAILABLE",
			nil).ok(attach).
			call(stage, "ABORTED", nil).call(stage, "DEADLINE_EXCEEDED", nil).ok(stage).call(publish, "DATA_LOSS",
			nil).ok(publish).
			call(unpublish, "UNKNOWN", nil).ok(unpublish).call(unstage, "CANCELLED", nil).ok(unstage).
			call(detach, "RESOURCE_EXHAUSTED", nil).ok(detach).call(remove, "INTERNAL", nil).ok(remove),
		"in use, and so there": newHistory().learn().ok(create).call(remove, "INTERNAL", nil).call(remove,
			"FAILED_PRECONDITION", nil).
			ok(attach, detach, remove),
		"the negation": newHistory().learn().ok(create).call(attach, "ABORTED", nil).ok(detach, attach).call(stage,
			"INTERNAL", nil).
			ok(unstage, stage).call(publish, "INTERNAL", nil).ok(unpublish, publish).call(unpublish, "INTERNAL",
			nil).ok(publish).ok(takeDown()...),
		"refused and undone": newHistory().learn().ok(create, attach).call(stage, "FAILED_PRECONDITION",
			nil).ok(unstage, detach, remove),
		"refused, then with other fields": newHistory().learn().ok(create, attach).call(stage, "INVALID_ARGUMENT", nil).
			ok(with(stage, func(l *Line) { l.Hash = "other" }), unstage, detach, remove),
		"refused while it was up": published().call(publish, "ALREADY_EXISTS", nil).ok(takeDown()...),
		"not there any more": published().call(unpublish, "NOT_FOUND", nil).call(unstage, "NOT_FOUND", nil).ok(detach,
			remove),
		"the plugin was killed": newHistory().learn().ok(create, attach).call(stage, "", nil).at("a", "a2").ok(stage,
			publish).ok(takeDown()...),
		"another instance goes on": newHistory().learn().ok(create, attach).call(stage, "", nil).at("b",
			"b1").learn().ok(stage, publish).ok(takeDown()...),
		"capabilities that vanished": published().call(Line{RPC: "NodeGetCapabilities"}, "OK", &Answer{}).
			call(Line{RPC: "ControllerGetCapabilities"}, "OK", &Answer{}).ok(takeDown()...),
		"the retry of an abandoned call": func() *history {
			s := newHistory().learn().ok(create, attach)
			n := s.begin(stage)
			return s.abandoned(n).call(stage, "ABORTED", nil).end(n, "OK", nil).ok(stage, publish).ok(takeDown()...)
		}(),
		"no staging, no controller": newHistory().learn("GET_VOLUME_STATS").ok(direct, unpublish),
		"reads at any time": newHistory().learn("CREATE_DELETE_VOLUME", "PUBLISH_UNPUBLISH_VOLUME",
			"STAGE_UNSTAGE_VOLUME", "LIST_VOLUMES").
			ok(create, attach).call(stage, "ABORTED", nil).ok(Line{RPC: "ListVolumes"}, stage,
			publish).ok(takeDown()...),
		"a reboot": func() *history {
			s := published()
			s.add(Line{Kind: Reboot, Plugin: "p", Node: "n1"})
			return s.ok(detach, remove)
		}(),
		"taken down again after a reboot": func() *history {
			s := newHistory().learn(everything...).ok(create, using(writer, attach), using(writer, stage),
				using(writer, publish))
			s.add(Line{Kind: Reboot, Plugin: "p", Node: "n1"})
			s.ok(detach).call(unpublish, "UNAVAILABLE", nil)
			return s.elsewhere().ok(on2(using(writer, attach)), on2(detach)).at("a", "a1").ok(unpublish, remove)
		}(),
	}
	for name, s := range cases {
		t.Run(name, func(t *testing.T) {
			for _, v := range Check(s.lines, Options{Settled: true, Strict: true}) {
				t.Error(v)
			}
		})
	}
}

// Another process may notice a little late that a caller is gone, but not much later.
func TestLateAbandonmentIsAccepted(t *testing.T) {
	for late, want := range map[int64]bool{skew / 2: false, 2 * skew: true} {
		s := published().at("b", "b1").learn().at("a", "a1")
		n := s.begin(publish)
		s.at("b", "b1").call(unpublish, "OK", nil).at("a", "a1")
		s.add(Line{Kind: Abandoned, Run: "a1", Call: n, Mono: late})
		s.end(n, "OK", nil)
		found := Check(s.lines, Options{})
		if got := slices.ContainsFunc(found, func(v Violation) bool { return v.Rule == "R3" }); got != want {
			t.Errorf("abandoned %d ns later: R3 is %v, want %v: %v", late, got, want, found)
		}
	}
}

func TestByNodeAllowsCallsOfTwoNodes(t *testing.T) {
	s := published()
	n := s.begin(publish)
	other := with(publish, func(l *Line) { l.Role, l.Node = "node", "n2" })
	s.at("b", "b1").learn().call(Line{RPC: "NodeGetInfo"}, "OK", &Answer{Node: "n2"}).ok(other).at("a", "a1").end(n,
		"OK", nil)
	for byNode, want := range map[bool]bool{true: false, false: true} {
		found := Check(s.lines, Options{ByNode: byNode, Allow: []string{"R2", "R14"}})
		if got := slices.ContainsFunc(found, func(v Violation) bool { return v.Rule == "R3" }); got != want {
			t.Errorf("ByNode %v: R3 is %v, want %v: %v", byNode, got, want, found)
		}
	}
}

// A lost node that is back unmounts its volumes, while another host detaches them.
func TestByNodeAllowsADetachOfALostNode(t *testing.T) {
	for lost, want := range map[bool]bool{true: false, false: true} {
		s := published()
		if lost {
			s.add(Line{Kind: Reboot, Plugin: "p", Node: "n1"})
		}
		undo := s.begin(unpublish)
		s.at("b", "b1").learn().ok(detach).at("a", "a1").end(undo, "OK", nil)
		s.ok(unstage)
		found := Check(s.lines, Options{ByNode: true, Allow: []string{"R14"}})
		if got := len(found) > 0; got != want {
			t.Errorf("lost %v: found %v", lost, found)
		}
	}
}

// A host that was the executor repeats its open call, while other hosts already use the answer that the next executor
// got.
func TestByNodeAllowsARepeatedControllerCall(t *testing.T) {
	for name, test := range map[string]struct {
		first, beside Line
		want          bool
	}{
		"a stage":        {attach, stage, false},
		"the same call":  {attach, attach, false},
		"another call":   {attach, detach, true},
		"a changed call": {with(attach, func(l *Line) { l.Hash = "another" }), stage, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := newHistory().learn().at("b", "b1").learn().ok(create, test.first).at("a", "a1")
			repeated := s.begin(attach)
			s.at("b", "b1").call(test.beside, "OK", &Answer{PublishContext: "pc"}).at("a", "a1").end(repeated, "OK",
				&Answer{PublishContext: "pc"})
			found := Check(s.lines, Options{ByNode: true})
			if got := slices.ContainsFunc(found, func(v Violation) bool { return v.Rule == "R3" }); got != test.want {
				t.Errorf("R3 is %v, want %v: %v", got, test.want, found)
			}
			if !test.want && len(found) > 0 {
				t.Error(found)
			}
		})
	}
}

// A journal that breaks a rule has a call that exercises the rule, and the verdict has the evidence.
func TestJudgeFindsTheCallsThatExerciseARule(t *testing.T) {
	for _, r := range Rules {
		if exercises[r.ID].by == nil {
			t.Errorf("exercises lacks %s", r.ID)
		}
	}
	for _, c := range slices.Concat(orderBreaches, fieldBreaches) {
		for _, v := range Judge(c.journal.lines, c.opts) {
			if v.Rule.ID == c.rule && (len(v.Broken) == 0 || v.Calls == 0 && c.rule != "R0" && c.rule != "R31") {
				t.Errorf("%s %s: %d calls, broken: %v", c.rule, c.name, v.Calls, v.Broken)
			}
		}
	}
	for _, v := range Judge(newHistory().learn().lines, Options{Settled: true}) {
		if v.Rule.ID == "R2" && (v.Calls > 0 || len(v.Broken) > 0) {
			t.Errorf("nothing was used: %+v", v)
		}
	}
}
