package doctor

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"holdfast/internal/mount"
	"holdfast/registry"
	"holdfast/shim/internal/csi"
)

func (w *env) examine() registry.Diagnosis {
	w.t.Helper()
	diagnosis, err := w.Examine(context.Background())
	must(w.t, err)
	return diagnosis
}

// repair carries out the plan of an examination, and returns the result of each step.
func (w *env) repair() (results []string) {
	w.t.Helper()
	diagnosis, err := w.Repair(context.Background(), w.examine().Digest)
	must(w.t, err)
	if !diagnosis.Repaired {
		w.t.Error("it does not say that it was a repair")
	}
	for i, f := range diagnosis.Findings {
		results = append(results, brief(diagnosis.Findings)[i]+": "+f.Result)
	}
	return results
}

// An examination changes nothing, neither a record nor a mount nor a directory.
func TestExamineChangesNothing(t *testing.T) {
	w := newEnv(t, append(placed(), data, claim(), ref())...)
	w.mount(stray("stage", "x"))
	w.dir(stray("publish", "y"))
	before := w.index()
	if len(w.examine().Findings) != 5 {
		t.Errorf("found %q", brief(w.examine().Findings))
	}
	if len(w.acts) > 0 || w.index() != before {
		t.Errorf("it did %q, and the index went from %d to %d", w.acts, before, w.index())
	}
}

func (w *env) index() (at registry.Seq) {
	w.view(func(v registry.View) { at = v.Index() })
	return at
}

// A missing mount that is recorded as done is marked, in one commit with its event.
func TestRepairMarks(t *testing.T) {
	w := newEnv(t, append(placed(), data, claim(), ref())...)
	before := w.index()
	same(t, "results", w.repair(), []string{"lost mark " + publishedAt() + ": done",
		"lost mark " + stagedAt() + ": done"})
	w.view(func(v registry.View) {
		p := placedIn(v)
		r := v.Refs(key)[0]
		if p.Staging.State != registry.MarkSent || p.Attachment.State != registry.MarkDone ||
			r.Publish != registry.MarkSent ||
			p.Staging.ModifyIndex != r.ModifyIndex || r.ModifyIndex != before+1 {
			t.Errorf("%+v %+v", p, r)
		}
	})
	if told := w.events(registry.EventReconciled); len(told) != 2 ||
		!strings.HasPrefix(told[0], "lost: "+publishedAt()) {
		t.Errorf("told %q", told)
	}
	if left := w.examine(); len(left.Findings) > 0 {
		t.Errorf("found again: %q", brief(left.Findings))
	}
}

// If a plugin reports a volume as detached, the volume is marked.
func TestRepairMarksWhatIsDetached(t *testing.T) {
	w := newEnv(t, append(placed(), data, claim(), ref())...)
	w.put(records(instances(registry.ListVolumes, registry.ListPublished))...)
	w.build(Options{Live: true, Lister: pages{{Entries: []csi.Entry{{Volume: "ext-1",
		Nodes: []registry.NodeID{"i-2"}}}}}})
	w.mount(stagedAt(), publishedAt())
	same(t, "results", w.repair(), []string{"detached mark " + key.String() + ": done"})
	w.view(func(v registry.View) {
		if p := placedIn(v); p.Attachment.State != registry.MarkSent || p.Staging.State != registry.MarkDone {
			t.Errorf("%+v", p)
		}
	})
}

func records(instances []registry.Instance) (list []registry.Record) {
	for _, in := range instances {
		list = append(list, in)
	}
	return list
}

