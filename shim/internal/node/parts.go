package node

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"holdfast/hooks"
	"holdfast/registry"
)

// Parts mounts parts of volumes, in processes that may hang: whatever a volume does, each of these returns after a
// limited time. An ErrUncertain is about one that hangs: until it has ended, nothing else is done at its place.
type Parts interface {
	// HasPart says whether what is mounted at a place is a part of what is mounted at target, and whether anything is
	// mounted there at all.
	HasPart(target, at string) (has, mounted bool, err error)
	// MountPart mounts a path of the volume at target once more, at a place where nothing is mounted; create: what is
	// missing is made. ErrNotFound: it is missing. ErrDenied: it leads out of the volume.
	MountPart(ctx context.Context, target, path, at string, create bool) error
	// UnmountPart takes a part off; there may be none. ErrConflict: it is used, and the error says by whom.
	UnmountPart(ctx context.Context, at string) error
}

// MountParts has parts of what is published for the claim mounted, each at a place of its own, and returns where. What
// is mounted already stays as it is. A part is recorded before it is mounted, and is taken away with what is published.
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
		stands, err := s.partStands(r, p)
		if err != nil {
			return nil, fmt.Errorf("mount %q of volume %s: %w", p.Path, st.volume.VolumeName(), err)
		}
		if !stands {
			missing = append(missing, p)
		}
	}
	if err := s.mountMissing(ctx, st, r, missing); err != nil {
		return nil, err
	}
	return at, nil
}

// divisible is nil if parts of what is published can be mounted.
func (s *Stager) divisible(st state, r registry.Ref) error {
	switch {
	case s.Parts == nil:
		return registry.Errorf(registry.ErrUnsupported, "parts of volumes cannot be mounted here; remove sub_path")
	case r.Usage.Attachment == registry.BlockDevice:
		return registry.Invalid("volume %s is a block device, which has no parts; remove sub_path",
			st.volume.VolumeName())
	case r.Publish != registry.MarkDone || r.Boot != s.kernel.Boot():
		return conflict("volume %s is not published; it has to be published first", st.volume.VolumeName())
	}
	return nil
}

// partStands says whether a part is mounted. What is mounted in its place of which no record tells is nobody's part.
func (s *Stager) partStands(r registry.Ref, p hooks.Part) (bool, error) {
	place := s.Layout.Part(r.ClaimKey(), p.Path)
	known := slices.ContainsFunc(r.Parts, func(o registry.Part) bool { return o.At == place })
	if !known {
		return false, s.vacant(place)
	}
	has, _, err := s.Parts.HasPart(r.Target.Host, place)
	return has, err
}

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

// mountPart mounts a part. One of a mount that has been replaced since is taken off first, if nobody uses it.
func (s *Stager) mountPart(ctx context.Context, r registry.Ref, p hooks.Part, create bool) error {
	place := s.Layout.Part(r.ClaimKey(), p.Path)
	_, mounted, err := s.Parts.HasPart(r.Target.Host, place)
	if err == nil && mounted {
		err = s.Parts.UnmountPart(ctx, place)
	}
	if err != nil {
		return err
	}
	return s.Parts.MountPart(ctx, r.Target.Host, p.Path, place, create)
}

// recordParts marks parts of what is published.
func (s *Stager) recordParts(ctx context.Context, r registry.Ref, parts []hooks.Part, mark registry.Mark) error {
	if len(parts) == 0 {
		return nil
	}
	_, err := s.State.Commit(ctx, func(view registry.View) (registry.Change, error) {
		now, found := s.stateOf(view, r.Volume).ref(r.ClaimKey())
		if !found || now.Publish != registry.MarkDone {
			return registry.Change{}, conflict("it is not published any more")
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

// unmountParts takes off all parts of what is published. They stand on it, so it comes first. That they are there is
// doubted before they are not, else somebody could take them for lost.
func (s *Stager) unmountParts(ctx context.Context, r registry.Ref) error {
	switch {
	case len(r.Parts) == 0:
		return nil
	case s.Parts == nil:
		return registry.Errorf(registry.ErrUnsupported, "%d parts of it are mounted, and cannot be unmounted here",
			len(r.Parts))
	}
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
		if err := s.Parts.UnmountPart(ctx, p.At); err != nil {
			return fmt.Errorf("unmount %q of it: %w", p.Path, err)
		}
	}
	return nil
}
