package doctor

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"holdfast/internal/mount"
	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// sound returns the facts of a node without differences: one volume, published for one alloc.
func sound() Facts {
	return Facts{
		Layout: layout, Boot: boot, Now: noon,
		Records: Records{
			Volumes: []registry.Volume{data}, Placements: []Placement{placement()},
			Refs:      []registry.Ref{ref()},
			Claims:    []registry.Claim{claim()},
			Instances: instances(),
		},
		Mounts: mount.Mounts{{Point: stagedAt(), FSType: "ext4", Source: "/dev/loop1"},
			{Point: publishedAt(), FSType: "ext4", Source: "/dev/loop1"}},
		Dirs: []mount.DirInfo{{Path: root().Host + "/publish", Entries: 2},
			{Path: root().Host + "/stage", Entries: 1}, {Path: root().Host, Entries: 2}},
	}
}

// A claim or attachment of another node does not explain what is attached and staged on this node.
func TestRecordsOfOtherNodesDoNotCount(t *testing.T) {
	there, elsewhere := placed()[0].(registry.Attachment), claim()
	there.Node, there.NodeID, elsewhere.Node = "n2", "i-2", "n2"
	log := registrytest.NewLog(time.Now)
	local := data
	local.ID, local.External, local.Node = "local", "its own", "n2"
	registrytest.Put(t, log, append(placed(), data, there, elsewhere, local,
		registry.Executor{Plugin: "mine", Holder: "n1"}, registry.Executor{Plugin: "theirs", Holder: "n2"})...)
	var r Records
	if err := log.View(t.Context(), func(v registry.View) error { r = RecordsOf(v, "n1"); return nil }); err != nil {
		t.Fatal(err)
	}
	if len(r.Placements) != 1 || r.Placements[0].Attachment.Node != "n1" || len(r.Claims) != 0 {
		t.Errorf("records of node n1: %+v, %+v", r.Placements, r.Claims)
	}
	if len(r.Volumes) != 1 || r.Volumes[0].Node != "" || len(r.Executors) != 1 || r.Executors["theirs"] != "n2" {
		t.Errorf("records of node n1: %+v, %+v", r.Volumes, r.Executors)
	}
	f := sound()
	f.Records.Placements, f.Records.Claims, f.Records.Refs = r.Placements, r.Claims, nil
	if found := Examine(f); !slices.ContainsFunc(found, func(f registry.Finding) bool {
		return f.Kind == registry.FoundUnowned
	}) {
		t.Errorf("found %v", found)
	}
}

// bare returns the facts of the same node without any use of the volume.
func bare() Facts {
	f := sound()
	f.Records.Placements, f.Records.Refs, f.Records.Claims, f.Mounts = nil, nil, nil, nil
	return f
}

func mounted(f *Facts, paths ...string) {
	for _, p := range paths {
		f.Mounts = append(f.Mounts, mount.Mount{Point: p, FSType: "ext4", Source: "/dev/loop7"})
	}
}

func unmounted(f *Facts, paths ...string) {
	f.Mounts = slices.DeleteFunc(f.Mounts, func(m mount.Mount) bool { return slices.Contains(paths, m.Point) })
}

func listed(f *Facts, volumes map[registry.ExternalID]Listed) {
	f.Listings = []Listing{{Plugin: "ebs", Node: "i-1", Published: true, Volumes: volumes,
		Before: f.Records.versions()}}
}

// clientUses are mounts of a client of the CSI endpoint, at paths as the plugin's task sees them.
func clientUses(targets ...string) (uses []registry.EndpointUse) {
	for _, at := range targets {
		uses = append(uses, registry.EndpointUse{Volume: registry.VolumeKey{Plugin: "ebs", External: "ext-9"},
			Call: registry.NodePublishRPC, Target: at, Node: "n1"})
	}
	return uses
}

// here is a volume that is attached to this node.
var here = Listed{Here: true, Nodes: map[registry.NodeID]bool{"i-1": true}}

