package journal

import (
	"slices"
	"strings"
)

// Verdict is the result of one rule for a journal.
type Verdict struct {
	Rule    Rule
	Section string      // of the CSI specification
	Calls   int         // number of calls that could have broken the rule; 0: it was not exercised
	Broken  []Violation // in the order of the lines
}

// Judge checks a journal (Check) and returns a verdict for each rule that o does not allow, in the order of Rules.
func Judge(lines []Line, o Options) []Verdict {
	calls, found := Calls(lines), Check(lines, o)
	s := seenBy(lines, calls)
	var verdicts []Verdict
	for _, rule := range Rules {
		if slices.Contains(o.Allow, rule.ID) {
			continue
		}
		v := Verdict{Rule: rule, Section: exercises[rule.ID].section}
		for i, call := range calls {
			if by := exercises[rule.ID].by; by != nil && by(s, call, i) {
				v.Calls++
			}
		}
		for _, violation := range found {
			if violation.Rule == rule.ID {
				v.Broken = append(v.Broken, violation)
			}
		}
		verdicts = append(verdicts, v)
	}
	return verdicts
}

// seen has facts about a whole journal that decide which calls exercise a rule.
type seen struct {
	firstOf   map[string]int  // plugin and subject -> the first call
	uncertain map[string]int  // plugin, RPC and object -> the first call without a certain outcome
	denied    map[string]int  // volume -> the first ValidateVolumeCapabilities that was not confirmed
	secrets   map[string]bool // volumes attached with secrets
	badNames  map[string]bool // instances with an invalid name
	places    map[string]bool // plugins with topology
	limited   map[string]bool // nodes with a limit of volumes
	grouped   map[string]bool // snapshots of groups
	endpoints map[string]bool // runs that were started with CSI_ENDPOINT
}

func seenBy(lines []Line, calls []Call) seen {
	s := seen{firstOf: map[string]int{}, uncertain: map[string]int{}, denied: map[string]int{},
		secrets:  map[string]bool{},
		badNames: map[string]bool{}, places: map[string]bool{}, limited: map[string]bool{}, grouped: map[string]bool{},
		endpoints: map[string]bool{}}
	for _, l := range lines {
		if l.Kind == Start && l.Endpoint != "" {
			s.endpoints[l.Run] = true
		}
	}
	for i, c := range calls {
		for _, subject := range c.subjects() {
			note(s.firstOf, c.Plugin+" "+subject, i)
		}
		if Mutates(c.RPC) && c.unsure() {
			note(s.uncertain, c.object(), i)
		}
		if c.RPC == "ControllerPublishVolume" && len(c.SecretKeys) > 0 {
			s.secrets[c.Volume] = true
		}
		if c.End == nil || c.End.Answer == nil {
			continue
		}
		switch a := c.End.Answer; c.RPC {
		case "ValidateVolumeCapabilities":
			if c.denied() {
				note(s.denied, c.Volume, i)
			}
		case "CreateVolumeGroupSnapshot":
			for _, id := range a.Snapshots {
				s.grouped[id] = true
			}
		case "GetPluginInfo":
			s.badNames[c.Instance] = s.badNames[c.Instance] || badName(a.Name) != ""
		case "NodeGetInfo":
			s.limited[a.Node] = s.limited[a.Node] || a.MaxVolumes > 0
			s.places[c.Plugin] = s.places[c.Plugin] || len(a.Segments) > 0
		}
	}
	return s
}

func note(first map[string]int, key string, i int) {
	if _, known := first[key]; !known {
		first[key] = i
	}
}

// unsure reports whether the outcome of the call is uncertain.
func (c Call) unsure() bool {
	return c.Abandoned || c.End == nil || c.End.Lost || c.End.nameless(c.RPC) || OutcomeOf(c.End.Code) == Uncertain
}

// denied reports whether the plugin did not confirm a capability of a volume.
func (c Call) denied() bool {
	return c.End != nil && c.End.Answer != nil && len(c.End.Answer.Denied) > 0
}

// object returns a key that is the same for a call and its repetitions.
func (c Call) object() string {
	return strings.Join([]string{c.Plugin, c.RPC, c.subject(), c.Snapshot, c.Node, c.Target}, "\x00")
}

// before reports whether the first call with a key came before call i.
func before(first map[string]int, key string, i int) bool {
	at, known := first[key]
	return known && at < i
}

// of returns a function that reports whether a call is one of the RPCs.
func of(rpcs ...string) func(seen, Call, int) bool {
	return func(_ seen, c Call, _ int) bool { return slices.Contains(rpcs, c.RPC) }
}

func (c Call) uses() bool {
	return slices.Contains([]string{"ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume"}, c.RPC)
}

