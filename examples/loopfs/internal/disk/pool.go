package disk

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
)

// Limits of a volume's size. Sizes are whole blocks.
const (
	MinBytes     = 16 << 20
	DefaultBytes = 64 << 20
	blockBytes   = 4096
)

// Pool makes and removes volumes within a total size.
type Pool struct {
	*Store
	Backends map[string]Backend
	Making   string // the backend of new volumes
	Capacity int64
	boot     string
}

// NewPool makes a pool over the store. Making is a key of backends.
func NewPool(s *Store, backends map[string]Backend, making string, capacity int64) (*Pool, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("read the boot id: %w", err)
	}
	return &Pool{Store: s, Backends: backends, Making: making, Capacity: capacity, boot: strings.TrimSpace(string(boot))}, nil
}

// Boot identifies this boot of the machine.
func (p *Pool) Boot() string { return p.boot }

// Backend is the backend that holds the volume.
func (p *Pool) Backend(r Record) (Backend, error) {
	b, ok := p.Backends[r.Backend]
	if !ok {
		return nil, Errorf(ErrUnavailable, "volume %s is of backend %q, which this loopfs does not have", r.ID, r.Backend)
	}
	return b, nil
}

// Wanted is a volume as a caller asks for it.
type Wanted struct {
	Name       Name
	AtLeast    int64 // bytes; 0: no wish
	AtMost     int64 // bytes; 0: no limit
	Usage      Usage
	Parameters string // a digest
}

// Create makes the volume, or finds that it is there already. It counts against the capacity from before it is made.
func (p *Pool) Create(ctx context.Context, w Wanted) (Record, error) {
	if w.AtLeast < 0 || w.AtMost < 0 || w.AtMost > 0 && w.AtMost < w.AtLeast {
		return Record{}, Errorf(ErrRange, "no size is at least %d and at most %d bytes", w.AtLeast, w.AtMost)
	}
	id := IDFor(w.Name)
	h, err := p.Lock(id)
	if err != nil {
		return Record{}, err
	}
	defer h.Release()
	r, err := h.Load()
	switch {
	case err == nil && r.State == Ready:
		return r, r.satisfies(w)
	case err == nil: // a kill interrupted its making or its removal
		if err := p.clear(h, r); err != nil {
			return Record{}, err
		}
	case !errors.Is(err, ErrNotFound):
		return Record{}, err
	}
	bytes, err := w.size(p.Capacity)
	if err != nil {
		return Record{}, err
	}
	r = Record{ID: id, Name: w.Name, State: Making, Backend: p.Making, Bytes: bytes, Usage: w.Usage, Parameters: w.Parameters}
	return p.make(ctx, h, r)
}

func (p *Pool) make(ctx context.Context, h *Hold, r Record) (Record, error) {
	if err := p.reserve(h, r); err != nil {
		return Record{}, err
	}
	b, err := p.Backend(r)
	if err != nil {
		return Record{}, err
	}
	if err := b.Make(ctx, r.ID, r.Bytes); err != nil {
		return Record{}, errors.Join(fmt.Errorf("make volume %s: %w", r.ID, err), p.clear(h, r))
	}
	r.State = Ready
	return r, h.Save(r)
}

// reserve writes the record of a volume to be made, if there is room for it.
func (p *Pool) reserve(h *Hold, r Record) error {
	return p.accounting(func() error {
		free, err := p.free()
		if err != nil {
			return err
		}
		if r.Bytes > free {
			return Errorf(ErrFull, "%d bytes are asked for, %d of %d are free", r.Bytes, free, p.Capacity)
		}
		return h.Save(r)
	})
}

// Free is how many bytes may still be given to volumes.
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

// size picks how many bytes a new volume gets.
func (w Wanted) size(capacity int64) (int64, error) {
	most := w.AtMost
	if most == 0 {
		most = math.MaxInt64
	}
	if w.AtLeast > capacity {
		return 0, Errorf(ErrRange, "%d bytes are asked for, loopfs has %d in all", w.AtLeast, capacity)
	}
	bytes := min(DefaultBytes, most/blockBytes*blockBytes)
	if w.AtLeast > 0 {
		bytes = (max(w.AtLeast, MinBytes) + blockBytes - 1) / blockBytes * blockBytes
	}
	if bytes < MinBytes || bytes > most {
		return 0, Errorf(ErrRange, "at most %d bytes are asked for, a volume here has at least %d, in blocks of %d", most, MinBytes, blockBytes)
	}
	return bytes, nil
}

