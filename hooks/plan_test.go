package hooks

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"holdfast/registry"
)

// render returns a plan as JSON, which must be readable again.
func render(t *testing.T, p Plan) []byte {
	t.Helper()
	text, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	var back Plan
	if err := json.Unmarshal(text, &back); err != nil || !back.Equal(p) {
		t.Errorf("plan comes back from JSON as %+v, %v", back, err)
	}
	return append(text, '\n')
}

func pluginTask(isolated bool) AllocTask {
	return AllocTask{Alloc: "alloc-1", Task: "plugin", Attempt: 1, Isolated: isolated}
}

func TestStarting(t *testing.T) {
	for _, c := range []struct {
		name     string
		isolated bool
		spec     TaskSpec
	}{
		{"starting-node", true, TaskSpec{Plugin: PluginSpec{ID: "loopfs", Type: TypeNode}}},
		{"starting-controller", true, TaskSpec{Plugin: PluginSpec{ID: "loopfs", Type: TypeController}}},
		{"starting-monolith", true, TaskSpec{Plugin: PluginSpec{ID: "loopfs", Type: TypeMonolith, MountDir: "/plugin/",
			StagePublishBaseDir: "/vols"}}},
		{"starting-own-endpoint", true, TaskSpec{Plugin: PluginSpec{ID: "loopfs", Type: TypeNode},
			Env: []string{"A", "CSI_ENDPOINT"}}},
		{"starting-no-isolation", false, TaskSpec{Plugin: PluginSpec{ID: "loopfs", Type: TypeMonolith}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, err := Starting(example, pluginTask(c.isolated), c.spec)
			if err != nil {
				t.Fatal(err)
			}
			render(t, p.Plan)
			text, _ := json.MarshalIndent(p, "", "  ")
			golden(t, "testdata/"+c.name+".golden", append(text, '\n'))
		})
	}
}

// A restart keeps the plan and the socket. Another task of the plugin has a socket of its own and the same volumes.
func TestStartingIsStable(t *testing.T) {
	spec := TaskSpec{Plugin: PluginSpec{ID: "p", Type: TypeNode}}
	first, _ := Starting(example, pluginTask(true), spec)
	again := pluginTask(true)
	again.Attempt, again.Job = 7, "renamed"
	second, _ := Starting(example, again, spec)
	if !first.Plan.Equal(second.Plan) || first.Socket != second.Socket {
		t.Error("a restart changes the plan")
	}
	other := pluginTask(true)
	other.Task = "other"
	third, _ := Starting(example, other, spec)
	if third.Socket == first.Socket || third.Volumes != first.Volumes {
		t.Errorf("another task of the plugin has socket %s and volumes %v", third.Socket, third.Volumes)
	}
}

func TestStartingRefuses(t *testing.T) {
	for _, s := range []PluginSpec{
		{ID: "", Type: TypeNode},
		{ID: "p", Type: "driver"},
		{ID: "p", Type: TypeNode, MountDir: "csi"},
		{ID: "p", Type: TypeNode, MountDir: "/"},
		{ID: "p", Type: TypeNode, StagePublishBaseDir: "../x"},
		{ID: "p", Type: TypeNode, MountDir: "/a", StagePublishBaseDir: "/a"},
		{ID: "p", Type: TypeNode, MountDir: "/a", StagePublishBaseDir: "/a/b"},
		{ID: "p", Type: TypeNode, MountDir: "/a/b", StagePublishBaseDir: "/a"},
		{ID: "p", Type: TypeNode, MountDir: "/" + strings.Repeat("x", 98)},
		{ID: "p", Type: TypeNode, StagePublishBaseDir: "/" + strings.Repeat("x", 100)},
	} {
		if _, err := Starting(example, pluginTask(true), TaskSpec{Plugin: s}); !errors.Is(err, registry.ErrInvalid) {
			t.Errorf("%+v: %v", s, err)
		}
	}
	if _, err := Starting(Layout{}, pluginTask(true),
		TaskSpec{Plugin: PluginSpec{ID: "p", Type: TypeNode}}); !errors.Is(err, registry.ErrInvalid) {
		t.Errorf("empty layout: %v", err)
	}
	if _, err := Starting(example, AllocTask{}, TaskSpec{Plugin: PluginSpec{ID: "p", Type: TypeNode}}); !errors.Is(err,
		registry.ErrInvalid) {
		t.Errorf("nameless task: %v", err)
	}
}

