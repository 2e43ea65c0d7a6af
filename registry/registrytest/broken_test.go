package registrytest

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"holdfast/registry"
)

// brokenLog is a log with one thing wrong.
type brokenLog struct {
	*Log
	view   func(registry.View) registry.View
	change func(*registry.Change)
	err    func(error) error
}

func (l brokenLog) Commit(
	ctx context.Context, decide func(registry.View) (registry.Change, error),
) (registry.Seq, error) {
	seq, err := l.Log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		c, err := decide(v)
		if l.change != nil {
			l.change(&c)
		}
		return c, err
	})
	if l.err != nil && err != nil {
		err = l.err(err)
	}
	return seq, err
}

func (l brokenLog) View(ctx context.Context, read func(registry.View) error) error {
	return l.Log.View(ctx, func(v registry.View) error {
		if l.view != nil {
			v = l.view(v)
		}
		return read(v)
	})
}

type noSealed struct{ registry.View }

func (v noSealed) Task(k registry.TaskKey) (registry.Task, bool) {
	t, found := v.View.Task(k)
	t.Sealed = nil
	return t, found
}

type byPrefix struct{ registry.View }

func (v byPrefix) Claims(k registry.VolumeKey) []registry.Claim {
	return where(v.AllClaims(), func(c registry.Claim) bool {
		return c.Volume.Plugin == k.Plugin && strings.HasPrefix(string(c.Volume.External), string(k.External))
	})
}

type alsoRegistered struct{ registry.View }

func (v alsoRegistered) VolumesNamed(plugin registry.PluginID, name string) []registry.Volume {
	return v.VolumesWhere(func(r registry.Volume) bool { return r.Plugin == plugin && r.Name == name })
}

type endsAlike struct{ registry.View }

func (v endsAlike) VolumesOf(id registry.AllocID) []registry.Volume {
	return v.VolumesWhere(func(r registry.Volume) bool {
		return strings.HasSuffix(string(r.ID), string(registry.InlineID(id, "")))
	})
}

type oldestFirst struct{ registry.View }

func (v oldestFirst) Instances(r registry.Role, p registry.PluginID) []registry.Instance {
	list := v.View.Instances(r, p)
	slices.Reverse(list)
	return list
}

type noFloor struct{ registry.View }

func (v noFloor) Events(after registry.Seq, limit int) ([]registry.Event, registry.Seq) {
	events, _ := v.View.Events(after, limit)
	return events, 0
}

// broken is what the suite has to find, and the test that finds it.
var broken = map[string]brokenLog{
	"EveryRecordComesBack": {view: func(v registry.View) registry.View { return noSealed{v} }},
	"PrefixesAreNotIds":    {view: func(v registry.View) registry.View { return byPrefix{v} }},
	"VolumesByName":        {view: func(v registry.View) registry.View { return alsoRegistered{v} }},
	"VolumesByAlloc":       {view: func(v registry.View) registry.View { return endsAlike{v} }},
	"ListOrder":            {view: func(v registry.View) registry.View { return oldestFirst{v} }},
	"EventsArePruned":      {view: func(v registry.View) registry.View { return noFloor{v} }},
	"Deletes":              {change: func(c *registry.Change) { c.Delete = nil }},
	"AllOrNothing":         {change: func(c *registry.Change) { c.Put = c.Put[:min(len(c.Put), 3)] }},
	"EventsAreNumbered":    {change: func(c *registry.Change) { slices.Reverse(c.Events) }},
	"ErrorOfDecide":        {err: func(err error) error { return errors.Join(err) }},
}

const brokenEnv = "HOLDFAST_BROKEN_LOG"

// TestSuiteFindsFaults is the suite's negative control: each broken log fails, in a process of its own.
func TestSuiteFindsFaults(t *testing.T) {
	for name := range broken {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestBrokenLog$")
		cmd.Env = append(os.Environ(), brokenEnv+"="+name)
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), "--- FAIL: TestBrokenLog/"+name) {
			t.Errorf("a log with the fault %s passes: %v\n%s", name, err, out)
		}
	}
}

// TestBrokenLog is run by TestSuiteFindsFaults, with the name of a fault in its environment.
func TestBrokenLog(t *testing.T) {
	b, asked := broken[os.Getenv(brokenEnv)]
	if !asked {
		return
	}
	TestLog(t, func(t *testing.T) (registry.State, func() registry.State) {
		b.Log = NewLog(clock)
		return b, func() registry.State { b.Log = b.Log.Reopen(); return b }
	})
}
