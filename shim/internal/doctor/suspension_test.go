package doctor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
)

// failing is a plugin that answers each ListVolumes with err, and counts.
type failing struct {
	err error
	n   *int
}

func (f failing) ListPage(context.Context, registry.InstanceKey, string) (csi.Page, error) {
	*f.n++
	return csi.Page{}, f.err
}

func died() error {
	return &registry.CallError{RPC: "ListVolumes", Code: "UNAVAILABLE", Kind: registry.ErrUnavailable, Lost: true,
		Detail: "error reading from server: EOF"}
}

// controllerOf is the healthy controller of ebs in a version, healthy since some time after noon.
func controllerOf(version string, since time.Duration) registry.Instance {
	in := instances(registry.ListVolumes)[0]
	in.Fingerprint.Provider, in.Fingerprint.Version, in.Health.Since = "ebs.csi", version, noon.Add(since)
	return in
}

func TestListVolumesThatKilledIsNotCalledAgain(t *testing.T) {
	w, dir, asked := newEnv(t, data), t.TempDir(), 0
	// examine runs doctor twice in a new shim, and returns how often the plugin was asked.
	examine := func(in registry.Instance) int {
		asked = 0
		w.put(in)
		w.build(Options{Live: true, Lister: failing{died(), &asked}, Suspended: csi.NewSuspensions(dir)})
		w.examine()
		w.examine()
		return asked
	}
	if n := examine(controllerOf("1", time.Minute)); n != 1 {
		t.Errorf("asked %d times", n)
	}
	if told := w.events(registry.EventReconciled); len(told) != 1 ||
		!strings.Contains(told[0], "died during ListVolumes") {
		t.Errorf("told %q", told)
	}
	again := controllerOf("1", time.Hour)
	again.Alloc = "p2" // of a job that was run again
	if n := examine(again); n != 0 {
		t.Errorf("a plugin that died of it is asked %d times by the next shim", n)
	}
	found := w.examine().Findings
	if len(found) != 1 || found[0].Kind != registry.FoundUnseen ||
		!strings.Contains(found[0].Detail, "died during ListVolumes at ") {
		t.Errorf("doctor finds %v", found)
	}
	newer := controllerOf("2", 2*time.Hour)
	newer.Alloc = "p2"
	if n := examine(newer); n != 1 {
		t.Errorf("another version is asked %d times", n)
	}
	must(t, os.Remove(filepath.Join(dir, "ebs.ListVolumes.json")))
	if n := examine(newer); n != 1 {
		t.Errorf("after its file was removed: asked %d times", n)
	}
}

// A plugin whose task is stopped meanwhile has not died of the call, and an answer is no death.
func TestOnlyDeathSuspendsListVolumes(t *testing.T) {
	stopping := registry.Task{TaskKey: controllerOf("1", 0).TaskKey(), Phase: registry.TaskStopping}
	for what, c := range map[string]struct {
		err     error
		records []registry.Record
	}{
		"its task is being stopped": {died(), []registry.Record{stopping}},
		"it answers UNAVAILABLE":    {&registry.CallError{Code: "UNAVAILABLE", Kind: registry.ErrUnavailable}, nil},
		"it fails":                  {errors.New("no"), nil},
	} {
		asked := 0
		w := newEnv(t, append(c.records, data, controllerOf("1", 0))...)
		w.build(Options{Live: true, Lister: failing{c.err, &asked}, Suspended: csi.NewSuspensions(t.TempDir())})
		for range 2 {
			same(t, what, brief(w.examine().Findings), []string{"unseen ebs:"})
		}
		if asked != 2 {
			t.Errorf("%s: asked %d times", what, asked)
		}
	}
}