// examinations has a case for each kind of finding: the facts, and the expected findings as kind, action and path.
var examinations = []struct {
	name  string
	from  func() Facts
	but   func(*Facts)
	found []string
	says  []string // somewhere in the texts
}{
	{"a sound node", sound, func(*Facts) {}, nil, nil},
	{"an empty one", bare, func(*Facts) {}, nil, nil},
	{"a plugin that mounts nothing where it stages", sound, func(f *Facts) {
		f.Records.Placements[0].Staging.Mounts = false
		unmounted(f, stagedAt())
	}, nil, nil},
	{"a staged volume without its mount, below a publish", sound, func(f *Facts) { unmounted(f, stagedAt()) },
		[]string{"lost mark " + stagedAt()}, []string{"the next claim of the volume stages it again"}},

	{"a publish without its mount", sound, func(f *Facts) { unmounted(f, publishedAt()) },
		[]string{"lost mark " + publishedAt()},
		[]string{"alloc a1"}},
	{"a publish whose claim was released by force", sound, func(f *Facts) { f.Records.Claims = nil },
		[]string{"unowned " + publishedAt()}, []string{"stop alloc a1"}},
	{"the same, and another node has deleted the volume", sound, func(f *Facts) {
		f.Records.Claims, f.Records.Volumes = nil, nil
	}, []string{"unowned " + publishedAt()}, []string{"volume data is published here"}},
	{"nothing is mounted any more", sound, func(f *Facts) { f.Mounts = nil },
		[]string{"lost mark " + publishedAt(), "lost mark " + stagedAt()}, []string{"volume data"}},
	{"a mount that came or went meanwhile", sound, func(f *Facts) {
		f.Mounts, f.Changing = nil, []string{publishedAt(), stagedAt()}
	}, nil, nil},
	{"a staged volume whose plugin mounts nothing at the staging path", sound, func(f *Facts) {
		f.Records.Placements[0].Staging.Mounts = false
		f.Records.Refs, f.Mounts = nil, nil
	}, nil, nil},
	{"the same in a running shim", sound, func(f *Facts) {
		f.Records.Placements[0].Staging.Mounts = false
		f.Records.Refs, f.Mounts, f.Live = nil, nil, true
	}, nil, nil},
	{"a mount on the directory of a socket", sound, func(f *Facts) {
		f.Sockets = mount.Mounts{{Point: "/run/h/t/x", FSType: "tmpfs", Source: "by-hand"}}
	}, []string{"orphan /run/h/t/x"}, []string{"tmpfs by-hand", "umount /run/h/t/x"}},
	{"the same at start", sound, func(f *Facts) { f.Records.Refs, f.Mounts = nil, nil },
		[]string{"lost mark " + stagedAt()}, nil},
	{"a block device is no mount", sound, func(f *Facts) {
		f.Records.Refs[0].Usage.Attachment, f.Mounts = registry.BlockDevice, f.Mounts[:1]
	}, nil, nil},
	{"a block device that is gone", sound, func(f *Facts) {
		f.Records.Refs[0].Usage.Attachment, f.Mounts = registry.BlockDevice, f.Mounts[:1]
		f.Inspected = map[string]mount.Info{publishedAt(): {}}
	}, []string{"lost mark " + publishedAt()}, []string{"no block device"}},
	{"a block device that was inspected", sound, func(f *Facts) {
		f.Records.Refs[0].Usage.Attachment, f.Mounts = registry.BlockDevice, f.Mounts[:1]
		f.Inspected = map[string]mount.Info{publishedAt(): {Block: true}}
	}, nil, nil},

	{"another boot", sound, func(f *Facts) { f.Boot, f.Mounts = "boot-2", nil },
		[]string{"rebooted mark " + publishedAt(), "rebooted mark " + stagedAt()},
		[]string{"before the node rebooted"}},
	{"another boot, and something is mounted already", sound, func(f *Facts) { f.Boot = "boot-2" },
		[]string{"rebooted mark " + publishedAt(), "rebooted mark " + stagedAt()}, nil},
	{"what was sent is not certain anyway", sound, func(f *Facts) {
		f.Boot, f.Mounts = "boot-2", nil
		f.Records.Refs[0].Publish, f.Records.Placements[0].Staging.State = registry.MarkSent, registry.MarkSent
	}, nil, nil},

	{"a server that is gone", sound,
		func(f *Facts) { f.Inspected = map[string]mount.Info{publishedAt(): {Errno: unix.ENOTCONN}} },
		[]string{"dead " + publishedAt()}, []string{"its server is gone", "stop alloc a1"}},
	{"a mount without a fault", sound, func(f *Facts) {
		f.Inspected = map[string]mount.Info{publishedAt(): {}}
	}, nil, nil},

	{"an open call", sound, func(f *Facts) {
		f.Records.Intents = []registry.Intent{{Volume: key, Name: data.VolumeName(), RPC: registry.NodeStageRPC,
			Outcome: registry.OutcomeUncertain, Code: "ABORTED"}}
	}, []string{"uncertain ebs:ext-1"}, []string{"NodeStageVolume"}},
	{"a call that was just sent", sound, func(f *Facts) {
		f.Live = true
		f.Records.Intents = []registry.Intent{{Volume: key, RPC: registry.NodeStageRPC,
			Outcome: registry.OutcomePending,
			Since:   noon.Add(-time.Second)}}
	}, nil, nil},
	{"a call that hangs", sound, func(f *Facts) {
		f.Live = true
		f.Records.Intents = []registry.Intent{{Volume: key, RPC: registry.NodeStageRPC,
			Outcome: registry.OutcomePending,
			Since:   noon.Add(-time.Hour)}}
	}, []string{"uncertain ebs:ext-1"}, nil},

	{"staged without a claim", sound, func(f *Facts) {
		f.Records.Refs, f.Records.Claims = nil, nil
		unmounted(f, publishedAt())
	}, []string{"unowned undo " + stagedAt()}, []string{"staged", "plugin ebs"}},
	{"attached without a claim", sound, func(f *Facts) {
		f.Records.Refs, f.Records.Claims, f.Mounts = nil, nil, nil
		f.Records.Placements[0].Staging.State, f.Records.Placements[0].Staging.Path = registry.MarkNone, registry.Tree{}
	}, []string{"unowned undo ebs:ext-1"}, []string{"attached"}},

	{"what clients of the CSI endpoint have mounted", sound, func(f *Facts) {
		mounted(f, stray("stage", "x"), stray("publish", "x"), root().Host+"/own/y")
		f.Records.EndpointUses = clientUses("/csi/stage/x", "/csi/publish/x/v", "/csi/own/y", "/csi/stage/z", "/var")
		f.Dirs = append([]mount.DirInfo{{Path: stray("stage", "z"), Entries: 0},
			{Path: filepath.Dir(stray("publish", "x")), Entries: 1}}, f.Dirs...)
	}, nil, nil},
	{"the same while the plugin does not run", sound, func(f *Facts) {
		mounted(f, stray("stage", "x"))
		f.Records.EndpointUses, f.Records.Instances = clientUses("/csi/stage/x"), nil
	}, nil, nil},
	{"another mount beside theirs", sound, func(f *Facts) {
		mounted(f, stray("stage", "x"))
		f.Records.EndpointUses = clientUses("/csi/stage/y", "/var")
	}, []string{"orphan unmount " + stray("stage", "x")}, nil},
	{"an unknown mount", sound, func(f *Facts) { mounted(f, stray("publish", "x")) },
		[]string{"orphan unmount " + stray("publish", "x")}, []string{"ext4 /dev/loop7"}},
	{"two of one volume", bare, func(f *Facts) {
		mounted(f, stray("stage", "x"), stray("publish", "x"))
		f.Users = map[string][]mount.User{stray("stage", "x"): {{Mount: stray("publish", "x")}}}
	}, []string{"orphan unmount " + stray("publish", "x"), "orphan unmount " + stray("stage", "x")}, nil},
	{"stacked ones", bare, func(f *Facts) { mounted(f, stray("stage", "x"), stray("stage", "x"), stray("stage", "x")) },
		[]string{"orphan unmount " + stray("stage", "x")}, []string{"on top of 2 more"}},
	{"a used one", bare, func(f *Facts) {
		mounted(f, stray("stage", "x"))
		f.Users = map[string][]mount.User{stray("stage", "x"): {{Text: "process 7 (sh) works in it"}, {Text: "b"},
			{Text: "c"}, {Text: "d"}}}
	}, []string{"used " + stray("stage", "x")}, []string{"process 7 (sh) works in it; b; c; and 1 more"}},
	{"one that is used through another that is used", bare, func(f *Facts) {
		mounted(f, stray("stage", "x"), stray("publish", "x"))
		f.Users = map[string][]mount.User{stray("stage", "x"): {{Mount: stray("publish", "x")}},
			stray("publish", "x"): {{Text: "process 7"}}}
	}, []string{"used " + stray("publish", "x"), "used " + stray("stage", "x")}, nil},
	{"one that a known mount was made from", sound, func(f *Facts) {
		mounted(f, stray("stage", "x"))
		f.Users = map[string][]mount.User{stray("stage", "x"): {{Mount: publishedAt()}}}
	}, []string{"used " + stray("stage", "x")}, nil},
	{"something is mounted inside it", bare, func(f *Facts) {
		mounted(f, stray("stage", "x"), stray("stage", "x")+"/inner")
		f.Users = map[string][]mount.User{stray("stage", "x"): {{Mount: stray("stage", "x") + "/inner",
			Text: "something is mounted inside it"}}}
	}, []string{"used " + stray("stage", "x")}, nil},
	{"its users cannot be found", bare, func(f *Facts) {
		mounted(f, stray("stage", "x"))
		f.UsersError = "no helper"
	}, []string{"used " + stray("stage", "x")}, []string{"no helper"}},
	{"a plugin's own mount", bare, func(f *Facts) { mounted(f, root().Host+"/cache", root().Host) },
		[]string{"orphan " + root().Host, "orphan " + root().Host + "/cache"}, []string{"no path of a volume"}},
	{"what is mounted in a known volume is part of it", sound,
		func(f *Facts) { mounted(f, stagedAt()+"/inner", publishedAt()+"/inner") },
		nil, nil},
	{"unknown mounts in the way of a claim", sound, func(f *Facts) { f.Records.Placements, f.Records.Refs = nil, nil },
		[]string{"orphan unmount " + publishedAt(), "orphan unmount " + stagedAt()},
		[]string{"in the way of volume data for alloc a1"}},

	{"a known volume is staged, and no record says so", bare, func(f *Facts) {
		f.Live = true
		mounted(f, stagedAt())
	}, []string{"orphan adopt " + stagedAt()}, []string{"volume data"}},
	{"the same without a shim, which knows the name of this node", bare, func(f *Facts) { mounted(f, stagedAt()) },
		[]string{"orphan " + stagedAt()}, []string{"start the agent"}},
	{"the same, used", bare, func(f *Facts) {
		mounted(f, stagedAt())
		f.Users = map[string][]mount.User{stagedAt(): {{Text: "process 7"}}}
	}, []string{"used " + stagedAt()}, nil},
	{"the same, while a call is open", bare, func(f *Facts) {
		mounted(f, stagedAt())
		f.Records.Intents = []registry.Intent{{Volume: key, RPC: registry.DeleteVolumeRPC,
			Outcome: registry.OutcomePending, Since: noon}}
		f.Live = true
	}, []string{"orphan " + stagedAt()}, []string{"wait for the call"}},

	{"unknown directories", bare, func(f *Facts) {
		f.Dirs = append([]mount.DirInfo{{Path: stray("stage", "x"), Entries: 0},
			{Path: stray("publish", "x"), Entries: 0}, {Path: root().Host + "/publish/x", Entries: 1}}, f.Dirs...)
	}, []string{
		"empty remove " + root().Host + "/publish/x", "empty remove " + stray("publish", "x"),
		"empty remove " + stray("stage", "x"),
	}, nil},
	{"one with something in it", bare, func(f *Facts) {
		f.Dirs = append([]mount.DirInfo{{Path: stray("publish", "x") + "/deep", Entries: 0},
			{Path: stray("publish", "x"), Entries: 2}, {Path: root().Host + "/publish/x", Entries: 1}}, f.Dirs...)
	}, []string{"left " + stray("publish", "x")}, []string{"2 entries"}},
	{"the directories of what is known", sound, func(f *Facts) {
		f.Records.Placements[0].Staging.Mounts = false
		unmounted(f, stagedAt())
		f.Dirs = append([]mount.DirInfo{{Path: stagedAt() + "/stage", Entries: 0}, {Path: stagedAt(), Entries: 1}},
			f.Dirs...)
	}, nil, nil},
	{"a directory that a claim is about to use", bare, func(f *Facts) {
		f.Records.Claims, f.Live = []registry.Claim{claim()}, true
		f.Dirs = append([]mount.DirInfo{{Path: stagedAt(), Entries: 0}}, f.Dirs...)
	}, nil, nil},
	{"the same at start, when no call is about to be made", bare, func(f *Facts) {
		f.Records.Claims = []registry.Claim{claim()}
		f.Dirs = append([]mount.DirInfo{{Path: stagedAt(), Entries: 0},
			{Path: filepath.Dir(publishedAt()), Entries: 0}}, f.Dirs...)
	}, []string{"empty remove " + filepath.Dir(publishedAt()), "empty remove " + stagedAt()}, nil},
	{"a plugin's own directories", bare, func(f *Facts) {
		f.Dirs = append([]mount.DirInfo{{Path: root().Host + "/cache", Entries: 0}}, f.Dirs...)
	}, nil, nil},
	{"the directory above an unknown mount", bare, func(f *Facts) {
		mounted(f, stray("publish", "x"))
		f.Dirs = append([]mount.DirInfo{{Path: root().Host + "/publish/x", Entries: 1}}, f.Dirs...)
	}, []string{"orphan unmount " + stray("publish", "x")}, nil},

	{"a plugin that agrees", sound, func(f *Facts) { listed(f, map[registry.ExternalID]Listed{"ext-1": here}) }, nil,
		nil},
	{"a plugin without the volume", sound, func(f *Facts) { listed(f, nil) }, []string{"missing ebs:ext-1"},
		[]string{"holdfast volume deregister data"}},
	{"a plugin that has it attached elsewhere only", sound, func(f *Facts) {
		listed(f, map[registry.ExternalID]Listed{"ext-1": {}})
	}, []string{"detached mark ebs:ext-1"}, []string{"node i-1"}},
	{"a plugin that does not say where", sound, func(f *Facts) {
		listed(f, map[registry.ExternalID]Listed{"ext-1": {}})
		f.Listings[0].Published = false
	}, nil, nil},
	{"a plugin that has a known one attached", bare, func(f *Facts) {
		listed(f, map[registry.ExternalID]Listed{"ext-1": here})
	}, []string{"attached ebs:ext-1"}, []string{`"data"`}},
	{"a plugin that has another one attached", sound, func(f *Facts) {
		listed(f, map[registry.ExternalID]Listed{"ext-1": here, "ext-9": here})
	}, []string{"attached ebs:ext-9"}, nil},
	{"a plugin that has one attached for a client of the CSI endpoint", sound, func(f *Facts) {
		listed(f, map[registry.ExternalID]Listed{"ext-1": here, "ext-9": here})
		f.Records.EndpointUses = []registry.EndpointUse{{Volume: registry.VolumeKey{Plugin: "ebs", External: "ext-9"},
			Call: registry.ControllerPublishRPC, Target: "i-1", Node: "n2"}}
	}, nil, nil},
	{"what has changed since the plugin was asked", sound, func(f *Facts) {
		listed(f, nil)
		f.Records.Volumes[0].ModifyIndex, f.Records.Placements[0].Staging.ModifyIndex = 9, 9
	}, nil, nil},
	{"what is being changed", sound, func(f *Facts) {
		f.Records.Intents = []registry.Intent{{Volume: key, RPC: registry.ControllerUnpublishRPC,
			Outcome: registry.OutcomePending, Since: noon}}
		f.Live = true
		listed(f, nil)
	}, nil, nil},
	{"another plugin's volumes", sound, func(f *Facts) {
		listed(f, nil)
		f.Listings[0].Plugin = "nfs"
	}, nil, nil},

	{"an unhealthy volume", sound, func(f *Facts) {
		f.Records.Placements[0].Staging.Condition = registry.Condition{Abnormal: true,
			Message: "source path doesn't exist"}
	}, []string{"unhealthy ebs:ext-1"}, []string{"source path doesn't exist"}},

	{"parts: a sound node", parted, func(*Facts) {}, nil, nil},
	{"parts: one without its mount", parted, func(f *Facts) { unmounted(f, partAt("a/b")) },
		[]string{"lost " + partAt("a/b")}, []string{`"a/b" of volume data`}},
	{"parts: one that came or went meanwhile", parted, func(f *Facts) {
		unmounted(f, partAt("a/b"))
		f.Changing = []string{partAt("a/b")}
	}, nil, nil},
	{"parts: one that is not certain anyway", parted, func(f *Facts) {
		unmounted(f, partAt("a/b"))
		f.Records.Refs[0].Parts[0].Mark = registry.MarkSent
	}, nil, nil},
	{"parts: another boot", parted, func(f *Facts) { f.Boot, f.Mounts = "boot-2", nil },
		[]string{"rebooted mark " + publishedAt(), "rebooted mark " + stagedAt()}, nil},
	{"parts: a dead volume", parted, func(f *Facts) {
		f.Inspected = map[string]mount.Info{publishedAt(): {Errno: unix.ENOTCONN}}
	}, []string{"dead " + publishedAt()}, nil},
	{"parts: its directory alone, between two steps", parted, func(f *Facts) {
		unmounted(f, partAt("a/b"))
		f.Records.Refs[0].Parts[0].Mark = registry.MarkSent
		f.Dirs = append([]mount.DirInfo{{Path: partAt("a/b"), Entries: 0}}, f.Dirs...)
	}, nil, nil},
	{"parts: what its task has mounted in it", parted, func(f *Facts) { mounted(f, partAt("a/b")+"/inner") }, nil, nil},
	{"parts: an unknown part", parted, func(f *Facts) { mounted(f, strayPart("x")) },
		[]string{"orphan unmount " + strayPart("x")}, []string{"is not in any record"}},
	{"parts: a used one", parted, func(f *Facts) {
		mounted(f, strayPart("x"))
		f.Users = map[string][]mount.User{strayPart("x"): {{Text: "process 7"}}}
	}, []string{"used " + strayPart("x")}, []string{"process 7"}},
	{"parts: an empty directory of nobody", parted, func(f *Facts) {
		f.Dirs = append([]mount.DirInfo{{Path: strayPart("x"), Entries: 0},
			{Path: filepath.Dir(strayPart("x")), Entries: 1}}, f.Dirs...)
	}, []string{"empty remove " + filepath.Dir(strayPart("x")), "empty remove " + strayPart("x")}, nil},
	{"parts: one with something in it", parted, func(f *Facts) {
		f.Dirs = append([]mount.DirInfo{{Path: strayPart("x"), Entries: 3},
			{Path: filepath.Dir(strayPart("x")), Entries: 1}}, f.Dirs...)
	}, []string{"left " + strayPart("x")}, []string{"3 entries"}},

	{"a contradiction", sound, func(f *Facts) { f.Damage = []string{"a ref has no claim"} },
		[]string{"damage " + layout.Database()},
		[]string{"a ref has no claim"}},
	{"what could not be examined", sound, func(f *Facts) {
		f.Unexamined = []Unexamined{{Detail: "no helper", Advice: "look again"},
			{Plugin: "ebs", Detail: "turned off", Advice: "none", Skipped: true}}
	}, []string{"unseen :", "skipped ebs:"}, []string{"no helper", "turned off"}},
}

