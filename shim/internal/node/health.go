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

// WatchHealth asks for the health of volumes that are published here, until ctx ends. It asks node plugins that declare
// that they report it (node.VOLUME_CONDITION), about one volume after the other, with a pause after each round. It
// leaves out volumes for which another call is under way. After a call without an answer, it leaves out the plugin for
// the rest of the round.
//
// A plugin that died during such a call is not asked any more (Suspended).
func (s *Stager) WatchHealth(ctx context.Context) error {
	for {
		select {
		case <-time.After(healthEvery + time.Duration(rand.Int64N(int64(healthEvery/4)))):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if err := s.askHealth(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	}
}

// askHealth is one round. It fails if the records cannot be read.
func (s *Stager) askHealth(ctx context.Context) error {
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
		busy := s.Locks != nil && s.Locks.Busy(v.VolumeKey()) != ""
		if err != nil || skip[v.Plugin] || busy {
			continue
		}
		if !inst.Fingerprint.Has(registry.NodeCondition) {
			_ = s.forgetHealth(ctx, v) // if it fails, the next round does it
			continue
		}
		if why, _ := s.Suspended.Reason(registry.NodeStatsRPC, inst); why != "" {
			continue
		}
		_, err = s.Stats(ctx, v.VolumeName())
		if noAnswer(err) && ctx.Err() == nil {
			skip[v.Plugin] = true
			_ = s.Suspended.Failed(ctx, s.State, inst, err, s.Now()) // it is remembered until this shim ends at least
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

// forgetHealth drops what the node plugin said of the volume's health before it was replaced by one that does not
// report it.
func (s *Stager) forgetHealth(ctx context.Context, v registry.Volume) error {
	return s.judged(ctx, v.VolumeKey(), registry.VolumeCondition{}, false)
}

// judged records what the node plugin says of a volume's health, if the volume is still mounted here. Without tell the
// change has no event.
func (s *Stager) judged(ctx context.Context, key registry.VolumeKey, says registry.VolumeCondition, tell bool) error {
	_, err := registry.Ensure(ctx, s.State, func(view registry.View) (registry.Change, error) {
		st := s.stateOf(view, key)
		if st.volume.ID == "" || len(st.refs) == 0 && st.staging.State == registry.MarkNone {
			return registry.Change{}, nil
		}
		p := stagingOf(view, st.volume)
		next, events, changed := registry.ConditionChange(p.Condition, says, registry.Event{
			Role: registry.RoleNode, Plugin: key.Plugin, Volume: p.Name, External: key.External, At: s.Now(),
		})
		if !changed {
			return registry.Change{}, nil
		}
		if p.Condition = next; !tell {
			events = nil
		}
		return registry.Change{Put: []registry.Record{p}, Events: events}, nil
	})
	return err
}
