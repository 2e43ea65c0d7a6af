package node

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"holdfast/hooks"
	"holdfast/registry"
)

// MountParts mounts parts of the volume that is published for the claim, each at its own path, and returns the paths.
// It leaves mounted parts as they are. A part is recorded before it is mounted, and unmounted before the unpublish.
func (s *Stager) MountParts(
	ctx context.Context, key registry.ClaimKey, parts []hooks.Part,
) (at map[string]string, err error) {
	if len(parts) == 0 {
		return nil, nil
	}
	st, err := s.state(ctx, key.Volume)
	if err != nil {
		return nil, err
	}
	r, _ := st.ref(key)
	if err := s.divisible(st, r); err != nil {
		return nil, err
	}
	at = map[string]string{}
	var missing []hooks.Part
	for _, p := range parts {
		at[p.Path] = s.Layout.Part(key, p.Path)
		mounted, err := s.partMounted(r, p)
		if err != nil {
			return nil, fmt.Errorf("mount %q of volume %s: %w", p.Path, st.volume.VolumeName(), err)
		}
		if !mounted {
			missing = append(missing, p)
		}
	}
	if err := s.mountMissing(ctx, st, r, missing); err != nil {
		return nil, err
	}
	return at, nil
}

// divisible returns nil if the shim can mount parts of the published volume.
func (s *Stager) divisible(st state, r registry.Ref) error {
	switch {
	case r.Usage.Attachment == registry.BlockDevice:
		return registry.Invalid("volume %s is a block device, which has no parts; remove sub_path",
			st.volume.VolumeName())
	case r.Publish != registry.MarkDone || r.Boot != s.machine.Boot():
		return conflict("volume %s is not published; it has to be published first", st.volume.VolumeName())
	}
	return nil
}

// partMounted reports whether a part is mounted. A mount without a record at its path is an error.
func (s *Stager) partMounted(r registry.Ref, p hooks.Part) (bool, error) {
	place := s.Layout.Part(r.ClaimKey(), p.Path)
	known := slices.ContainsFunc(r.Parts, func(o registry.Part) bool { return o.At == place })
	if !known {
		return false, s.checkNoMount(place)
	}
	has, _, err := s.machine.HasPart(r.Target.Host, place)
	return has, err
}

// mountMissing records and mounts parts.
func (s *Stager) mountMissing(ctx context.Context, st state, r registry.Ref, missing []hooks.Part) error {
	if err := s.recordParts(ctx, r, missing, registry.MarkSent); err != nil {
		return fmt.Errorf("record parts of volume %s: %w", st.volume.VolumeName(), err)
	}
	for _, p := range missing {
		if err := s.mountPart(ctx, r, p, !r.Usage.ReadOnly && !p.ReadOnly); err != nil {
			return fmt.Errorf("mount %q of volume %s for alloc %s as %q: %w", p.Path, st.volume.VolumeName(), r.Alloc,
				r.Request, err)
		}
	}
	return s.recordParts(ctx, r, missing, registry.MarkDone)
}

// mountPart mounts a part. A part of an earlier mount of the volume is unmounted first; if it is in use, that fails.
func (s *Stager) mountPart(ctx context.Context, r registry.Ref, p hooks.Part, create bool) error {
	place := s.Layout.Part(r.ClaimKey(), p.Path)
	_, mounted, err := s.machine.HasPart(r.Target.Host, place)
	if err == nil && mounted {
		err = s.machine.UnmountPart(ctx, place)
	}
	if err != nil {
		return err
	}
	return s.machine.MountPart(ctx, r.Target.Host, p.Path, place, create)
}

// recordParts records parts of the published volume with the mark.
func (s *Stager) recordParts(ctx context.Context, r registry.Ref, parts []hooks.Part, mark registry.Mark) error {
	if len(parts) == 0 {
		return nil
	}
	_, err := s.State.Commit(ctx, func(view registry.View) (registry.Change, error) {
		now, found := s.stateOf(view, r.Volume).ref(r.ClaimKey())
		if !found || now.Publish != registry.MarkDone {
			return registry.Change{}, conflict("the volume is not published any more")
		}
		now.Parts = slices.Clone(now.Parts)
		for _, p := range parts {
			next := registry.Part{Path: p.Path, At: s.Layout.Part(r.ClaimKey(), p.Path), Mark: mark}
			i, known := slices.BinarySearchFunc(now.Parts, p.Path, func(o registry.Part, path string) int {
				return strings.Compare(o.Path, path)
			})
			if !known {
				now.Parts = slices.Insert(now.Parts, i, next)
			}
			now.Parts[i] = next
		}
		return registry.Change{Put: []registry.Record{now}}, nil
	})
	return err
}

// unmountParts unmounts all parts of the published volume. It first marks them as uncertain, so that a later process
// does not take an unmounted part for a lost one.
func (s *Stager) unmountParts(ctx context.Context, r registry.Ref) error {
	if r.Publish == registry.MarkDone {
		var all []hooks.Part
		for _, p := range r.Parts {
			all = append(all, hooks.Part{Path: p.Path})
		}
		if err := s.recordParts(ctx, r, all, registry.MarkSent); err != nil {
			return err
		}
	}
	for _, p := range r.Parts {
		if err := s.machine.UnmountPart(ctx, p.At); err != nil {
			return fmt.Errorf("unmount part %q: %w", p.Path, err)
		}
	}
	return nil
}