func TestExamineFindsEachKind(t *testing.T) {
	kinds, actions := map[registry.FindingKind]bool{}, map[registry.FindingAction]bool{}
	for _, c := range examinations {
		f := c.from()
		c.but(&f)
		found := Examine(f)
		same(t, c.name, brief(found), c.found)
		text := ""
		for _, one := range found {
			text += one.Detail + "\n" + one.Advice + "\n"
			kinds[one.Kind], actions[one.Action] = true, true
			if one.Detail == "" || one.Advice == "" {
				t.Errorf("%s: %s says nothing: %+v", c.name, one.Kind, one)
			}
			if one.Kind == registry.FoundUsed && one.Action != registry.ActNothing {
				t.Errorf("%s: what is used is touched: %+v", c.name, one)
			}
		}
		for _, want := range c.says {
			if !strings.Contains(text, want) {
				t.Errorf("%s: does not say %q:\n%s", c.name, want, text)
			}
		}
		again := c.from()
		c.but(&again)
		if Digest(Examine(again)) != Digest(found) || (Digest(found) == "") != !slices.ContainsFunc(found, acts) {
			t.Errorf("%s: digest %q", c.name, Digest(found))
		}
	}
	for _, k := range order {
		if !kinds[k] {
			t.Errorf("no case finds %q", k)
		}
	}
	if len(kinds) != len(order) || len(actions) != 6 {
		t.Errorf("%d kinds are found, %d are known, and there are %d actions", len(kinds), len(order), len(actions))
	}
}

