package doctor

import (
	"context"
	"errors"
	"fmt"
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

// pages is a plugin that returns these pages. The token of a page is its number.
type pages []csi.Page

func (p pages) ListVolumes(_ context.Context, _ registry.InstanceKey, token string) (csi.Page, error) {
	n := 0
	if token != "" {
		_, _ = fmt.Sscan(token, &n)
	}
	page := p[n]
	if n+1 < len(p) && page.Next == "" {
		page.Next = fmt.Sprint(n + 1)
	}
	return page, nil
}

// answers is a plugin that answers each call with the next of these functions.
type answers []func(token string) (csi.Page, error)

func (a *answers) ListVolumes(_ context.Context, _ registry.InstanceKey, token string) (csi.Page, error) {
	next := (*a)[0]
	*a = (*a)[1:]
	return next(token)
}

func abort(string) (csi.Page, error) { return csi.Page{}, &registry.CallError{Code: "ABORTED"} }

func known() Records {
	return Records{Volumes: []registry.Volume{data}, Placements: []Placement{placement()},
		Instances: instances(registry.ListVolumes, registry.ListPublished)}
}

func askAll(t *testing.T, l Lister) (Listing, error) {
	t.Helper()
	return list(t.Context(), l, known().Instances[0], known())
}

func TestListingKeepsWhatMatters(t *testing.T) {
	l, err := askAll(t, pages{
		{Entries: []csi.Entry{{Volume: "ext-1", Nodes: []registry.NodeID{"i-7", "i-1", ""}},
			{Volume: "theirs", Nodes: []registry.NodeID{"i-7"}}}},
		{Entries: []csi.Entry{{Volume: "ext-1"}, {Volume: "strange", Nodes: []registry.NodeID{"i-1"}},
			{Volume: "not UTF-8 \xff", Nodes: []registry.NodeID{"i-1"}}}},
	})
	must(t, err)
	if len(l.Volumes) != 2 || !l.Volumes["ext-1"].Here || !l.Volumes["ext-1"].Nodes["i-1"] ||
		len(l.Volumes["ext-1"].Nodes) != 1 ||
		!l.Volumes["strange"].Here {
		t.Errorf("%+v", l.Volumes)
	}
	if l.Node != "i-1" || !l.Published {
		t.Errorf("%+v", l)
	}
}

// A list that fails, is truncated or has no end is discarded.
func TestTruncatedListIsDiscarded(t *testing.T) {
	loop := pages{{Next: "1"}, {Next: "0"}, {}}
	long := make(pages, csi.MaxPages+5)
	for what, l := range map[string]Lister{
		"a loop of tokens": loop, "too many pages": long, "the token of the page itself": pages{{}, {Next: "1"}, {}},
		"a failure": &answers{func(string) (csi.Page, error) { return csi.Page{}, errors.New("no") }},
		"a failure later": &answers{func(string) (csi.Page, error) { return csi.Page{Next: "1"}, nil },
			func(string) (csi.Page, error) {
				return csi.Page{}, errors.New("no")
			}},
		"four expired pages": &answers{abort, abort, abort, abort},
	} {
		w := newEnv(t, append(placed(), data, claim(), ref())...)
		w.mount(stagedAt(), publishedAt())
		w.put(records(known().Instances)...)
		if _, err := askAll(t, l); err == nil {
			t.Errorf("%s: no error", what)
		}
		if a, is := l.(*answers); is && len(*a) > 0 {
			t.Errorf("%s: %d answers were not asked for", what, len(*a))
		}
		if _, is := l.(*answers); is {
			continue // has answered
		}
		w.build(Options{Live: true, Lister: l})
		found := w.examine().Findings
		same(t, what, brief(found), []string{"unseen ebs:"})
	}
}

// If a page token has expired, the list is read again from its start, three times at most.
func TestExpiredTokensBeginAnew(t *testing.T) {
	first := func(token string) (csi.Page, error) {
		if token != "" {
			return csi.Page{}, fmt.Errorf("began with %q", token)
		}
		return csi.Page{Entries: []csi.Entry{{Volume: "ext-1", Nodes: []registry.NodeID{"i-1"}}}, Next: "2"}, nil
	}
	last := func(string) (csi.Page, error) { return csi.Page{}, nil }
	l, err := askAll(t, &answers{first, abort, abort, first, abort, first, last})
	if err != nil || len(l.Volumes) != 1 {
		t.Errorf("%+v, %v", l, err)
	}
}

// A plugin that reports endless volumes as attached here causes a limited number of findings.
func TestEndlessListIsBounded(t *testing.T) {
	p := make(pages, 50)
	for i := range p {
		for n := range 100 {
			p[i].Entries = append(p[i].Entries, csi.Entry{Volume: registry.ExternalID(fmt.Sprint("v", i, "-", n)),
				Nodes: []registry.NodeID{"i-1"}})
		}
	}
	l, err := askAll(t, p)
	must(t, err)
	f := bare()
	f.Listings = []Listing{l}
	f.Records.Volumes = nil
	f.Listings[0].Before = f.Records.versions()
	if found := Examine(f); len(l.Volumes) > maxFindings || len(found) > maxFindings || len(found) == 0 {
		t.Errorf("%d are kept, %d found", len(l.Volumes), len(found))
	}
}

// slow is a plugin that does not answer.
type slow struct{}

func (slow) ListVolumes(ctx context.Context, _ registry.InstanceKey, _ string) (csi.Page, error) {
	<-ctx.Done()
	return csi.Page{}, context.Cause(ctx)
}

// failing is a plugin that answers each ListVolumes with err, and counts.
type failing struct {
	err error
	n   *int
}

func (f failing) ListVolumes(context.Context, registry.InstanceKey, string) (csi.Page, error) {
	*f.n++
	return csi.Page{}, f.err
}

func died() error {
	return &registry.CallError{RPC: "ListVolumes", Code: "UNAVAILABLE", Kind: registry.ErrUnavailable, Lost: true,
		Detail: "error reading from server: EOF"}
}

// controllerOf returns a healthy controller of plugin ebs in a version. since says how long after noon it became
// healthy.
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

// If the plugin's task is stopped meanwhile, the plugin has not died of the call. An answer is no death either.
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
				if d.CleanAndComplete() != c.skipped || !d.Clean() {
					t.Errorf("well %v, sound %v", d.CleanAndComplete(), d.Clean())
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

// A suspension file that cannot be read suspends the call and is reported.
func TestDamagedSuspensionIsReported(t *testing.T) {
	w, dir, asked := newEnv(t, data, controllerOf("1", 0)), t.TempDir(), 0
	must(t, os.WriteFile(filepath.Join(dir, "ebs.ListVolumes.json"), nil, 0o600))
	w.build(Options{Live: true, Lister: failing{nil, &asked}, Suspended: csi.NewSuspensions(dir)})
	found := w.examine().Findings
	if asked != 0 || !slices.ContainsFunc(found, func(f registry.Finding) bool {
		return strings.Contains(f.Advice, ": rm "+dir)
	}) {
		t.Errorf("asked %d times; found %v", asked, found)
	}
}