// Unused unknown mounts are unmounted: publishes before their staging, and all mounts of a stack. Then their
// directories are removed.
func TestRepairUnmountsUnusedMounts(t *testing.T) {
	w := newEnv(t)
	w.mount(stray("stage", "x"), stray("stage", "x"), stray("publish", "x"))
	w.machine.users[stray("stage", "x")] = []mount.User{{Mount: stray("publish", "x")}}
	same(t, "results", w.repair(), []string{"orphan unmount " + stray("publish", "x") + ": done",
		"orphan unmount " + stray("stage", "x") + ": done"})
	same(t, "acts", w.acts, []string{
		"unmount " + stray("publish", "x"), "rmdir " + stray("publish", "x"),
		"rmdir " + filepath.Dir(stray("publish", "x")),
		"unmount " + stray("stage", "x"), "unmount " + stray("stage", "x"), "rmdir " + stray("stage", "x"),
	})
	if left := w.examine(); len(left.Findings) > 0 || len(w.mounts) > 0 {
		t.Errorf("left: %q, %v", brief(left.Findings), w.mounts)
	}
	if told := w.events(registry.EventReconciled); len(told) != 2 || !strings.Contains(told[0], "repair: done") {
		t.Errorf("told %q", told)
	}
}

// Of a hundred unknown mounts, the half in use stays mounted. The machine reports an unmount of any of these.
func TestRepairTouchesNothingThatIsUsed(t *testing.T) {
	w := newEnv(t)
	for i := range 100 {
		path := stray([]string{"stage", "publish"}[i/2%2], fmt.Sprint("v", i))
		w.mount(path)
		if i%2 == 0 {
			w.machine.users[path] = []mount.User{{Text: "process 7"}}
		}
	}
	w.repair()
	if len(w.mounts) != 50 {
		t.Errorf("%d mounts are left", len(w.mounts))
	}
	for _, m := range w.mounts {
		if len(w.machine.users[m.Point]) == 0 {
			t.Errorf("%s is left, and nobody uses it", m.Point)
		}
	}
}

// The negative control: an examination that ignores users would unmount a mount in use, and the tests notice it.
func TestIgnoringUsersIsNoticed(t *testing.T) {
	f := bare()
	mounted(&f, stray("stage", "x"))
	f.Users = map[string][]mount.User{stray("stage", "x"): {{Text: "process 7"}}}
	careless := f
	careless.Users = map[string][]mount.User{}
	if slices.Equal(brief(Examine(f)), brief(Examine(careless))) || Digest(Examine(careless)) == "" {
		t.Error("the users make no difference")
	}
	used := newMachine(ignoreErrors{t})
	used.mount(stray("stage", "x"))
	used.users[stray("stage", "x")] = []mount.User{{Text: "process 7"}}
	if err := used.Unmount(t.Context(), stray("stage", "x")); err == nil {
		t.Error("the machine unmounts a mount in use")
	}
}

// ignoreErrors is a test that ignores errors which a machine reports.
type ignoreErrors struct{ testing.TB }

func (ignoreErrors) Errorf(string, ...any) {}

// A mount that gets a user or a record between plan and unmount stays.
func TestUsersAreCheckedBeforeUnmount(t *testing.T) {
	second := stray("stage", "y")
	for want, change := range map[string]func(w *env){
		"not done: it is in use by now: process 9 (sh)": func(w *env) {
			w.machine.users[second] = []mount.User{{Text: "process 9 (sh) works in it"}}
		},
		"a record names it by now": func(w *env) {
			p := placement().Staging
			p.Path.Host = second
			w.put(p)
		},
	} {
		w := newEnv(t, data)
		w.mount(stray("publish", "x"), second)
		w.before = func(act string) {
			if act == "unmount "+stray("publish", "x") {
				change(w)
			}
		}
		if got := w.repair(); len(w.mounts) != 1 || len(got) != 2 || !strings.Contains(got[1], want) {
			t.Errorf("%q, want %q; left %v", got, want, w.mounts)
		}
	}
}

// A plan other than the one that was shown is not carried out.
func TestStalePlanIsRefused(t *testing.T) {
	w := newEnv(t, append(placed(), data, claim(), ref())...)
	w.mount(stagedAt(), publishedAt(), stray("stage", "x"))
	digest := w.examine().Digest
	w.mount(stray("stage", "y"))
	for what, change := range map[string]func(){
		"another mount":  func() {},
		"it is used now": func() { w.machine.users[stray("stage", "x")] = []mount.User{{Text: "process 7"}} },
		"no plan at all": func() { w.mounts = w.mounts[:2] },
	} {
		change()
		before := w.index()
		_, err := w.Repair(t.Context(), digest)
		if !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(), "run holdfast doctor again") ||
			len(w.acts) > 0 || w.index() != before {
			t.Errorf("%s: %v, and %q was done", what, err, w.acts)
		}
	}
}