// satisfies says whether the volume that exists is what is wanted.
func (r Record) satisfies(w Wanted) error {
	switch {
	case r.Bytes < w.AtLeast || w.AtMost > 0 && r.Bytes > w.AtMost:
		return Errorf(ErrExists, "volume %q exists with %d bytes", r.Name, r.Bytes)
	case !r.Usage.Mode.Includes(w.Usage.Mode) || r.Usage.FileSystem != w.Usage.FileSystem:
		return Errorf(ErrExists, "volume %q exists, made for mode %s", r.Name, r.Usage.Mode)
	case r.Parameters != w.Parameters:
		return Errorf(ErrExists, "volume %q exists, made with other parameters", r.Name)
	}
	return nil
}

// Delete removes the volume if nobody uses it; that there is none is no error.
func (p *Pool) Delete(id ID) error {
	h, err := p.Lock(id)
	if err != nil {
		return err
	}
	defer h.Release()
	r, err := h.Load()
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if r.State == Ready {
		if err := p.unused(r); err != nil {
			return err
		}
	}
	return p.clear(h, r)
}

func (p *Pool) unused(r Record) error {
	if who := r.UsedBy(p.boot); who != "" {
		return Errorf(ErrInUse, "volume %s cannot be removed: %s", r.ID, who)
	}
	b, err := p.Backend(r)
	if err != nil {
		return err
	}
	who, err := b.HeldBy(r.ID)
	if err != nil {
		return err
	}
	if who != "" {
		return Errorf(ErrInUse, "volume %s cannot be removed: %s still uses it", r.ID, who)
	}
	return nil
}

// clear removes what there is of a volume. A kill in the middle leaves a record that says so.
func (p *Pool) clear(h *Hold, r Record) error {
	b, err := p.Backend(r)
	if err != nil {
		return err
	}
	r.State = Removing
	if err := h.Save(r); err != nil {
		return err
	}
	if err := b.Remove(r.ID); err != nil {
		return fmt.Errorf("remove volume %s: %w", r.ID, err)
	}
	return h.Drop()
}

// Recover removes the volumes that a kill left half made or half removed, unless another process is at them right now.
// It returns their ids.
func (p *Pool) Recover() ([]ID, error) {
	all, err := p.All()
	if err != nil {
		return nil, err
	}
	var cleared []ID
	for _, r := range all {
		if r.State == Ready {
			continue
		}
		err := p.recover(r.ID)
		if err != nil && !errors.Is(err, ErrBusy) && !errors.Is(err, ErrNotFound) {
			return cleared, err
		}
		if err == nil {
			cleared = append(cleared, r.ID)
		}
	}
	return cleared, nil
}

func (p *Pool) recover(id ID) error {
	h, err := p.Lock(id)
	if err != nil {
		return err
	}
	defer h.Release()
	r, err := h.Load()
	if err != nil || r.State == Ready {
		return err
	}
	return p.clear(h, r)
}

// Attach gives the node the right to the volume, if it has fewer than limit others (0: no limit). The caller's decide is
// asked under the lock and returns the attachment to write, or an error.
func (p *Pool) Attach(id ID, node string, limit int64, decide func(Record) (Attachment, error)) (Attachment, error) {
	h, err := p.Lock(id)
	if err != nil {
		return Attachment{}, err
	}
	defer h.Release()
	r, err := h.Find()
	if err != nil {
		return Attachment{}, err
	}
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
			return Errorf(ErrFull, "node %s has %d volumes, its limit", node, n)
		}
		return h.Save(r.WithAttachment(node, &a))
	})
}

func (p *Pool) attachedTo(node string) (n int64, err error) {
	all, err := p.All()
	for _, r := range all {
		if _, ok := r.Attached[node]; ok {
			n++
		}
	}
	return n, err
}