func acts(f registry.Finding) bool { return f.Action != registry.ActNothing }

// Plans that differ in a kind, an action or a place have different digests. Plans that differ only in texts have the
// same digest.
func TestDigestNamesThePlan(t *testing.T) {
	one := registry.Finding{Kind: registry.FoundOrphan, Action: registry.ActUnmount, Path: "/a", Volume: key,
		Alloc: "a", Request: "r",
		Detail: "x"}
	base := Digest([]registry.Finding{one})
	for what, edit := range map[string]func(*registry.Finding){
		"kind":   func(f *registry.Finding) { f.Kind = registry.FoundUsed },
		"action": func(f *registry.Finding) { f.Action = registry.ActRemove },
		"path":   func(f *registry.Finding) { f.Path = "/b" },
		"volume": func(f *registry.Finding) { f.Volume.External = "y" },
		"alloc":  func(f *registry.Finding) { f.Alloc = "b" }, "request": func(f *registry.Finding) { f.Request = "s" },
	} {
		other := one
		edit(&other)
		if Digest([]registry.Finding{other}) == base || Digest([]registry.Finding{one, other}) == base {
			t.Errorf("%s: the digest is the same", what)
		}
	}
	told := one
	told.Detail, told.Advice, told.Result = "y", "z", "done"
	idle := registry.Finding{Kind: registry.FoundDead, Path: "/c"}
	if Digest([]registry.Finding{idle, told}) != base || Digest([]registry.Finding{idle}) != "" || base == "" {
		t.Error("what is not done changes the digest")
	}
}

