package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// statsLimit bounds the wait for the volume's lock and for the plugin's answer.
const statsLimit = 10 * time.Second

// Stats returns the usage of the volume in each unit (NodeGetVolumeStats), and records the condition that the plugin
// reports. CSI allows one call in flight per volume, so Stats holds the volume's lock. Stats is cancelled as soon as
// another call needs the lock, so a hung plugin delays no mount and no unmount.
//
// ErrConflict means that the volume is not mounted here, or that another call for it is open or has come meanwhile.
// ErrUnsupported means that the plugin does not report statistics.
func (s *Stager) Stats(ctx context.Context, name registry.VolumeName) ([]registry.VolumeUsage, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, statsLimit,
		registry.Errorf(context.DeadlineExceeded, "the plugin did not respond within %v", statsLimit))
	defer cancel()
	asking, leave, err := s.turn(ctx, name)
	if err != nil {
		return nil, err
	}
	defer leave()
	st, err := s.measurable(ctx, name)
	if err != nil {
		return nil, err
	}
	inst, err := s.nodeInstance(ctx, st.volume.VolumeKey())
	if err == nil && !inst.Fingerprint.Has(registry.VolumeStats) {
		err = registry.Errorf(registry.ErrUnsupported,
			"plugin %s cannot say how full its volumes are (it lacks %s); ask where the volume is mounted, with df",
			inst.Plugin, registry.VolumeStats)
	}
	if err != nil {
		return nil, err
	}
	at, mount, err := s.spot(st)
	if err != nil {
		return nil, err
	}
	report, err := s.driver.Stats(asking, inst.InstanceKey, s.statsRequest(inst, st, at))
	if err != nil && errors.Is(context.Cause(asking), intent.ErrYielded) {
		return nil, conflict("volume %s was not measured: it is being mounted, unmounted or changed; try again", name)
	}
	if err != nil {
		return nil, fmt.Errorf("ask how full volume %s is: %w", name, err)
	}
	if err := s.stillThere(name, at, mount); err != nil {
		return nil, err
	}
	if c := report.Condition; c != nil && inst.Fingerprint.Has(registry.NodeCondition) {
		return report.Usage, s.recordCondition(ctx, st.volume.VolumeKey(), *c, true)
	}
	return report.Usage, nil
}

// turn locks the volume. The returned context ends when another call waits for the lock.
func (s *Stager) turn(ctx context.Context, name registry.VolumeName) (asking context.Context, leave func(), err error) {
	var key registry.VolumeKey
	err = s.State.View(ctx, func(view registry.View) error {
		v, found := view.Volume(name)
		if !found {
			return registry.Errorf(registry.ErrNotFound, "volume %s not found", name)
		}
		key = v.VolumeKey()
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	return s.Locks.LockYielding(ctx, key, "its measurement")
}

// statsRequest returns the request, with the paths as the instance knows them. The request has the staging path if the
// plugin stages (CSI NodeGetVolumeStatsRequest).
func (s *Stager) statsRequest(inst registry.Instance, st state, at registry.Tree) csi.StatsRequest {
	r := csi.StatsRequest{
		VolumeID: st.volume.External, Path: pathAt(inst, at),
		Private: func(ctx context.Context) csi.Private { return s.private(ctx, st.volume.VolumeKey()) },
	}
	if inst.Fingerprint.Has(registry.StageUnstage) && st.staging.State != registry.MarkNone {
		r.StagingPath = pathAt(inst, st.staging.Path)
	}
	return r
}

// measurable returns the records of the volume. It fails while a call for the volume is open.
func (s *Stager) measurable(ctx context.Context, name registry.VolumeName) (st state, err error) {
	err = s.State.View(ctx, func(view registry.View) error {
		v, found := view.Volume(name)
		if !found {
			return registry.Errorf(registry.ErrNotFound, "volume %s not found", name)
		}
		if open, found := registry.OpenIntent(view, v.VolumeKey()); found {
			return conflict("volume %s cannot be measured now: %s", name, intent.Describe(open))
		}
		st = s.stateOf(view, v.VolumeKey())
		st.volume = v
		return nil
	})
	return st, err
}

// nodeInstance returns the healthy node instance for calls about the volume. It does not wait if there is none.
func (s *Stager) nodeInstance(ctx context.Context, key registry.VolumeKey) (registry.Instance, error) {
	id := key.Plugin
	inst, found := s.FindFor(ctx, registry.RoleNode, key)
	switch {
	case !found:
		return inst, registry.Errorf(registry.ErrUnavailable,
			"plugin %s has no node instance here (see holdfast plugin status)", id)
	case inst.Health.State == registry.Unhealthy:
		return inst, registry.Errorf(registry.ErrUnavailable,
			"node plugin %s is not healthy: %s (see holdfast plugin status %s)",
			id, inst.Health.Cause, id)
	}
	return inst, nil
}

// spot returns a path at which the volume can be measured: its target path if it is published, else its staging path.
// If mount is set, a mount must exist at the path, or the plugin would measure the directory below.
func (s *Stager) spot(st state) (at registry.Tree, mount bool, err error) {
	sick := ""
	for _, r := range st.refs {
		if r.Publish != registry.MarkDone || r.Boot != s.kernel.Boot() {
			continue
		}
		if r.Trouble != "" {
			sick = fmt.Sprintf("its mount for alloc %s is in trouble since %s: %s", r.Alloc,
				r.Troubled.UTC().Format(time.RFC3339), r.Trouble)
			continue
		}
		mount = r.Usage.Attachment != registry.BlockDevice
		if there, err := s.isThere(r.Target, mount); err != nil || there {
			return r.Target, mount, err
		}
	}
	if sick != "" {
		return at, false, registry.Errorf(registry.ErrUnavailable, "volume %s cannot be measured: %s",
			st.volume.VolumeName(), sick)
	}
	if p := st.staging; p.State == registry.MarkDone && p.Boot == s.kernel.Boot() {
		if there, err := s.isThere(p.Path, true); err != nil || there {
			return p.Path, true, err
		}
	}
	return at, false, conflict("volume %s is not mounted here: only what is mounted on this node can be measured",
		st.volume.VolumeName())
}

// isThere reports whether the volume is at the path. If mount is set, the path must be a mount point.
func (s *Stager) isThere(at registry.Tree, mount bool) (bool, error) {
	if !mount {
		return true, nil
	}
	return s.mounted(at.Host, true)
}

// stillThere fails if the volume was unmounted during the measurement: the plugin may have measured the directory
// below.
func (s *Stager) stillThere(name registry.VolumeName, at registry.Tree, mount bool) error {
	there, err := s.isThere(at, mount)
	if err == nil && !there {
		err = conflict("volume %s was unmounted from %s while its plugin measured it; try again", name, at.Host)
	}
	return err
}
