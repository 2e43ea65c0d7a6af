package doctor

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"holdfast/registry"
)

// Rollcall asks each plugin for its volumes once whenever its controller has become healthy, and tells in what that
// differs from the records. One that died during ListVolumes is not asked again (package suspend). It repairs nothing:
// a list of volumes is no consistent view (CSI ListVolumes), so a person decides.
type Rollcall struct {
	*Doctor
	// Spread is the time in which those are asked that are healthy when Run begins, at any moment of it: not all at
	// once, while others have better use for a processor. Who becomes healthy later is asked at once. Set before Run.
	Spread time.Duration

	bell Bell

	mu    sync.Mutex // guards all below; held for no longer than a look-up
	asked map[registry.PluginID]turn
	busy  map[registry.PluginID]bool
	said  map[registry.PluginID]map[string]bool // what was found of the plugin's last list
}

// turn is one time in which a controller is healthy.
type turn struct {
	instance registry.InstanceKey
	since    time.Time
}

// NewRollcall starts nothing; Run does. Whoever rings the bell has it see whether a controller has become healthy.
func NewRollcall(d *Doctor, bell Bell) *Rollcall {
	return &Rollcall{
		Doctor: d, bell: bell, asked: map[registry.PluginID]turn{}, busy: map[registry.PluginID]bool{},
		said: map[registry.PluginID]map[string]bool{},
	}
}

// Run asks until ctx ends. Plugins are asked beside each other: one that hangs holds up no other. Each is asked by one
// call at a time, however often it becomes healthy meanwhile.
func (c *Rollcall) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	for within := c.Spread; ; within = 0 {
		due, err := c.due(ctx)
		if err != nil && ctx.Err() == nil {
			return err
		}
		for _, in := range due {
			wg.Go(func() {
				if !pause(ctx, time.Duration(rand.Float64()*float64(within)), nil) {
					return
				}
				c.call(ctx, in)
				c.done(in.Plugin)
				c.bell.Ring() // it may have become healthy again
			})
		}
		select {
		case <-c.bell:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// due are the controllers that have become healthy and were not asked since.
func (c *Rollcall) due(ctx context.Context) (list []registry.Instance, err error) {
	var records Records
	err = c.log.View(ctx, func(v registry.View) error {
		records.Instances = v.AllInstances()
		return nil
	})
	can, _ := c.listers(records)
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, in := range can {
		if now := (turn{in.InstanceKey, in.Health.Since}); c.asked[in.Plugin] != now && !c.busy[in.Plugin] {
			c.asked[in.Plugin], c.busy[in.Plugin] = now, true
			list = append(list, in)
		}
	}
	return list, err
}

func (c *Rollcall) done(id registry.PluginID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.busy[id] = false
}

// call asks one plugin and tells what is new. Most often nothing is: then nobody's commit has waited for it.
func (c *Rollcall) call(ctx context.Context, in registry.Instance) {
	var before Records
	err := c.log.View(ctx, func(v registry.View) error {
		before = recordsOfPlugin(v, in.Plugin)
		return nil
	})
	var l Listing
	if err == nil {
		l, err = c.ask(ctx, in, before, listLimit)
	}
	if err != nil {
		c.Logger.Info("a plugin does not list its volumes; nothing is concluded of that", "plugin", in.Plugin, "error", err)
		return
	}
	if err := errors.Join(c.tell(ctx, l), c.recordHealth(ctx, l)); err != nil && ctx.Err() == nil {
		c.Logger.Warn("what a plugin says of its volumes is not recorded", "plugin", in.Plugin, "error", err)
	}
}

// tell commits what is new in a list.
func (c *Rollcall) tell(ctx context.Context, l Listing) error {
	var found []registry.Finding
	err := c.log.View(ctx, func(v registry.View) error {
		found = c.judged(v, l)
		return nil
	})
	if err != nil || !c.news(l.Plugin, found) {
		return err
	}
	_, err = c.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		return registry.Change{Events: c.fresh(l.Plugin, c.judged(v, l))}, nil
	})
	return err
}

func (c *Rollcall) judged(v registry.View, l Listing) []registry.Finding {
	j := newJudge(Facts{Layout: c.Layout, Records: recordsOfPlugin(v, l.Plugin)})
	j.listing(l)
	return j.findings
}

// news says whether the findings are others than those of the plugin's last list.
func (c *Rollcall) news(id registry.PluginID, findings []registry.Finding) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(findings) != len(c.said[id]) || slices.ContainsFunc(findings, func(f registry.Finding) bool { return !c.said[id][f.Detail] })
}

// fresh are the events of what the plugin's last list has not said already.
func (c *Rollcall) fresh(id registry.PluginID, findings []registry.Finding) (events []registry.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	said := map[string]bool{}
	for _, f := range findings {
		said[f.Detail] = true
		if !c.said[id][f.Detail] {
			c.Logger.Warn("a plugin says otherwise", "plugin", id, "kind", f.Kind, "detail", f.Detail)
			events = append(events, told(f, c.Now()))
		}
	}
	c.said[id] = said
	return bounded(events, c.Now())
}
