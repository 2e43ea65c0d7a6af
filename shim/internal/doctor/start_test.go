package doctor

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"holdfast/registry"
)

// A start only marks records and removes empty directories. It reports the rest. It unmounts nothing and calls no
// plugin.
func TestStart(t *testing.T) {
	w := newEnv(t, append(placed(), data, claim(), ref())...)
	w.mount(stagedAt(), stray("publish", "x"))
	w.dir(stray("stage", "empty"))
	w.dir(stray("stage", "full"))
	w.files[stray("stage", "full")] = 1
	findings, err := w.Start(t.Context())
	must(t, err)
	same(t, "found", brief(findings), []string{
		"lost mark " + publishedAt(), "orphan unmount " + stray("publish", "x"), "left " + stray("stage",
			"full"), "empty remove " + stray("stage", "empty"),
	})
	same(t, "acts", w.acts, []string{"rmdir " + stray("stage", "empty")})
	if len(w.asked) > 0 || len(w.mounts) != 2 {
		t.Errorf("asked about %q, mounted %v", w.asked, w.mounts)
	}
	if told := w.events(registry.EventReconciled); len(told) != 3 {
		t.Errorf("told %q", told)
	}
	w.view(func(v registry.View) {
		if r := v.Refs(key)[0]; r.Publish != registry.MarkSent {
			t.Errorf("%+v", r)
		}
	})
}

// A shim may die after it has made a directory and before it has recorded the call. The next shim removes the
// directory, although the claim exists. A retry makes it again; otherwise it would stay forever.
func TestStartRemovesWhatWasNotRecorded(t *testing.T) {
	w := newEnv(t, data, claim())
	made := []string{filepath.Dir(publishedAt()), stagedAt()}
	for _, dir := range made {
		w.dir(dir)
	}
	if d, err := w.Examine(t.Context()); err != nil || len(d.Findings) > 0 {
		t.Errorf("a running shim may be about to record it: %q, %v", brief(d.Findings), err)
	}
	_, err := w.Start(t.Context())
	must(t, err)
	slices.Sort(w.acts)
	same(t, "acts", w.acts, []string{"rmdir " + made[0], "rmdir " + made[1]})
}

// A full disk does not prevent a start. Any other failure does.
func TestStartOnAFullDisk(t *testing.T) {
	w := newEnv(t, append(placed(), data, claim(), ref())...)
	w.log.Fail(registry.Errorf(registry.ErrExhausted, "no space"))
	findings, err := w.Start(t.Context())
	if err != nil || len(findings) != 2 {
		t.Errorf("%q, %v", brief(findings), err)
	}
	w.log.Fail(registry.Errorf(registry.ErrFenced, "another one"))
	if _, err := w.Start(t.Context()); !errors.Is(err, registry.ErrFenced) {
		t.Errorf("fenced: %v", err)
	}
}

// Many findings do not displace older events.
func TestEventsOfAStartAreBounded(t *testing.T) {
	w := newEnv(t)
	for i := range 300 {
		w.mount(stray("stage", fmt.Sprint(i)))
	}
	_, err := w.Start(t.Context())
	must(t, err)
	told := w.events(registry.EventReconciled)
	if len(told) != maxEvents+1 || told[maxEvents] != "and 200 more: see holdfast doctor" {
		t.Errorf("%d are told, the last is %q", len(told), told[len(told)-1])
	}
}
