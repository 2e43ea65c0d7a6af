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
	r = Record{ID: h.id, Name: name, Backend: s.Backend, Bytes: s.Bytes, Usage: s.Usage, Source: source,
		Created: time.Now().UTC()}
	return p.make(h, r, func() error { return p.copy(ctx, from, s, r) })
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
		Source: s.ID}
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
	user, err := b.HeldBy(s.ID)
	if err != nil {
		return err
	}
	if f, ok := b.(Freezer); ok && user != "" && s.mountedForWriting(p.boot) {
		return p.whileFrozen(from, s, f, func() error { return b.Copy(ctx, s.ID, r.ID, r.Bytes, false) })
	}
	return b.Copy(ctx, s.ID, r.ID, r.Bytes, s.WrittenAt(p.boot) != "")
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

// whileFrozen freezes the mounted volume during do. A freeze outlives the process, so the record has it first.
func (p *Pool) whileFrozen(h *Hold, r Record, f Freezer, do func() error) error {
	r.Frozen = true
	if err := h.Save(r); err != nil {
		return err
	}
	if err := f.Freeze(r.ID); err != nil {
		r.Frozen = false
		return errors.Join(err, h.Save(r))
	}
	err := do()
	_, thawed := p.thaw(h, r)
	return errors.Join(err, thawed)
}

// thaw ends a freeze by this process or by one that was killed.
func (p *Pool) thaw(h *Hold, r Record) (Record, error) {
	b, err := p.Backend(r)
	if err != nil {
		return r, err
	}
	if f, ok := b.(Freezer); ok {
		if err := f.Thaw(r.ID); err != nil {
			return r, err
		}
	}
	r.Frozen = false
	return r, h.Save(r)
}
