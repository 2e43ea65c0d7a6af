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

// healthCheck is a question to a node plugin about one volume, or about the plugin's storage.
type healthCheck struct {
	of   registry.VolumeKey // External is empty for the storage of the plugin
	name registry.VolumeName
}

func (c healthCheck) ofStorage() bool { return c.of.External == "" }

// rpc returns the call by which a plugin answers the check, or "" if it does not report this health.
func (c healthCheck) rpc(f registry.Fingerprint) registry.RPC {
	if c.ofStorage() {
		if f.Has(registry.StorageHealth) {
			return registry.StorageHealthRPC
		}
		return ""
	}
	switch {
	case f.Has(registry.NodeHealth):
		return registry.NodeHealthRPC
	case f.Has(registry.NodeCondition) && f.Has(registry.VolumeStats):
		return registry.NodeStatsRPC
	}
	return ""
}

// checkHealth is one round. It fails if the records cannot be read. A check that fails does not end the round.
func (s *Stager) checkHealth(ctx context.Context) error {
	checks, err := s.healthChecks(ctx)
	if err != nil {
		return err
	}
	noAnswer := map[registry.InstanceKey]bool{} // instances that are not asked in the rest of the round
	for _, c := range checks {
		inst, err := s.nodeInstance(ctx, c.of)
		if err != nil || noAnswer[inst.InstanceKey] {
			continue
		}
		rpc := c.rpc(inst.Fingerprint)
		if rpc == "" {
			_ = s.recordHealth(ctx, c, registry.Condition{}, false) // the next round tries again
			continue
		}
		if why, _ := s.Suspended.Reason(rpc, inst); why != "" {
			continue
		}
		err = s.askHealth(ctx, c, inst, rpc)
		_, isAnswer := errors.AsType[*registry.CallError](err)
		switch {
		case ctx.Err() != nil:
			return nil
		case registry.NoAnswer(err): // the plugin's heartbeat reports that, unless the plugin is being stopped
			noAnswer[inst.InstanceKey] = true
			// a suspension that cannot be written stays in memory
			_ = s.Suspended.SuspendFailed(ctx, s.State, inst, err, s.Now())
		case (err == nil || isAnswer) && s.failures.Record(c.of, err):
			s.Logger.Warn("health is not known", "plugin", c.of.Plugin, "volume", c.of.External,
				"again_in", healthEvery.String(), "error", err)
		}
	}
	return nil
}

// healthChecks returns the checks of a round: the storage of each node plugin, and each published volume.
func (s *Stager) healthChecks(ctx context.Context) (checks []healthCheck, err error) {
	err = s.State.View(ctx, func(view registry.View) error {
		plugins, volumes := map[registry.PluginID]bool{}, map[registry.VolumeKey]bool{}
		for _, in := range view.AllInstances() {
			if in.Role == registry.RoleNode && !plugins[in.Plugin] {
				plugins[in.Plugin] = true
				checks = append(checks, healthCheck{of: registry.VolumeKey{Plugin: in.Plugin}})
			}
		}
		for _, r := range view.AllRefs() {
			v, known := view.VolumeByKey(r.Volume)
			if known && r.Publish == registry.MarkDone && !volumes[r.Volume] {
				volumes[r.Volume] = true
				checks = append(checks, healthCheck{of: r.Volume, name: v.VolumeName()})
			}
		}
		return nil
	})
	return checks, err
}

// askHealth sends the call of a check, and records the answer. It skips a volume that is locked or has an open call.
func (s *Stager) askHealth(ctx context.Context, c healthCheck, inst registry.Instance, rpc registry.RPC) error {
	switch {
	case rpc == registry.StorageHealthRPC:
		ctx, cancel := context.WithTimeout(ctx, askLimit)
		defer cancel()
		condition, err := s.fleet.StorageHealth(ctx, inst.InstanceKey)
		if err != nil {
			return err
		}
		return s.recordHealth(ctx, c, condition, true)
	case !s.Locks.AwaitFree(ctx, c.of):
		return nil
	case rpc == registry.NodeStatsRPC:
		_, err := s.Stats(ctx, c.name)
		return err
	}
	return s.ask(ctx, c.name, func(asking context.Context, st state) error {
		i := slices.IndexFunc(st.refs, func(r registry.Ref) bool {
			return r.Publish == registry.MarkDone && r.Boot == s.machine.Boot()
		})
		if i < 0 {
			return nil
		}
		condition, err := s.fleet.NodeHealth(asking, inst.InstanceKey, csi.HealthRequest{
			VolumeID: c.of.External, Path: inst.Volumes.InTask(st.refs[i].Target), StagingPath: stagingPathAt(inst, st),
			Private: s.private(c.of),
		})
		if err != nil {
			return err
		}
		return s.recordHealth(ctx, c, condition, true)
	})
}

// recordHealth records the condition that the node plugin reports in answer to a check. It adds an event if announce is
// set.
func (s *Stager) recordHealth(ctx context.Context, c healthCheck, now registry.Condition, announce bool) error {
	if !c.ofStorage() {
		return s.recordCondition(ctx, c.of, now, announce)
	}
	_, err := registry.Ensure(ctx, s.State, func(view registry.View) (registry.Change, error) {
		change := registry.StorageChange(view.Instances(registry.RoleNode, c.of.Plugin), now, s.Now())
		if !announce {
			change.Events = nil
		}
		return change, nil
	})
	return err
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