func TestMountsGolden(t *testing.T) {
	files := registry.Usage{Access: registry.SingleNodeWriter, Attachment: registry.FileSystem}
	block := registry.Usage{Access: registry.SingleNodeWriter, Attachment: registry.BlockDevice}
	reader := registry.Usage{Access: registry.MultiNodeReaderOnly, Attachment: registry.FileSystem}
	spec := GroupSpec{
		Volumes: []VolumeRequest{{Name: "data", Usage: files}, {Name: "disk-1", Usage: block},
			{Name: "shared set", Usage: reader}},
		Mounts: map[string][]VolumeMount{
			"app": {
				{Volume: "shared set", Destination: "/data/shared", Propagation: HostToTask, SELinux: "z"},
				{Volume: "data", Destination: "/data", SELinux: "Z"},
				{Volume: "data", Destination: "/ro,\"x\"", ReadOnly: true, Propagation: Private},
				{Volume: "disk-1", Destination: "/dev/xvda"},
			},
			"raw": {{Volume: "data", Destination: "/data"},
				{Volume: "disk-1", Destination: "/dev/xvda", ReadOnly: true}},
			"rod": {{Volume: "disk-1", Destination: "/dev/xvda", ReadOnly: true}},
		},
	}
	at := map[registry.RequestName]Published{
		"data": {Target: registry.Tree{Host: "/state/mnt/p/publish/a/v"}, Usage: files},
		"disk-1": {Target: registry.Tree{Host: "/state/mnt/p/publish/b/v"}, Usage: block,
			Device: DeviceNumber{7, 3}},
		"shared set": {Target: registry.Tree{Host: "/state/mnt/p/publish/c/v"}, Usage: reader},
	}
	plans, err := Mounts(spec, at, map[string]bool{"app": true, "rod": true})
	if err != nil {
		t.Fatal(err)
	}
	if len(plans) != 3 {
		t.Errorf("plans for %d tasks", len(plans))
	}
	for task, plan := range plans {
		golden(t, "testdata/mounts-"+task+".golden", render(t, plan))
	}
}

// One device has two requests: "disk", and "copy", which is read-only. "image" is another device. The number of "new"
// is not known.
func TestBlockDevicesGolden(t *testing.T) {
	device := registry.Usage{Access: registry.MultiNodeSingleWriter, Attachment: registry.BlockDevice}
	readOnly := device
	readOnly.ReadOnly = true
	spec := GroupSpec{
		Volumes: []VolumeRequest{
			{Name: "disk", Usage: device}, {Name: "copy", Usage: readOnly}, {Name: "image", Usage: device},
			{Name: "new", Usage: device},
		},
		Mounts: map[string][]VolumeMount{
			"writer": {
				{Volume: "copy", Destination: "/dev/copy"}, {Volume: "disk", Destination: "/dev/disk"},
				{Volume: "new", Destination: "/srv/new"},
			},
			"reader": {
				{Volume: "copy", Destination: "/dev/copy"},
				{Volume: "image", Destination: "/dev/image", ReadOnly: true, Propagation: Bidirectional},
			},
			"bare": {{Volume: "disk", Destination: "/dev/disk"},
				{Volume: "image", Destination: "/dev/image", ReadOnly: true}},
		},
	}
	place := func(name string, u registry.Usage, n DeviceNumber) Published {
		return Published{Target: registry.Tree{Host: "/state/mnt/p/publish/" + name + "/v"}, Usage: u, Device: n}
	}
	plans, err := Mounts(spec, map[registry.RequestName]Published{
		"disk": place("a", device, DeviceNumber{7, 3}), "copy": place("b", readOnly, DeviceNumber{7, 3}),
		"image": place("c", device, DeviceNumber{253, 0}), "new": place("d", device, DeviceNumber{}),
	}, map[string]bool{"writer": true, "reader": true})
	if err != nil {
		t.Fatal(err)
	}
	for task, plan := range plans {
		golden(t, "testdata/block-"+task+".golden", render(t, plan))
	}
	for task, want := range map[string][]Operation{
		"writer": {OpDevice, OpDeviceRule, OpEnv}, "reader": {OpDevice, OpDeviceRule, OpEnv}, "bare": {OpEnv},
	} {
		if got := plans[task].Needs(); !slices.Equal(got, want) {
			t.Errorf("task %s needs %v, want %v", task, got, want)
		}
	}
}

