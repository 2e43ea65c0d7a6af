package node

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"holdfast/registry"
)

// healthEvery is the pause between two rounds of WatchHealth.
const healthEvery = time.Minute

// WatchHealth records the condition of published volumes, until ctx ends. It asks the node plugins that declare
// VOLUME_CONDITION, one volume at a time, and pauses after each round. It skips volumes that are locked. After a call
// without a response, it skips the plugin for the rest of the round. A plugin that died during such a call is not asked
// any more (Suspended).
func (s *Stager) WatchHealth(ctx context.Context) error {
	for {
		select {
		case <-time.After(healthEvery + time.Duration(rand.Int64N(int64(healthEvery/4)))):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if err := s.checkHealth(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	}
}

// checkHealth is one round. It fails if the records cannot be read.
func (s *Stager) checkHealth(ctx context.Context) error {
	var volumes []registry.Volume
	err := s.State.View(ctx, func(view registry.View) error {
		seen := map[registry.VolumeKey]bool{}
		for _, r := range view.AllRefs() {
			if v, known := view.VolumeByKey(r.Volume); known && r.Publish == registry.MarkDone && !seen[r.Volume] {
				seen[r.Volume] = true
				volumes = append(volumes, v)
			}
		}
		return nil
	})
	skip := map[registry.PluginID]bool{}
	for _, v := range volumes {
		if ctx.Err() != nil {
			break
		}
		inst, err := s.measurer(v.Plugin)
		busy := s.Locks.Busy(v.VolumeKey()) != ""
		if err != nil || skip[v.Plugin] || busy {
			continue
		}
		if !inst.Fingerprint.Has(registry.NodeCondition) {
			_ = s.clearCondition(ctx, v) // if it fails, the next round does it
			continue
		}
		if why, _ := s.Suspended.Reason(registry.NodeStatsRPC, inst); why != "" {
			continue
		}
		_, err = s.Stats(ctx, v.VolumeName())
		if noAnswer(err) && ctx.Err() == nil {
			skip[v.Plugin] = true
			_ = s.Suspended.Failed(ctx, s.State, inst, err, s.Now()) // at least this shim remembers it
		}
	}
	return err
}

// noAnswer reports whether err says that the plugin cannot be reached or did not answer in time. Any other error
// concerns one volume.
func noAnswer(err error) bool {
	call, sent := errors.AsType[*registry.CallError](err)
	return sent && (call.Code == "UNAVAILABLE" || call.Code == "DEADLINE_EXCEEDED")
}

// clearCondition clears the recorded condition of the volume: its plugin was replaced by one that reports none.
func (s *Stager) clearCondition(ctx context.Context, v registry.Volume) error {
	return s.recordCondition(ctx, v.VolumeKey(), registry.VolumeCondition{}, false)
}

// recordCondition records the condition that the node plugin reports, if the volume is still mounted here. It adds an
// event if announce is set.
func (s *Stager) recordCondition(
	ctx context.Context, key registry.VolumeKey, c registry.VolumeCondition, announce bool,
) error {
	_, err := registry.Ensure(ctx, s.State, func(view registry.View) (registry.Change, error) {
		st := s.stateOf(view, key)
		if st.volume.ID == "" || len(st.refs) == 0 && st.staging.State == registry.MarkNone {
			return registry.Change{}, nil
		}
		p := stagingOf(view, st.volume)
		next, events, changed := registry.ConditionChange(p.Condition, c, registry.Event{
			Role: registry.RoleNode, Plugin: key.Plugin, Volume: p.Name, External: key.External, At: s.Now(),
		})
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
