package disk

import (
	"context"
	"errors"
	"fmt"
	"holdfast/internal/proc"
)

// Pool makes and removes volumes and snapshots within a total capacity.
type Pool struct {
	*Store
	Backends   map[string]Backend
	NewVolumes string // the backend of new volumes
	Capacity   int64
	FileSystem string // of volumes that request none
	boot       string
}

// NewPool returns a pool of the store. newVolumes is a key of backends.
func NewPool(s *Store, backends map[string]Backend, newVolumes string, capacity int64) (*Pool, error) {
	boot, err := proc.BootID()
	if err != nil {
		return nil, err
	}
	p := &Pool{Store: s, Backends: backends, NewVolumes: newVolumes, Capacity: capacity, FileSystem: "ext4", boot: boot}
	return p, nil
}

// Boot returns the ID of the current boot.
func (p *Pool) Boot() string { return p.boot }

// Backend returns the backend of a volume.
func (p *Pool) Backend(r Record) (Backend, error) {
	b, ok := p.Backends[r.Backend]
	if !ok {
		return nil, Errorf(ErrUnavailable, "volume %s has the backend %q, which this loopfs does not know", r.ID,
			r.Backend)
	}
	return b, nil
}

// Acquire locks a ready volume or snapshot and reads its record. It thaws what a kill left frozen.
func (p *Pool) Acquire(id ID) (*Hold, Record, error) {
	h, err := p.Lock(id)
	if err != nil {
		return nil, Record{}, err
	}
	r, err := p.Find(id)
	if err == nil && r.Frozen {
		err = p.thaw(h, r)
		r.Frozen = false
	}
	if err != nil {
		h.Release()
		return nil, Record{}, err
	}
	return h, r, nil
}

// Create makes a volume. It may exist. Its size counts from before it is made.
func (p *Pool) Create(ctx context.Context, w Request) (Record, error) {
	if err := checkRange(w.AtLeast, w.AtMost); err != nil {
		return Record{}, err
	}
	h, err := p.Lock(IDFor(Volume, w.Name))
	if err != nil {
		return Record{}, err
	}
	defer h.Release()
	r, err := p.loadReady(h)
	switch {
	case err == nil:
		return r, r.satisfies(w)
	case !errors.Is(err, ErrNotFound):
		return Record{}, err
	case w.Source != "":
		return p.createFrom(ctx, h, w)
	}
	b := p.Backends[p.NewVolumes]
	if err := b.Supports(w.Usage); err != nil {
		return Record{}, err
	}
	if _, ok := b.(Tuner); !ok && w.ReadAhead != 0 {
		return Record{}, Errorf(ErrInvalid, "the %s backend has no mutable parameters", p.NewVolumes)
	}
	bytes, err := p.SizeOf(w)
	if err != nil {
		return Record{}, err
	}
	r = Record{ID: h.id, Name: w.Name, Backend: p.NewVolumes, Bytes: bytes, Usage: w.Usage, Parameters: w.Parameters,
		ReadAhead: w.ReadAhead}
	return p.make(h, r, func() error { return b.Make(ctx, r.ID, r.Bytes) })
}

// MakeEphemeral makes the bytes of a volume that is about to be mounted. Its record has the stage from the start.
func (p *Pool) MakeEphemeral(ctx context.Context, h *Hold, w Request, node string, st Stage) (Record, error) {
	bytes, err := p.SizeOf(w)
	if err != nil {
		return Record{}, err
	}
	r := Record{ID: h.id, Name: w.Name, Backend: p.NewVolumes, Bytes: bytes, Usage: w.Usage}.WithStage(node, &st)
	return p.make(h, r, func() error { return p.Backends[p.NewVolumes].Make(ctx, r.ID, r.Bytes) })
}

// loadReady reads a ready record. An incomplete volume is removed, and the error is ErrNotFound.
func (p *Pool) loadReady(h *Hold) (Record, error) {
	r, err := h.Load()
	if err != nil || r.State == Ready {
		return r, err
	}
	if err := p.Discard(h, r); err != nil {
		return Record{}, err
	}
	return Record{}, Errorf(ErrNotFound, "%s does not exist", h.id)
}

// make saves a record, fills the bytes, and marks the record as ready. After an error it removes both.
func (p *Pool) make(h *Hold, r Record, fill func() error) (Record, error) {
	r.State = Making
	if err := p.reserve(r.Bytes, func() error { return h.Save(r) }); err != nil {
		return Record{}, err
	}
	if err := fill(); err != nil {
		return Record{}, errors.Join(fmt.Errorf("make %s: %w", r.ID, err), p.Discard(h, r))
	}
	r.State = Ready
	return r, h.Save(r)
}