// The records at the time of the commit count. If they have changed since the plan, the plan is refused and nothing is
// written.
func TestPlanIsComparedInTheCommit(t *testing.T) {
	w := newEnv(t, append(placed(), data, claim(), ref())...)
	digest := w.examine().Digest
	w.Doctor.machine = late{w.machine, func() { // this comes after the records are read
		r := ref()
		r.Publish = registry.MarkSent
		w.put(r)
	}}
	if _, err := w.Repair(t.Context(), digest); !errors.Is(err, registry.ErrConflict) {
		t.Errorf("got %v", err)
	}
	w.view(func(v registry.View) {
		if p := placedIn(v); p.Staging.State != registry.MarkDone {
			t.Errorf("%+v", p)
		}
	})
}

// late is a machine whose records change when its mounts are read.
type late struct {
	*machine
	change func()
}

func (l late) Inspect(ctx context.Context, paths ...string) (map[string]mount.Info, error) {
	l.change()
	return l.machine.Inspect(ctx, paths...)
}

// A known volume that is staged without a record gets records of its staging and attachment, both uncertain. Then the
// plugin takes the volume down.
func TestRepairAdopts(t *testing.T) {
	w := newEnv(t, data)
	w.build(Options{Live: true, Node: "n1"})
	w.put(records(instances(registry.AttachDetach))...)
	w.mount(stagedAt(), stray("publish", "x"))
	w.machine.users[stagedAt()] = []mount.User{{Mount: stray("publish", "x")}}
	w.undo = func() {
		if w.covered(stray("publish", "x")) {
			t.Error("the publish of the volume is still mounted")
		}
		w.view(func(v registry.View) {
			p := placedIn(v)
			want := placement()
			want.Attachment.State = registry.MarkSent
			want.Staging.State, want.Staging.Mounts = registry.MarkSent, false
			want.Attachment.CreateIndex, want.Attachment.ModifyIndex = p.Attachment.CreateIndex,
				p.Attachment.ModifyIndex
			want.Staging.CreateIndex, want.Staging.ModifyIndex = p.Staging.CreateIndex, p.Staging.ModifyIndex
			if p.Volume != key || fmt.Sprint(p) != fmt.Sprint(want) {
				t.Errorf("adopted as %+v", p)
			}
		})
		w.mounts = nil
		w.drop(key.StagingRecord(), placement().Attachment.Key())
	}
	same(t, "results", w.repair(), []string{"orphan unmount " + stray("publish", "x") + ": done",
		"orphan adopt " + stagedAt() + ": done"})
}

// A publish that cannot be unmounted keeps the staged volume below it.
func TestStagedVolumeIsKeptBelowItsPublishes(t *testing.T) {
	w := newEnv(t, data)
	w.mount(stagedAt(), stray("publish", "x"))
	w.machine.users[stagedAt()] = []mount.User{{Mount: stray("publish", "x"), Text: "it is mounted at x as well"}}
	digest := w.examine().Digest
	w.Doctor.machine = stuck{w.machine}
	diagnosis, err := w.Repair(t.Context(), digest)
	must(t, err)
	for _, f := range diagnosis.Findings {
		if !strings.HasPrefix(f.Result, "not done: ") {
			t.Errorf("%s: %s", f, f.Result)
		}
	}
	w.view(func(v registry.View) {
		if placed := placedIn(v).Volume != (registry.VolumeKey{}); placed {
			t.Error("it was adopted")
		}
	})
}

// stuck is a machine that unmounts nothing.
type stuck struct{ *machine }

func (stuck) Unmount(context.Context, string) error { return errors.New("it is in use") }

