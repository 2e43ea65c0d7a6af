package controller

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// healthPlugin reports the health that a test sets. It keeps a journal of its calls.
type healthPlugin struct {
	HealthDriver // nil: a test that makes any other call fails
	pages        []csi.HealthPage
	aborts       int // how many of the next lists are answered ABORTED
	one          registry.Condition
	err          error // if set, returned instead of one
	journal      []string
}

func (p *healthPlugin) ListHealth(_ context.Context, _ registry.InstanceKey, token string) (csi.HealthPage, error) {
	p.journal = append(p.journal, "list "+token)
	if token != "" && p.aborts > 0 {
		p.aborts--
		return csi.HealthPage{}, &registry.CallError{RPC: registry.ListHealthRPC, Code: "ABORTED"}
	}
	if token == "" {
		return p.pages[0], nil
	}
	n := 0
	_, _ = fmt.Sscan(token, &n)
	return p.pages[min(n, len(p.pages)-1)], nil
}

func (p *healthPlugin) ControllerHealth(
	_ context.Context, _ registry.InstanceKey, r csi.HealthRequest,
) (registry.Condition, error) {
	p.journal = append(p.journal, "get "+string(r.VolumeID))
	return p.one, p.err
}

// An error about a single volume is logged when it begins and when it changes.
func TestFailedHealthIsLoggedOncePerChange(t *testing.T) {
	d := open(t, of(registry.CreateDelete, registry.ControllerHealth), ready())
	var log strings.Builder
	p := &healthPlugin{}
	h := NewHealth(d.Controller.Calls, p, nil, hclog.New(&hclog.LoggerOptions{Output: &log}))
	for i, code := range []string{"INTERNAL", "INTERNAL", "NOT_FOUND", "", "NOT_FOUND"} {
		if p.err = nil; code != "" {
			p.err = failedHealth(code)
		}
		noErr(t, "", h.check(t.Context()))
		if got, want := strings.Count(log.String(), "\n"), []int{1, 1, 2, 2, 3}[i]; got != want {
			t.Errorf("round %d: %d lines, want %d: %s", i, got, want, log.String())
		}
	}
}

func failedHealth(code string) error {
	return &registry.CallError{RPC: registry.ControllerHealthRPC, Code: code, Outcome: registry.OutcomeFailed,
		Kind: registry.ErrInternal, Detail: "injected"}
}

// All pages of a plugin's list are read, again from the start if its token has expired. A volume that was unhealthy and
// is missing from the list gets its own call. A list without an end changes nothing.
func TestListOfUnhealthyVolumesIsReadToItsEnd(t *testing.T) {
	sick := registry.Condition{Abnormal: true, Reason: "DEGRADED/PathLost"}
	page := func(next string, ids ...registry.ExternalID) csi.HealthPage {
		p := csi.HealthPage{Next: next, Volumes: map[registry.ExternalID]registry.Condition{}}
		for _, id := range ids {
			p.Volumes[id] = sick
		}
		return p
	}
	pages := func(list ...csi.HealthPage) []csi.HealthPage { return list }
	const twice = "list , list 1, list , list 1"
	both := []registry.Capability{registry.ListHealth, registry.ControllerHealth}
	for what, c := range map[string]struct {
		caps    []registry.Capability
		was     bool // the volume is recorded as unhealthy
		pages   []csi.HealthPage
		aborts  int
		one     registry.Condition
		journal string
		sick    bool
	}{
		"two pages": {both, false, pages(page("1", "other"), page("", key.External)), 0, sick,
			"list , list 1", true},
		"expired token": {both, false, pages(page("1"), page("", key.External)), 1, sick, twice, true},
		"expires again": {both, false, pages(page("1"), page("", key.External)), 9, sick, twice + ", " + twice, false},
		"healthy":       {both, false, pages(page("")), 0, sick, "list ", false},
		"missed":        {both, true, pages(page("", "other")), 0, sick, "list , get vol-data", true},
		"healthy again": {both, true, pages(page("")), 0, registry.Condition{}, "list , get vol-data", false},
		"cannot get":    {both[:1], true, pages(page("")), 0, sick, "list ", false},
		"endless":       {both, true, pages(page("1"), page("1")), 0, registry.Condition{}, "list , list 1", true},
		"not reported":  {nil, true, pages(page("")), 0, sick, "", false},
	} {
		t.Run(what, func(t *testing.T) {
			d := open(t, of(append([]registry.Capability{registry.CreateDelete}, c.caps...)...))
			v := registry.Volume{State: registry.VolumeReady, VolumeSpec: registry.VolumeSpec{
				Namespace: name.Namespace, ID: name.ID, Plugin: key.Plugin, External: key.External,
			}}
			if c.was {
				v.Health.Controller = sick
			}
			d.put(v)
			p := &healthPlugin{pages: c.pages, aborts: c.aborts, one: c.one}
			calls := d.Controller.Calls
			calls.Locks = &intent.Locks{}
			noErr(t, "", NewHealth(calls, p, nil, hclog.NewNullLogger()).check(t.Context()))
			got, err := d.Controller.volume(t.Context(), name)
			journal := strings.Join(p.journal, ", ")
			if err != nil || got.Health.Abnormal() != c.sick || journal != c.journal {
				t.Errorf("calls %q, health %+v, %v", journal, got.Health, err)
			}
		})
	}
}