func TestReadOnlyIsTheOr(t *testing.T) {
	for _, c := range []struct {
		request, mount, published bool
		access                    registry.AccessMode
		want                      bool
	}{
		{false, false, false, registry.SingleNodeWriter, false},
		{true, false, false, registry.SingleNodeWriter, true},
		{false, true, false, registry.SingleNodeWriter, true},
		{false, false, true, registry.SingleNodeWriter, true},
		{true, true, true, registry.MultiNodeMultiWriter, true},
		{false, false, false, registry.SingleNodeReaderOnly, true},
		{false, false, false, registry.MultiNodeReaderOnly, true},
	} {
		mount := func(mode registry.AttachmentMode) Plan {
			plans, err := Mounts(GroupSpec{
				Volumes: []VolumeRequest{{Name: "v", Usage: registry.Usage{ReadOnly: c.request}}},
				Mounts:  map[string][]VolumeMount{"t": {{Volume: "v", Destination: "/v", ReadOnly: c.mount}}},
			}, map[registry.RequestName]Published{"v": {
				Usage:  registry.Usage{Attachment: mode, ReadOnly: c.published, Access: c.access},
				Device: DeviceNumber{8, 1},
			}}, map[string]bool{"t": true})
			if err != nil {
				t.Fatal(err)
			}
			return plans["t"]
		}
		if p := mount(registry.FileSystem); p.Binds[0].ReadOnly != c.want {
			t.Errorf("%+v: %+v", c, p)
		}
		want := map[bool]string{true: "r", false: "rw"}[c.want]
		if p := mount(registry.BlockDevice); len(p.Binds) != 0 || p.Devices[0].Access != want ||
			p.Rules[0] != (DeviceRule{"b", 8, 1, want}) {
			t.Errorf("block device %+v: %+v", c, p)
		}
	}
}

func TestMountsRefuses(t *testing.T) {
	mounts := func(names ...registry.RequestName) GroupSpec {
		var s GroupSpec
		for _, n := range names {
			s.Volumes = append(s.Volumes, VolumeRequest{Name: n})
			s.Mounts = map[string][]VolumeMount{"t": append(s.Mounts["t"],
				VolumeMount{Volume: n, Destination: "/" + string(n)})}
		}
		return s
	}
	both := map[registry.RequestName]Published{"a-b": {}, "a_b": {}}
	if _, err := Mounts(mounts("a-b", "a_b"), both, nil); !errors.Is(err, registry.ErrInvalid) {
		t.Errorf("two volumes with one variable: %v", err)
	}
	if _, err := Mounts(mounts("a-b"), nil, nil); !errors.Is(err, registry.ErrInternal) {
		t.Errorf("unpublished volume: %v", err)
	}
	unknown := mounts("a-b")
	unknown.Volumes = nil
	if _, err := Mounts(unknown, both, nil); !errors.Is(err, registry.ErrInvalid) {
		t.Errorf("unknown volume: %v", err)
	}
}

func TestReferencesAreExpanded(t *testing.T) {
	env := map[string]string{
		"NOMAD_ALLOC_ID": "a1", "node.unique.id": "n1", "attr.kernel.name": "linux", "meta.rack": "r9", "EMPTY": "",
		"LOOP": "${LOOP}",
	}
	for text, want := range map[string]string{
		"":                               "",
		"plain $x {y} }":                 "plain $x {y} }",
		"--node=${node.unique.id}":       "--node=n1",
		"${NOMAD_ALLOC_ID}${EMPTY}.":     "a1.",
		`${env["NOMAD_ALLOC_ID"]}`:       "a1",
		"${env.NOMAD_ALLOC_ID}":          "a1",
		`${meta["rack"]}-${meta.rack}`:   "r9-r9",
		"${ attr.kernel.name }":          "linux",
		"${unknown} ${attr.cpu}":         "${unknown} ${attr.cpu}",
		`${env["NO"]} ${meta["rack]}`:    `${env["NO"]} ${meta["rack]}`,
		"${LOOP}":                        "${LOOP}",
		"${NOMAD_ALLOC_ID":               "${NOMAD_ALLOC_ID",
		"${a ${NOMAD_ALLOC_ID} b}":       "${a a1 b}",
		"${}":                            "${}",
		"$${NOMAD_ALLOC_ID}":             "$a1",
		"unix://${NOMAD_ALLOC_ID}/ \x00": "unix://a1/ \x00",
	} {
		if got := Expand(text, env); got != want {
			t.Errorf("Expand(%q) = %q, want %q", text, got, want)
		}
	}
}

func FuzzExpand(f *testing.F) {
	f.Add("${A} ${B}", "x")
	f.Fuzz(func(t *testing.T, text, value string) {
		if got := Expand(text, nil); got != text {
			t.Errorf("nothing is known, but %q became %q", text, got)
		}
		if got := Expand("${A}"+value, map[string]string{"A": value}); !strings.HasPrefix(got, value) {
			t.Errorf("%q is not what A stands for: %q", got, value)
		}
	})
}
