package disk

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Snapshot copies a volume. A snapshot of that name and source may exist.
func (p *Pool) Snapshot(ctx context.Context, name Name, source string) (Record, error) {
	h, err := p.Lock(IDFor(Snapshot, name))
	if err != nil {
		return Record{}, err
	}
	defer h.Release()
	r, err := p.loadReady(h)
	switch {
	case err == nil && r.Source != ID(source):
		return Record{}, status.Errorf(codes.AlreadyExists, "snapshot %q exists, of volume %s", name, r.Source)
	case err == nil || status.Code(err) != codes.NotFound:
		return r, err
	}
	from, s, err := p.Acquire(Volume, source)
	if err != nil {
		return Record{}, err
	}
	defer from.Release()
	return p.copy(ctx, from, s, h, snapshotOf(s, name, time.Now().UTC()))
}

func snapshotOf(s Record, name Name, created time.Time) Record {
	return Record{ID: IDFor(Snapshot, name), Name: name, Backend: s.Backend, Bytes: s.Bytes, Usage: s.Usage,
		Source: s.ID, Created: created}
}

// SnapshotGroup copies volumes at one moment and returns the group. It exists in full or not at all: the record of the
// group is ready after those of its snapshots, and is removed after them.
func (p *Pool) SnapshotGroup(ctx context.Context, name Name, parameters string, sources []string) (Record, error) {
	sources = slices.Compact(slices.Sorted(slices.Values(sources)))
	g := Record{ID: IDFor(Group, name), Name: name, State: Making, Parameters: parameters, Created: time.Now().UTC()}
	for _, source := range sources {
		g.Members = append(g.Members, IDFor(Snapshot, memberName(name, ID(source))))
	}
	h, err := p.Lock(g.ID)
	if err != nil {
		return Record{}, err
	}
	defer h.Release()
	have, err := p.loadReady(h)
	switch {
	case err == nil && (!slices.Equal(have.Members, g.Members) || have.Parameters != parameters):
		return Record{}, status.Errorf(codes.AlreadyExists, "group snapshot %q exists, of other volumes or with other "+
			"parameters", name)
	case err == nil || status.Code(err) != codes.NotFound:
		return have, err
	}
	var holds []*Hold
	var volumes []Record
	for _, source := range sources {
		from, s, err := p.Acquire(Volume, source)
		if err != nil {
			return Record{}, err
		}
		defer from.Release()
		holds, volumes = append(holds, from), append(volumes, s)
	}
	if err := h.Save(g); err != nil {
		return Record{}, err
	}
	err = p.atOneMoment(holds, volumes, func(live bool) error {
		for _, s := range volumes {
			if err := p.makeMember(ctx, g, s, live); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return Record{}, errors.Join(err, p.Discard(h, g))
	}
	g.State = Ready
	return g, h.Save(g)
}

// memberName returns the name of a group's snapshot. It is no name that CreateSnapshot accepts, as it has a slash.
func memberName(group Name, source ID) Name { return group + "/" + Name(source) }

func (p *Pool) makeMember(ctx context.Context, g, s Record, live bool) error {
	r := snapshotOf(s, memberName(g.Name, s.ID), g.Created)
	r.InGroup = g.ID
	h, err := p.Lock(r.ID)
	if err != nil {
		return err
	}
	defer h.Release()
	_, err = p.make(h, r, func() error { return p.Backend(s.Backend).Copy(ctx, s.ID, r.ID, r.Bytes, live) })
	return err
}

// createFrom makes a volume that begins as a copy of a volume or snapshot, in the backend of that.
func (p *Pool) createFrom(ctx context.Context, h *Hold, w Request) (Record, error) {
	from, s, err := p.Acquire(w.Source.Kind(), string(w.Source))
	if err != nil {
		return Record{}, err
	}
	defer from.Release()
	b := p.Backend(s.Backend)
	if err := b.Supports(w.Usage); err != nil {
		return Record{}, err
	}
	if w.Usage.Access != Raw {
		have, err := b.FileSystem(s.ID, "")
		switch {
		case err != nil:
			return Record{}, status.Errorf(codes.InvalidArgument, "the source cannot become a file system: %v", err)
		case have != "" && w.Usage.FileSystem != "" && have != w.Usage.FileSystem:
			return Record{}, status.Errorf(codes.InvalidArgument, "the source holds %s, and so will its copy: it cannot be %s",
				have, w.Usage.FileSystem)
		}
		w.Usage.FileSystem = cmp.Or(w.Usage.FileSystem, have)
	}
	r, err := p.newRecord(h, w, s.Backend, s.Bytes)
	if err != nil {
		return Record{}, err
	}
	return p.copy(ctx, from, s, h, r)
}

// copy makes r with the bytes that s has at one moment.
func (p *Pool) copy(ctx context.Context, from *Hold, s Record, h *Hold, r Record) (Record, error) {
	return p.make(h, r, func() error {
		return p.atOneMoment([]*Hold{from}, []Record{s}, func(live bool) error {
			return p.Backend(s.Backend).Copy(ctx, s.ID, r.ID, r.Bytes, live)
		})
	})
}

// atOneMoment calls do while locked volumes do not change: it first freezes each that is mounted for writing. live
// reports that the only volume is published for writing and cannot be frozen. Of several volumes none may be.
func (p *Pool) atOneMoment(holds []*Hold, volumes []Record, do func(live bool) error) (failed error) {
	live := false
	for i, r := range volumes {
		device, err := p.heldBy(r)
		if err != nil {
			return err
		}
		if device != "" && r.writable(p.boot) {
			defer func() { failed = errors.Join(failed, p.thaw(holds[i], r)) }()
			if err := p.freeze(holds[i], r); err != nil {
				return err
			}
		} else if target := r.WrittenAt(p.boot); target != "" {
			live = true
			if len(volumes) > 1 {
				return status.Errorf(codes.FailedPrecondition, "volume %s is published for writing at %s and cannot be "+
					"frozen, so it has no snapshot of the same moment as other volumes; unpublish it first", r.ID, target)
			}
		}
	}
	return do(live)
}

// freeze freezes a mounted volume. A freeze outlives the process, so the record has it first.
func (p *Pool) freeze(h *Hold, r Record) error {
	r.Frozen = true
	if err := h.Save(r); err != nil {
		return err
	}
	return p.Devices(r).Freeze(r.ID)
}

// thaw ends a freeze by this process or by one that was killed.
func (p *Pool) thaw(h *Hold, r Record) error {
	if err := p.Devices(r).Thaw(r.ID); err != nil {
		return err
	}
	r.Frozen = false
	return h.Save(r)
}
