package disk

import (
	"cmp"
	"context"
	"errors"
	"time"
)

// Snapshot copies a volume. A snapshot of that name and source may exist.
func (p *Pool) Snapshot(ctx context.Context, name Name, source ID) (Record, error) {
	h, err := p.Lock(IDFor(Snapshot, name))
	if err != nil {
		return Record{}, err
	}
	defer h.Release()
	r, err := p.loadReady(h)
	switch {
	case err == nil && r.Source != source:
		return Record{}, Errorf(ErrExists, "snapshot %q exists, of volume %s", name, r.Source)
	case err == nil || !errors.Is(err, ErrNotFound):
		return r, err
	}
	from, s, err := p.Acquire(source)
	if err != nil {
		return Record{}, err
	}
	defer from.Release()
	r = s.snapshot(name, time.Now().UTC())
	return p.make(h, r, func() error { return p.copy(ctx, from, s, r) })
}

// snapshot returns the record of a new snapshot of volume r.
func (r Record) snapshot(name Name, created time.Time) Record {
	return Record{ID: IDFor(Snapshot, name), Name: name, Backend: r.Backend, Bytes: r.Bytes, Usage: r.Usage,
		Source: r.ID, Created: created}
}

// createFrom makes a volume that begins as a copy of a volume or snapshot, in the backend of that.
func (p *Pool) createFrom(ctx context.Context, h *Hold, w Request) (Record, error) {
	if w.Source == h.id {
		return Record{}, Errorf(ErrInvalid, "a volume cannot be made from itself")
	}
	from, s, err := p.Acquire(w.Source)
	if err != nil {
		return Record{}, err
	}
	defer from.Release()
	usage, err := p.usageFrom(s, w.Usage)
	if err != nil {
		return Record{}, err
	}
	bytes, err := w.sizeFrom(s.Bytes, p.Capacity, p.MinSize(usage))
	if err != nil {
		return Record{}, err
	}
	r := Record{ID: h.id, Name: w.Name, Backend: s.Backend, Bytes: bytes, Usage: usage, Parameters: w.Parameters,
		Source: s.ID, ReadAhead: w.ReadAhead}
	return p.make(h, r, func() error { return p.copy(ctx, from, s, r) })
}

// usageFrom returns the usage of a copy of s, if it can be the requested one.
func (p *Pool) usageFrom(s Record, u Usage) (Usage, error) {
	b, err := p.Backend(s)
	if err != nil {
		return u, err
	}
	if err := b.Supports(u); err != nil || u.Access == Raw {
		return u, err
	}
	have, err := b.FileSystem(s.ID, "")
	if errors.Is(err, ErrInUse) {
		return u, Errorf(ErrInvalid, "the source cannot become a file system: %w", err)
	}
	if have != "" && u.FileSystem != "" && have != u.FileSystem {
		return u, Errorf(ErrInvalid, "the source holds %s, and so will its copy: it cannot be %s", have, u.FileSystem)
	}
	u.FileSystem = cmp.Or(u.FileSystem, have)
	return u, err
}

// copy fills r with the bytes that s has at one moment.
func (p *Pool) copy(ctx context.Context, from *Hold, s, r Record) error {
	b, err := p.Backend(s)
	if err != nil {
		return err
	}
	return p.atOneMoment([]*Hold{from}, []Record{s}, func(live bool) error {
		return b.Copy(ctx, s.ID, r.ID, r.Bytes, live)
	})
}

// atOneMoment calls do while locked volumes do not change: it first freezes each that is mounted for writing. live
// reports that the only volume is published for writing and cannot be frozen. Of several volumes none may be.
func (p *Pool) atOneMoment(holds []*Hold, volumes []Record, do func(live bool) error) (err error) {
	live := false
	for i, r := range volumes {
		b, err := p.Backend(r)
		if err != nil {
			return err
		}
		user, err := b.HeldBy(r.ID)
		if err != nil {
			return err
		}
		if f, ok := b.(Freezer); ok && user != "" && r.mountedForWriting(p.boot) {
			defer func() { err = errors.Join(err, p.thaw(holds[i], r)) }()
			if err := p.freeze(holds[i], r, f); err != nil {
				return err
			}
		} else if target := r.WrittenAt(p.boot); target != "" {
			live = true
			if len(volumes) > 1 {
				return Errorf(ErrInUse, "volume %s is published for writing at %s and cannot be frozen, so it has no "+
					"snapshot of the same moment as other volumes; unpublish it first", r.ID, target)
			}
		}
	}
	return do(live)
}

// mountedForWriting reports whether the volume is staged as a file system and not read-only.
func (r Record) mountedForWriting(boot string) bool {
	for node, st := range r.Staged {
		if st.Boot == boot && st.Usage.Access == Mounted && !r.ReadOnly(node) {
			return true
		}
	}
	return false
}

// freeze freezes a mounted volume. A freeze outlives the process, so the record has it first.
func (p *Pool) freeze(h *Hold, r Record, f Freezer) error {
	r.Frozen = true
	if err := h.Save(r); err != nil {
		return err
	}
	return f.Freeze(r.ID)
}

// thaw ends a freeze by this process or by one that was killed.
func (p *Pool) thaw(h *Hold, r Record) error {
	b, err := p.Backend(r)
	if err != nil {
		return err
	}
	if f, ok := b.(Freezer); ok {
		if err := f.Thaw(r.ID); err != nil {
			return err
		}
	}
	r.Frozen = false
	return h.Save(r)
}