func TestDoctorSaysWhichVolumesItCouldNotList(t *testing.T) {
	off, sick, cannot := controllerOf("1", 0), controllerOf("1", 0), controllerOf("1", 0)
	off.Options = map[string]string{registry.OptionListVolumes: registry.OptionOff}
	sick.Health.State, sick.Health.Cause = registry.Unhealthy, registry.CauseGone
	cannot.Fingerprint.Capabilities = nil
	node := instances()[1]
	split := node
	split.Fingerprint.Capabilities = []registry.Capability{registry.PluginController}
	well, loop := pages{{Entries: []csi.Entry{{Volume: "ext-1"}}}}, pages{{Next: "1"}, {Next: "0"}, {}}
	for what, c := range map[string]struct {
		records []registry.Record
		lister  Lister
		offline bool
		says    []string // nothing: all was examined
		skipped bool
	}{
		"it lists":                     {[]registry.Record{data, controllerOf("1", 0)}, well, false, nil, false},
		"it cannot list":               {[]registry.Record{data, cannot}, well, false, nil, false},
		"it has no controller":         {[]registry.Record{data, node}, well, false, nil, false},
		"no volumes and no controller": {nil, well, false, nil, false},
		"its controller is not there": {[]registry.Record{data, split}, well, false,
			[]string{"no controller now", "start the job"}, false},
		"nothing of it is there": {[]registry.Record{data}, well, false,
			[]string{"no controller now", "start the job"}, false},
		"its controller is dead": {[]registry.Record{data, sick}, well, false,
			[]string{"not healthy: gone", "plugin status ebs"}, false},
		"it is turned off": {[]registry.Record{data, off}, well, false,
			[]string{"list_volumes = false", "its storage"}, true},
		"ListVolumes fails": {[]registry.Record{data, controllerOf("1", 0)},
			failing{errors.New("no"), new(int)}, false, []string{": no", "log"}, false},
		"ListVolumes is endless": {[]registry.Record{data, controllerOf("1", 0)}, loop, false,
			[]string{"no end", "log"}, false},
		"ListVolumes hangs": {[]registry.Record{data, controllerOf("1", 0)}, slow{}, false,
			[]string{"within 20s", "log"}, false},
		"no agent runs": {[]registry.Record{data, controllerOf("1", 0)}, nil, true,
			[]string{"no agent runs", "start the agent"}, false},
		"no agent, and it is turned off": {[]registry.Record{data, off}, nil, true,
			[]string{"list_volumes = false", "its storage"}, true},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newEnv(t, c.records...)
				w.build(Options{Live: !c.offline, Lister: c.lister})
				d := w.examine()
				if len(c.says) == 0 {
					same(t, "found", brief(d.Findings), nil)
					return
				}
				kind := "unseen"
				if c.skipped {
					kind = "skipped"
				}
				same(t, "found", brief(d.Findings), []string{kind + " ebs:"})
				if d.Well() != c.skipped || !d.Sound() {
					t.Errorf("well %v, sound %v", d.Well(), d.Sound())
				}
				for _, text := range append(c.says, "the volumes of plugin ebs") {
					if f := d.Findings[0]; !strings.Contains(f.Detail+"\n"+f.Advice, text) {
						t.Errorf("%q is not in %q, %q", text, f.Detail, f.Advice)
					}
				}
			})
		})
	}
}

// What lies in the directory is not taken for "may be asked" if it cannot be read.
func TestDamagedSuspensionIsReported(t *testing.T) {
	w, dir, asked := newEnv(t, data, controllerOf("1", 0)), t.TempDir(), 0
	must(t, os.WriteFile(filepath.Join(dir, "ebs.ListVolumes.json"), nil, 0o600))
	w.build(Options{Live: true, Lister: failing{nil, &asked}, Suspended: csi.NewSuspensions(dir)})
	found := w.examine().Findings
	if asked != 0 || !slices.ContainsFunc(found, func(f registry.Finding) bool {
		return strings.Contains(f.Advice,
			": rm "+dir)
	}) {
		t.Errorf("asked %d times; found %v", asked, found)
	}
}
