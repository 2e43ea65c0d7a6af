package node

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// healthEvery is the pause between two rounds of WatchHealth. The first round comes after firstHealth, because a new
// shim has other work first.
const (
	healthEvery = time.Minute
	firstHealth = 2 * time.Second
)

// WatchHealth records the health of published volumes and of the storage that node plugins reach, until ctx ends. It
// asks the plugins that report it, one call at a time, and pauses after each round. It skips volumes that are locked.
// After a call without a response, it skips the instance for the rest of the round. A plugin that died during such a
// call is not asked any more (Suspended).
func (s *Stager) WatchHealth(ctx context.Context) error {
	for wait := firstHealth; ; wait = healthEvery {
		if !intent.Sleep(ctx, wait+time.Duration(rand.Int64N(int64(wait/4)))) {
			return context.Cause(ctx)
		}
		if err := s.checkHealth(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	}
}

// healthCheck asks one plugin about one volume, or about its storage.
type healthCheck struct {
	of    registry.VolumeKey                      // the storage of the plugin if External is empty
	rpc   func(registry.Fingerprint) registry.RPC // empty: the plugin does not report this health
	ask   func(context.Context, registry.Instance, registry.RPC) error
	clear func(context.Context) error // removes the condition that an earlier version of the plugin reported
}

// checkHealth is one round. It fails if the records cannot be read.
func (s *Stager) checkHealth(ctx context.Context) error {
	checks, err := s.healthChecks(ctx)
	skip := map[registry.InstanceKey]bool{}
	for _, c := range checks {
		inst, unusable := s.nodeInstance(ctx, c.of)
		if unusable != nil || skip[inst.InstanceKey] || ctx.Err() != nil {
			continue
		}
		rpc := c.rpc(inst.Fingerprint)
		if rpc == "" {
			_ = c.clear(ctx) // the next round tries again
			continue
		}
		if why, _ := s.Suspended.Reason(rpc, inst); why != "" {
			continue
		}
		err := c.ask(ctx, inst, rpc)
		if ctx.Err() != nil {
			break
		}
		if registry.NoAnswer(err) { // its heartbeat reports that, unless the plugin is being stopped
			skip[inst.InstanceKey] = true
			_ = s.Suspended.Failed(ctx, s.State, inst, err, s.Now()) // on an error, this shim still remembers it
			continue
		}
		if _, answered := errors.AsType[*registry.CallError](err); (answered || err == nil) &&
			s.failures.Changed(c.of, err) {
			s.Logger.Warn("health is not known", "plugin", c.of.Plugin, "volume", c.of.External,
				"again_in", healthEvery.String(),
				"error", err)
		}
	}
	return err
}

// healthChecks returns the checks of a round: the storage of each node plugin, and each published volume.
func (s *Stager) healthChecks(ctx context.Context) (checks []healthCheck, err error) {
	err = s.State.View(ctx, func(view registry.View) error {
		plugins, volumes := map[registry.PluginID]bool{}, map[registry.VolumeKey]bool{}
		for _, in := range view.AllInstances() {
			if in.Role == registry.RoleNode && !plugins[in.Plugin] {
				plugins[in.Plugin] = true
				checks = append(checks, s.storageCheck(in.Plugin))
			}
		}
		for _, r := range view.AllRefs() {
			v, known := view.VolumeByKey(r.Volume)
			if known && r.Publish == registry.MarkDone && !volumes[r.Volume] {
				volumes[r.Volume] = true
				checks = append(checks, s.volumeCheck(v))
			}
		}
		return nil
	})
	return checks, err
}

func (s *Stager) storageCheck(id registry.PluginID) healthCheck {
	return healthCheck{
		of: registry.VolumeKey{Plugin: id},
		rpc: func(f registry.Fingerprint) registry.RPC {
			if f.Has(registry.StorageHealth) {
				return registry.StorageHealthRPC
			}
			return ""
		},
		ask: func(ctx context.Context, inst registry.Instance, _ registry.RPC) error {
			ctx, cancel := context.WithTimeout(ctx, statsLimit)
			defer cancel()
			c, err := s.driver.StorageHealth(ctx, inst.InstanceKey)
			if err != nil {
				return err
			}
			return s.recordStorage(ctx, id, c, true)
		},
		clear: func(ctx context.Context) error { return s.recordStorage(ctx, id, registry.Condition{}, false) },
	}
}

func (s *Stager) volumeCheck(v registry.Volume) healthCheck {
	return healthCheck{
		of: v.VolumeKey(),
		rpc: func(f registry.Fingerprint) registry.RPC {
			switch {
			case f.Has(registry.NodeHealth):
				return registry.NodeHealthRPC
			case f.Has(registry.NodeCondition) && f.Has(registry.VolumeStats):
				return registry.NodeStatsRPC
			}
			return ""
		},
		ask: func(ctx context.Context, inst registry.Instance, rpc registry.RPC) (err error) {
			switch {
			case !s.Locks.AwaitFree(ctx, v.VolumeKey()):
			case rpc == registry.NodeHealthRPC:
				err = s.askHealth(ctx, inst, v.VolumeName())
			default:
				_, err = s.Stats(ctx, v.VolumeName())
			}
			return err
		},
		clear: func(ctx context.Context) error {
			return s.recordCondition(ctx, v.VolumeKey(), registry.Condition{}, false)
		},
	}
}

// askHealth sends NodeGetVolumeHealth and records the answer. Like Stats, it gives way to any other call for the
// volume.
func (s *Stager) askHealth(ctx context.Context, inst registry.Instance, name registry.VolumeName) error {
	ctx, cancel := context.WithTimeout(ctx, statsLimit)
	defer cancel()
	asking, leave, err := s.turn(ctx, name)
	if err != nil {
		return err
	}
	defer leave()
	st, err := s.measurable(ctx, name)
	if err != nil {
		return err
	}
	r := csi.HealthRequest{
		VolumeID: st.volume.External,
		Private:  func(ctx context.Context) csi.Private { return s.private(ctx, st.volume.VolumeKey()) },
	}
	i := slices.IndexFunc(st.refs, func(r registry.Ref) bool {
		return r.Publish == registry.MarkDone && r.Boot == s.kernel.Boot()
	})
	if i < 0 {
		return nil
	}
	r.Path = pathAt(inst, st.refs[i].Target)
	if inst.Fingerprint.Has(registry.StageUnstage) && st.staging.State != registry.MarkNone {
		r.StagingPath = pathAt(inst, st.staging.Path)
	}
	c, err := s.driver.NodeHealth(asking, inst.InstanceKey, r)
	switch {
	case err != nil && errors.Is(context.Cause(asking), intent.ErrYielded):
		return nil // the next round asks again
	case err != nil:
		return err
	}
	return s.recordCondition(ctx, st.volume.VolumeKey(), c, true)
}

// recordCondition records the condition that the node plugin reports, if the volume is still mounted here. It adds an
// event if announce is set.
func (s *Stager) recordCondition(
	ctx context.Context, key registry.VolumeKey, c registry.Condition, announce bool,
) error {
	_, err := registry.Ensure(ctx, s.State, func(view registry.View) (registry.Change, error) {
		st := s.stateOf(view, key)
		if st.volume.ID == "" || len(st.refs) == 0 && st.staging.State == registry.MarkNone {
			return registry.Change{}, nil
		}
		p := stagingOf(view, st.volume)
		next, events, changed := registry.ConditionChange(p.Condition, c, registry.Event{
			Role: registry.RoleNode, Plugin: key.Plugin, Volume: p.Name, External: key.External, At: s.Now(),
		}, registry.EventVolumeUnhealthy, registry.EventVolumeHealthy)
		if !changed {
			return registry.Change{}, nil
		}
		if p.Condition = next; !announce {
			events = nil
		}
		return registry.Change{Put: []registry.Record{p}, Events: events}, nil
	})
	return err
}

// recordStorage records the condition of the node's storage that the plugin reports. It adds an event if announce is
// set.
func (s *Stager) recordStorage(
	ctx context.Context, id registry.PluginID, c registry.Condition, announce bool,
) error {
	_, err := registry.Ensure(ctx, s.State, func(view registry.View) (registry.Change, error) {
		change := registry.StorageChange(view.Instances(registry.RoleNode, id), c, s.Now())
		if !announce {
			change.Events = nil
		}
		return change, nil
	})
	return err
}