// A plugin takes down volumes without a claim, at once or when it runs again.
func TestRepairUndoes(t *testing.T) {
	for what, c := range map[string]struct {
		live, answers bool
		want          string
	}{
		"a plugin that answers": {true, true, "done"},
		"no shim runs":          {false, false, "recorded: the next shim asks plugin ebs"},
	} {
		w := newEnv(t, append(placed(), data)...)
		w.mount(stagedAt())
		w.build(Options{Live: c.live})
		w.undo = func() {
			w.drop(key.StagingRecord(), placement().Attachment.Key(), registry.AttachmentKey{Volume: key}.Key())
			w.mounts = nil
		}
		got := slices.DeleteFunc(w.repair(), func(s string) bool { return strings.HasPrefix(s, "unseen ") })
		if len(got) != 1 || !strings.HasPrefix(got[0], "unowned undo "+stagedAt()+": "+c.want) {
			t.Errorf("%s: %q", what, got)
		}
	}
}

// A repair does not wait for a plugin that does not answer.
func TestRepairDoesNotWaitForAPlugin(t *testing.T) {
	w := newEnv(t, append(placed(), data)...)
	w.mount(stagedAt())
	ctx, cancel := context.WithCancel(t.Context())
	w.undo = cancel
	diagnosis, err := w.Repair(ctx, "")
	if !errors.Is(err, context.Canceled) || !strings.HasPrefix(diagnosis.Findings[0].Result, "begun: plugin ebs") {
		t.Errorf("%v, %+v", err, diagnosis)
	}
}

// Empty directories are removed. A directory that has got entries meanwhile stays.
func TestRepairRemovesEmptyDirectories(t *testing.T) {
	w := newEnv(t, data)
	w.dir(stray("publish", "x"))
	w.dir(stagedAt())
	w.dir(stray("stage", "full"))
	w.files[stray("stage", "full")] = 1
	same(t, "results", w.repair(), []string{
		"left " + stray("stage", "full") + ": ",
		"empty remove " + filepath.Dir(stray("publish", "x")) + ": done",
		"empty remove " + stray("publish", "x") + ": done",
		"empty remove " + stagedAt() + ": done",
	})
	if _, there := w.files[filepath.Dir(stray("publish", "x"))]; there || w.files[stray("stage", "full")] != 1 {
		t.Errorf("left %v", w.files)
	}
}

// The directory of a volume is left alone while another operation holds the volume's lock.
func TestBusyVolumesAreLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newEnv(t, data)
		w.dir(stagedAt())
		leave, err := w.Locks.Lock(t.Context(), key, "a test")
		must(t, err)
		defer leave()
		if got := w.repair(); len(got) != 1 || !strings.Contains(got[0], "a test") || len(w.acts) > 0 {
			t.Errorf("%q, %q", got, w.acts)
		}
	})
}

// A mount in the way of a claim is unmounted, but only while no other operation holds the volume's lock.
func TestMountInTheWayOfAClaimIsUnmounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newEnv(t, data, claim())
		w.mount(stagedAt(), publishedAt())
		leave, err := w.Locks.Lock(t.Context(), key, "a test")
		must(t, err)
		if got := w.repair(); !strings.Contains(strings.Join(got, ""), "a test") || len(w.acts) > 0 {
			t.Errorf("%q, %q", got, w.acts)
		}
		leave()
		same(t, "results", w.repair(), []string{"orphan unmount " + publishedAt() + ": done",
			"orphan unmount " + stagedAt() + ": done"})
	})
}

func TestOneRepairAtATime(t *testing.T) {
	w := newEnv(t)
	w.mount(stray("stage", "x"))
	w.before = func(string) {
		if _, err := w.Repair(t.Context(), ""); !errors.Is(err, registry.ErrConflict) {
			t.Errorf("a second one: %v", err)
		}
	}
	w.repair()
}

// After a failed inspection, no mount counts as unused or as working.
func TestFailedInspectionIsReported(t *testing.T) {
	w := newEnv(t, append(placed(), data, claim(), ref())...)
	w.mount(stagedAt(), publishedAt(), stray("stage", "x"))
	w.failure = errors.New("no helper")
	found := w.examine()
	same(t, "found", brief(found.Findings), []string{"unseen :", "used " + stray("stage", "x")})
	if found.Digest != "" {
		t.Error("there is a plan")
	}
}