// The paths that Layout makes for volumes are recognized by their shape, whatever the IDs are. Paths above, beside or
// below are not.
func TestPathShapesAreRecognized(t *testing.T) {
	shape := shapesOf(layout)
	rapid.Check(t, func(t *rapid.T) {
		id := func(name string) string { return rapid.String().Draw(t, name) }
		c := registry.ClaimKey{
			Volume: registry.VolumeKey{Plugin: registry.PluginID(id("plugin")),
				External: registry.ExternalID(id("external"))},
			Alloc: registry.AllocID(id("alloc")), Request: registry.RequestName(id("request")),
		}
		root := registry.Tree{Host: layout.PluginRoot(c.Volume.Plugin)}
		stage, publish, above := layout.Staging(c.Volume, root).Host, layout.Target(c,
			root).Host, layout.TargetParent(c, root).Host
		part := layout.Part(c, id("path"))
		for path, want := range map[string]pathKind{
			stage: stagingPath, publish: targetPath, above: targetParent, root.Host: otherPath,
			layout.MountRoot(): otherPath, filepath.Dir(stage): otherPath,
			filepath.Dir(above): otherPath, stage + "/v": otherPath, publish + "/v": otherPath,
			publish + "x":        otherPath,
			"/elsewhere" + stage: otherPath,
			part:                 partPath, filepath.Dir(part): targetParent, part + "/v": otherPath,
			layout.MountRoot() + "/parts/publish/x/v": otherPath, layout.MountRoot() + "/other/x/v": otherPath,
		} {
			if got := shape.kind(path); got != want {
				t.Fatalf("%s is %d, want %d", path, got, want)
			}
		}
	})
}
