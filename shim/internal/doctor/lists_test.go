package doctor

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
)

// pages is a plugin with these pages; the token of one is its number.
type pages []csi.Page

func (p pages) ListPage(_ context.Context, _ registry.InstanceKey, token string) (csi.Page, error) {
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

// answers is a plugin that answers each call with the next of these.
type answers []func(token string) (csi.Page, error)

func (a *answers) ListPage(_ context.Context, _ registry.InstanceKey, token string) (csi.Page, error) {
	next := (*a)[0]
	*a = (*a)[1:]
	return next(token)
}

func abort(string) (csi.Page, error) { return csi.Page{}, &registry.CallError{Code: "ABORTED"} }

func known() Records {
	return Records{Volumes: []registry.Volume{data}, Placements: []registry.Placement{placement()},
		Instances: instances(registry.ListVolumes,
			registry.ListPublished)}
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
			{Volume: "not UTF-8 \xff",
				Nodes: []registry.NodeID{"i-1"}}}},
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
	long := make(pages, maxPages+5)
	for what, l := range map[string]Lister{
		"a loop of tokens": loop, "too many pages": long, "the token of the page itself": pages{{}, {Next: "1"}, {}},
		"a failure": &answers{func(string) (csi.Page, error) { return csi.Page{}, errors.New("no") }},
		"a failure later": &answers{func(string) (csi.Page, error) { return csi.Page{Next: "1"}, nil },
			func(string) (csi.Page, error) {
				return csi.Page{},
					errors.New("no")
			}},
		"four expired pages": &answers{abort, abort, abort, abort},
	} {
		w := newEnv(t, data, placement(), claim(), ref())
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

// A token that does not hold any more begins the pages anew, three times at most.
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

// A plugin that tells of endless volumes attached here costs a bounded number of findings.
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

func (slow) ListPage(ctx context.Context, _ registry.InstanceKey, _ string) (csi.Page, error) {
	<-ctx.Done()
	return csi.Page{}, context.Cause(ctx)
}

// What a controller's list says of the health of our volumes is recorded and reported, if the
// controller declares it.
func TestListedConditionIsRecorded(t *testing.T) {
	list := func(message string) pages {
		c := func() *registry.VolumeCondition {
			return &registry.VolumeCondition{Abnormal: message != "", Message: message}
		}
		return pages{{Entries: []csi.Entry{{Volume: "ext-1", Condition: c()}, {Volume: "theirs", Condition: c()},
			{Volume: "ext-1"}}}}
	}
	w := newEnv(t, data, placement(), claim(), ref())
	for i, c := range []struct {
		message  string
		declared bool
		told     int
	}{
		{"degraded", false, 0}, {"degraded", true, 1}, {"degraded", true, 1}, {"worse", true, 1}, {"", true, 2},
		{"degraded", true, 3},
		{"", false, 3}, // an update that does not tell it any more
	} {
		caps := []registry.Capability{registry.ListVolumes}
		if c.declared {
			caps = append(caps, registry.ListCondition)
		}
		w.put(records(instances(caps...))...)
		w.build(Options{Live: true, Lister: list(c.message)})
		if _, err := w.Doctor.Examine(t.Context()); err != nil {
			t.Fatal(err)
		}
		told := append(w.events(registry.EventVolumeUnhealthy), w.events(registry.EventVolumeHealthy)...)
		if len(told) != c.told {
			t.Errorf("%d: told %q", i, told)
		}
		w.view(func(v registry.View) {
			vol, _ := v.VolumeByKey(key)
			want := registry.VolumeCondition{}
			if c.declared {
				want.Abnormal, want.Message = c.message != "", c.message
			}
			if got := vol.Health.Controller; got.Abnormal != want.Abnormal || got.Message != want.Message ||
				vol.Health.Node.Abnormal {
				t.Errorf("%d: recorded %+v", i, vol.Health)
			}
		})
	}
}
