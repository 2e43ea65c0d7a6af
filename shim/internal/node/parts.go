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
	name := st.volume.VolumeName()
	r, _ := st.ref(key)
	switch {
	case r.Usage.Attachment == registry.BlockDevice:
		return nil, registry.Invalid("volume %s is a block device, which has no parts; remove sub_path", name)
	case r.Publish != registry.MarkDone || r.Boot != s.machine.Boot():
		return nil, conflict("volume %s is not published; it has to be published first", name)
	}
	at = map[string]string{}
	var missing []hooks.Part
	for _, p := range parts {
		at[p.Path] = s.Layout.Part(key, p.Path)
		has, err := s.hasPart(r, at[p.Path])
		if err != nil {
			return nil, fmt.Errorf("mount %q of volume %s: %w", p.Path, name, err)
		}
		if !has {
			missing = append(missing, p)
		}
	}
	if err := s.recordParts(ctx, r, missing, registry.MarkSent); err != nil {
		return nil, fmt.Errorf("record parts of volume %s: %w", name, err)
	}
	for _, p := range missing {
		if err := s.mountPart(ctx, r, p, at[p.Path]); err != nil {
			return nil, fmt.Errorf("mount %q of volume %s for alloc %s as %q: %w", p.Path, name, r.Alloc, r.Request,
				err)
		}
	}
	return at, s.recordParts(ctx, r, missing, registry.MarkDone)
}

// hasPart reports whether a part of the ref's volume is mounted at a path. A mount at a path without a recorded part is
// an error.
func (s *Stager) hasPart(r registry.Ref, at string) (bool, error) {
	if !slices.ContainsFunc(r.Parts, func(p registry.Part) bool { return p.At == at }) {
		return false, s.checkNoMount(at)
	}
	has, _, err := s.machine.HasPart(r.Target.Host, at)
	return has, err
}

// mountPart mounts a part. A part of an earlier mount of the volume is unmounted first; if it is in use, that fails.
func (s *Stager) mountPart(ctx context.Context, r registry.Ref, p hooks.Part, at string) error {
	_, mounted, err := s.machine.HasPart(r.Target.Host, at)
	if err == nil && mounted {
		err = s.machine.UnmountPart(ctx, at)
	}
	if err != nil {
		return err
	}
	return s.machine.MountPart(ctx, r.Target.Host, p.Path, at, !r.Usage.ReadOnly && !p.ReadOnly)
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