// exercises has, for each rule, the section of the CSI specification and the calls that could break the rule.
var exercises = map[string]struct {
	section string
	by      func(s seen, c Call, i int) bool
}{
	"R0": {"", func(seen, Call, int) bool { return true }},
	"R1": {"RPC Interface; ControllerGetCapabilities; NodeGetCapabilities",
		func(_ seen, c Call, _ int) bool {
			return needs[c.RPC] != "" || c.RPC == "NodePublishVolume" || c.RPC == "NodeUnpublishVolume"
		}},
	"R2": {"Volume Lifecycle", of("ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume", "CreateSnapshot",
		"ControllerExpandVolume", "ControllerModifyVolume")},
	"R3": {"Concurrency", func(s seen, c Call, i int) bool {
		return slices.ContainsFunc(c.subjects(), func(of string) bool { return before(s.firstOf, c.Plugin+" "+of, i) })
	}},
	"R4": {"Volume Lifecycle; NodeUnstageVolume; ControllerUnpublishVolume; DeleteVolume",
		of("NodeUnstageVolume", "ControllerUnpublishVolume", "DeleteVolume")},
	"R6": {"Timeouts; Error Scheme",
		func(s seen, c Call, i int) bool { return before(s.uncertain, c.object(), i) }},
	"R8":  {"Volume Lifecycle", func(s seen, c Call, _ int) bool { return c.uses() }},
	"R9":  {"NodeStageVolume", of("NodeStageVolume")},
	"R10": {"NodeStageVolume", func(_ seen, c Call, _ int) bool { return c.Staging != "" }},
	"R11": {"NodePublishVolume", of("NodePublishVolume")},
	"R12": {"NodePublishVolume; NodeGetVolumeStats; NodeExpandVolume", of("NodePublishVolume", "NodeGetVolumeStats",
		"NodeGetVolumeHealth", "NodeExpandVolume")},
	"R13": {"CreateVolume; ControllerPublishVolume", func(_ seen, c Call, _ int) bool { return c.uses() }},
	"R14": {"NodeGetInfo; ControllerPublishVolume", func(_ seen, c Call, _ int) bool {
		return c.uses() || c.RPC == "ControllerUnpublishVolume"
	}},
	"R15": {"ControllerPublishVolume", func(_ seen, c Call, _ int) bool {
		return c.RPC == "ControllerPublishVolume" && (c.ReadOnly || strings.HasSuffix(c.Usage, "_READER_ONLY"))
	}},
	"R16": {"ValidateVolumeCapabilities",
		func(s seen, c Call, i int) bool {
			return c.RPC == "ValidateVolumeCapabilities" && c.denied() ||
				c.uses() && before(s.denied, c.Volume, i)
		}},
	"R17": {"VolumeCapability.AccessMode; NodePublishVolume", func(_ seen, c Call, _ int) bool { return c.uses() }},
	"R18": {"Size Limits", func(seen, Call, int) bool { return true }},
	"R20": {"GetPluginInfo", func(s seen, c Call, _ int) bool { return s.badNames[c.Instance] }},
	"R21": {"CreateVolume", func(_ seen, c Call, _ int) bool { return c.Name != "" }},
	"R23": {"Secrets Requirements", func(_ seen, c Call, _ int) bool { return len(c.SecretKeys) > 0 }},
	"R25": {"ControllerUnpublishVolume", func(s seen, c Call, _ int) bool {
		return c.RPC == "ControllerUnpublishVolume" && s.secrets[c.Volume]
	}},
	"R26": {"TopologyRequirement", func(s seen, c Call, _ int) bool {
		return c.Topology || c.uses() && s.places[c.Plugin]
	}},
	"R28": {"NodeGetInfo", func(s seen, c Call, _ int) bool {
		return c.RPC == "ControllerPublishVolume" && s.limited[c.Node]
	}},
	"R29": {"ListVolumes; ListSnapshots", func(_ seen, c Call, _ int) bool { return c.Token != "" }},
	"R30": {"ControllerExpandVolume; NodeExpandVolume", of("ControllerExpandVolume", "NodeExpandVolume")},
	"R31": {"Environment Variables", func(s seen, c Call, _ int) bool { return s.endpoints[c.Run] }},
	"R32": {"DeleteVolumeGroupSnapshot; GetVolumeGroupSnapshot", func(s seen, c Call, _ int) bool {
		return c.RPC == "DeleteVolumeGroupSnapshot" || c.RPC == "GetVolumeGroupSnapshot" ||
			c.RPC == "DeleteSnapshot" && s.grouped[c.Snapshot]
	}},
	"R33": {"GetMetadataAllocated; GetMetadataDelta", of("GetMetadataAllocated", "GetMetadataDelta")},
	"RU": {"Timeouts; Error Scheme", func(_ seen, c Call, _ int) bool {
		return Mutates(c.RPC) && (c.unsure() || c.End.Code != "OK")
	}},
}