// reserve calls save if that many bytes are free.
func (p *Pool) reserve(bytes int64, save func() error) error {
	return p.accounting(func() error {
		free, err := p.free()
		if err != nil {
			return err
		}
		if bytes > free {
			return Errorf(ErrFull, "requested are %d bytes; %d of %d are free", bytes, free, p.Capacity)
		}
		return save()
	})
}

// Free returns the bytes that new volumes and snapshots may have.
func (p *Pool) Free() (int64, error) {
	var free int64
	err := p.accounting(func() (err error) {
		free, err = p.free()
		return err
	})
	return free, err
}

func (p *Pool) free() (int64, error) {
	all, err := p.All()
	if err != nil {
		return 0, err
	}
	free := p.Capacity
	for _, r := range all {
		free -= r.Bytes
	}
	return max(free, 0), nil
}

// Delete removes an unused volume, a snapshot or a group of snapshots, if may returns no error. That it does not exist
// is no error.
func (p *Pool) Delete(id ID, may func(Record) error) error {
	h, err := p.Lock(id)
	if err != nil {
		return err
	}
	defer h.Release()
	r, err := h.Load()
	if errors.Is(err, ErrNotFound) {
		return h.Drop() // a kill may have left its temporary file
	}
	if err == nil && r.State == Ready {
		err = errors.Join(may(r), p.unused(r))
	}
	if err != nil {
		return err
	}
	return p.Discard(h, r)
}

func (p *Pool) unused(r Record) error {
	if user := r.UsedBy(p.boot); user != "" {
		return Errorf(ErrInUse, "volume %s cannot be removed: %s", r.ID, user)
	}
	if r.ID.Kind() == Group {
		return nil
	}
	b, err := p.Backend(r)
	if err != nil {
		return err
	}
	user, err := b.HeldBy(r.ID)
	if err != nil {
		return err
	}
	if user != "" {
		return Errorf(ErrInUse, "volume %s cannot be removed: %s still uses it", r.ID, user)
	}
	return nil
}

// Discard removes a volume or snapshot, even if it is used. The record says so first, so a kill leaves no bytes behind.
func (p *Pool) Discard(h *Hold, r Record) error {
	r.State = Removing
	if err := h.Save(r); err != nil {
		return err
	}
	remove := func() error { return p.removeMembers(r) }
	if r.ID.Kind() != Group {
		b, err := p.Backend(r)
		if err != nil {
			return err
		}
		remove = func() error { return b.Remove(r.ID) }
	}
	if err := remove(); err != nil {
		return fmt.Errorf("remove %s: %w", r.ID, err)
	}
	return h.Drop()
}

// Recover removes incomplete volumes and thaws frozen ones, except those that another process has locked. It returns
// the IDs of the removed volumes.
func (p *Pool) Recover() ([]ID, error) {
	all, err := p.All()
	if err != nil {
		return nil, err
	}
	var cleared []ID
	for _, r := range all {
		if r.State == Ready && !r.Frozen {
			continue
		}
		gone, err := p.recover(r.ID)
		if err != nil && !errors.Is(err, ErrBusy) && !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrUnavailable) {
			return cleared, err
		}
		if gone {
			cleared = append(cleared, r.ID)
		}
	}
	return cleared, nil
}

func (p *Pool) recover(id ID) (gone bool, err error) {
	h, err := p.Lock(id)
	if err != nil {
		return false, err
	}
	defer h.Release()
	r, err := h.Load()
	switch {
	case err != nil:
		return false, err
	case r.State != Ready:
		err = p.Discard(h, r)
		return err == nil, err
	case r.Frozen:
		err = p.thaw(h, r)
	}
	return false, err
}

// Attach saves the attachment that decide returns, unless the node has the limit of others (0: no limit). decide runs
// under the lock of the volume.
func (p *Pool) Attach(id ID, node string, limit int64, decide func(Record) (Attachment, error)) (Attachment, error) {
	h, r, err := p.Acquire(id)
	if err != nil {
		return Attachment{}, err
	}
	defer h.Release()
	a, err := decide(r)
	if _, already := r.Attached[node]; already || err != nil {
		return a, err
	}
	return a, p.accounting(func() error {
		n, err := p.attachedTo(node)
		if err != nil {
			return err
		}
		if limit > 0 && n >= limit {
			return Errorf(ErrFull, "node %s has %d volumes, which is its limit", node, n)
		}
		return h.Save(r.WithAttachment(node, &a))
	})
}

func (p *Pool) attachedTo(node string) (n int64, err error) {
	all, err := p.All(Volume)
	for _, r := range all {
		if _, ok := r.Attached[node]; ok {
			n++
		}
	}
	return n, err
}
