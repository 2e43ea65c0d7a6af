package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// askLimit bounds the wait for the volume's lock and for the plugin's answer.
const askLimit = 10 * time.Second

// Stats returns the usage of the volume in each unit (NodeGetVolumeStats), and records the condition that the plugin
// reports.
//
// ErrConflict means that the volume is not mounted here, that another call for it is open, or that another operation
// has needed the volume's lock meanwhile. ErrUnsupported means that the plugin does not report statistics.
func (s *Stager) Stats(ctx context.Context, name registry.VolumeName) (usage []registry.VolumeUsage, err error) {
	err = s.ask(ctx, name, func(asking context.Context, st state) error {
		key := st.volume.VolumeKey()
		inst, err := s.nodeInstance(ctx, key)
		if err == nil && !inst.Fingerprint.Has(registry.VolumeStats) {
			err = registry.Errorf(registry.ErrUnsupported,
				"plugin %s cannot say how full its volumes are (it lacks %s); ask where the volume is mounted, with df",
				inst.Plugin, registry.VolumeStats)
		}
		if err != nil {
			return err
		}
		at, needsMount, err := s.measuredPath(st)
		if err != nil {
			return err
		}
		report, err := s.fleet.Stats(asking, inst.InstanceKey, csi.StatsRequest{
			VolumeID: key.External, Path: inst.Volumes.InTask(at), StagingPath: stagingPathAt(inst, st),
			Private: s.private(key),
		})
		if err != nil {
			return fmt.Errorf("ask how full volume %s is: %w", name, err)
		}
		// if the mount is gone, the plugin may have measured the directory below
		if there, err := s.isThere(at, needsMount); err != nil || !there {
			return cmp.Or(err, conflict("volume %s was unmounted from %s while its plugin measured it; try again", name,
				at.Host))
		}
		usage = report.Usage
		if c := report.Condition; c != nil && inst.Fingerprint.Has(registry.NodeCondition) {
			return s.recordCondition(ctx, key, *c, true)
		}
		return nil
	})
	return usage, err
}

// ask calls do with the records of a volume that has no open call. CSI allows one call in flight per volume, so ask
// holds the volume's lock. The context of do ends after askLimit, or as soon as another call needs the lock, so a
// hung plugin delays no mount and no unmount. If another call needs the lock, ask returns ErrConflict.
func (s *Stager) ask(
	ctx context.Context, name registry.VolumeName, do func(asking context.Context, st state) error,
) error {
	ctx, cancel := context.WithTimeoutCause(ctx, askLimit,
		registry.Errorf(context.DeadlineExceeded, "it did not end within %v", askLimit))
	defer cancel()
	var v registry.Volume
	err := s.State.View(ctx, func(view registry.View) error {
		var found bool
		if v, found = view.Volume(name); !found {
			return registry.Errorf(registry.ErrNotFound, "volume %s not found", name)
		}
		return nil
	})
	if err != nil {
		return err
	}
	asking, unlock, err := s.Locks.LockYielding(ctx, v.VolumeKey(), "its measurement")
	if err != nil {
		return err
	}
	defer unlock()
	var st state
	err = s.State.View(ctx, func(view registry.View) error {
		if open, found := registry.OpenIntent(view, v.VolumeKey()); found {
			return conflict("volume %s cannot be measured now: %s", name, intent.Describe(open))
		}
		st = s.stateOf(view, v.VolumeKey())
		st.volume = v // stateOf does not find a volume that its plugin has not named yet
		return nil
	})
	if err != nil {
		return err
	}
	err = do(asking, st)
	if err != nil && errors.Is(context.Cause(asking), intent.ErrYielded) {
		return conflict("volume %s was not measured: it is being mounted, unmounted or changed; try again", name)
	}
	return err
}

// stagingPathAt returns the staging path as the instance knows it, for a request about a mounted volume. It is empty if
// the plugin does not stage.
func stagingPathAt(inst registry.Instance, st state) string {
	if !inst.Fingerprint.Has(registry.StageUnstage) || st.staging.State == registry.MarkNone {
		return ""
	}
	return inst.Volumes.InTask(st.staging.Path)
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

// measuredPath returns a path at which the volume can be measured: its target path if it is published, else its staging
// path. If needsMount is set, a mount must exist at the path, or the plugin would measure the directory below.
func (s *Stager) measuredPath(st state) (at registry.Tree, needsMount bool, err error) {
	trouble := ""
	for _, r := range st.refs {
		if r.Publish != registry.MarkDone || r.Boot != s.machine.Boot() {
			continue
		}
		if r.Trouble != "" {
			trouble = fmt.Sprintf("its mount for alloc %s has been in trouble since %s: %s", r.Alloc,
				r.Troubled.UTC().Format(time.RFC3339), r.Trouble)
			continue
		}
		needsMount = r.Usage.Attachment != registry.BlockDevice
		if there, err := s.isThere(r.Target, needsMount); err != nil || there {
			return r.Target, needsMount, err
		}
	}
	if trouble != "" {
		return at, false, registry.Errorf(registry.ErrUnavailable, "volume %s cannot be measured: %s",
			st.volume.VolumeName(), trouble)
	}
	if p := st.staging; p.State == registry.MarkDone && p.Boot == s.machine.Boot() {
		if there, err := s.isThere(p.Path, true); err != nil || there {
			return p.Path, true, err
		}
	}
	return at, false, conflict("volume %s is not mounted here: only what is mounted on this node can be measured",
		st.volume.VolumeName())
}

// isThere reports whether something is mounted at the path. If needsMount is false, it returns true without a check.
func (s *Stager) isThere(at registry.Tree, needsMount bool) (bool, error) {
	if !needsMount {
		return true, nil
	}
	return s.machine.Mounted(at.Host)
}
