package disk

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/internal/proc"
)

// Pool makes and removes volumes and snapshots within a total capacity.
type Pool struct {
	*Store
	NewVolumes string // the backend of new volumes
	Capacity   int64
	FileSystem string // of volumes that request none
	boot       string
}

// Open opens or makes a data directory. newVolumes is the name of a backend.
func Open(dir, newVolumes string, capacity int64, fileSystem string) (*Pool, error) {
	boot, err := proc.BootID()
	if err != nil {
		return nil, err
	}
	s, err := openStore(dir)
	return &Pool{Store: s, NewVolumes: newVolumes, Capacity: capacity, FileSystem: fileSystem, boot: boot}, err
}

// Boot returns the ID of the current boot.
func (p *Pool) Boot() string { return p.boot }

// Backend returns a backend.
func (p *Pool) Backend(name string) Backend {
	if name == DirBackend {
		return dir{p.Store}
	}
	return loop{p.Store}
}

// Devices returns the devices of a volume, or nil if its backend has none.
func (p *Pool) Devices(r Record) Devices {
	d, _ := p.Backend(r.Backend).(Devices)
	return d
}

// heldBy returns a device that the kernel has of the volume, or an empty string.
func (p *Pool) heldBy(r Record) (string, error) {
	if d := p.Devices(r); d != nil {
		return d.HeldBy(r.ID)
	}
	return "", nil
}

// Get reads the record of a ready volume, snapshot or group by its ID from a request.
func (p *Pool) Get(k Kind, id string) (Record, error) {
	parsed, err := ParseID(k, id)
	if err != nil {
		return Record{}, err
	}
	return p.find(parsed)
}

// Acquire is Get under a lock. It thaws what a kill left frozen.
func (p *Pool) Acquire(k Kind, id string) (*Hold, Record, error) {
	parsed, err := ParseID(k, id)
	if err != nil {
		return nil, Record{}, err
	}
	h, err := p.Lock(parsed)
	if err != nil {
		return nil, Record{}, err
	}
	r, err := p.find(parsed)
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

// Limits of a volume's size. Sizes are whole blocks.
const (
	minBytes     = 16 << 20
	minXFSBytes  = 300 << 20 // mkfs.xfs makes nothing smaller
	defaultBytes = 64 << 20
	blockBytes   = 4096
)

// Request is a requested volume.
type Request struct {
	Name       Name
	AtLeast    int64 // bytes; 0: no wish
	AtMost     int64 // bytes; 0: no limit
	Usage      Usage
	Parameters string // a digest
	ReadAhead  int64  // KiB; 0: that of the kernel
	Source     ID     // a volume or a snapshot; "": it begins empty
	Staged     map[string]Stage
}

// MinSize returns the smallest size of a new volume.
func (p *Pool) MinSize(u Usage) int64 {
	if cmp.Or(u.FileSystem, p.FileSystem) == "xfs" && u.Access != Raw && p.NewVolumes == LoopBackend {
		return minXFSBytes
	}
	return minBytes
}

// SizeOf returns the size of a new volume. It is at least that of its source.
func (p *Pool) SizeOf(w Request, source int64) (int64, error) {
	if err := checkRange(w.AtLeast, w.AtMost); err != nil {
		return 0, err
	}
	most := cmp.Or(w.AtMost, math.MaxInt64)
	least := max(p.MinSize(w.Usage), source)
	bytes := blocks(max(w.AtLeast, least))
	if w.AtLeast == 0 && source == 0 {
		bytes = min(max(defaultBytes, least), most/blockBytes*blockBytes)
	}
	switch {
	case w.AtLeast > p.Capacity:
		return 0, status.Errorf(codes.OutOfRange, "requested are %d bytes; the capacity is %d", w.AtLeast, p.Capacity)
	case bytes < least || bytes > most:
		return 0, status.Errorf(codes.OutOfRange, "requested are at most %d bytes; such a volume has at least %d, in "+
			"blocks of %d", most, least, blockBytes)
	}
	return bytes, nil
}

// blocks rounds a size up to whole blocks.
func blocks(bytes int64) int64 { return (bytes + blockBytes - 1) / blockBytes * blockBytes }

func checkRange(atLeast, atMost int64) error {
	if atLeast < 0 || atMost < 0 || atMost > 0 && atMost < atLeast {
		return status.Errorf(codes.OutOfRange, "no size is at least %d and at most %d bytes", atLeast, atMost)
	}
	return nil
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
	case status.Code(err) != codes.NotFound:
		return Record{}, err
	case w.Source == h.id:
		return Record{}, status.Error(codes.InvalidArgument, "a volume cannot be made from itself")
	case w.Source != "":
		return p.createFrom(ctx, h, w)
	}
	return p.CreateEmpty(ctx, h, w)
}

// CreateEmpty makes an empty volume under a lock.
func (p *Pool) CreateEmpty(ctx context.Context, h *Hold, w Request) (Record, error) {
	b := p.Backend(p.NewVolumes)
	if err := b.Supports(w.Usage); err != nil {
		return Record{}, err
	}
	r, err := p.newRecord(h, w, p.NewVolumes, 0)
	if err != nil {
		return Record{}, err
	}
	return p.make(h, r, func() error { return b.Make(ctx, r.ID, r.Bytes) })
}

func (p *Pool) newRecord(h *Hold, w Request, backend string, source int64) (Record, error) {
	bytes, err := p.SizeOf(w, source)
	r := Record{ID: h.id, Name: w.Name, Backend: backend, Bytes: bytes, Usage: w.Usage, Parameters: w.Parameters,
		ReadAhead: w.ReadAhead, Source: w.Source, Staged: w.Staged}
	if err == nil && r.ReadAhead != 0 && p.Devices(r) == nil {
		err = status.Errorf(codes.InvalidArgument, "volumes of the %s backend have no mutable parameters", backend)
	}
	return r, err
}

// satisfies returns ALREADY_EXISTS if the existing volume is not the requested one.
func (r Record) satisfies(w Request) error {
	switch {
	case r.Bytes < w.AtLeast || w.AtMost > 0 && r.Bytes > w.AtMost:
		return status.Errorf(codes.AlreadyExists, "volume %q exists with %d bytes", r.Name, r.Bytes)
	case !r.Usage.Fits(w.Usage), w.Usage.FileSystem != "" && w.Usage.FileSystem != r.Usage.FileSystem:
		return status.Errorf(codes.AlreadyExists, "volume %q exists, made for %s", r.Name, r.Usage)
	case r.Parameters != w.Parameters:
		return status.Errorf(codes.AlreadyExists, "volume %q exists, made with other parameters", r.Name)
	case r.Source != w.Source:
		return status.Errorf(codes.AlreadyExists, "volume %q exists, made from another source (%q)", r.Name, r.Source)
	}
	return nil
}

// loadReady reads a ready record. An incomplete volume is removed, and the error is NOT_FOUND.
func (p *Pool) loadReady(h *Hold) (Record, error) {
	r, err := h.Load()
	if err != nil || r.State == Ready {
		return r, err
	}
	if err := p.Discard(h, r); err != nil {
		return Record{}, err
	}
	return Record{}, status.Errorf(codes.NotFound, "%s does not exist", h.id)
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
		free, err := p.Free()
		if err != nil {
			return err
		}
		if bytes > free {
			return status.Errorf(codes.ResourceExhausted, "requested are %d bytes; %d of %d are free", bytes, free,
				p.Capacity)
		}
		return save()
	})
}

// Free returns the bytes that new volumes and snapshots may have.
func (p *Pool) Free() (int64, error) {
	all, err := p.All(Volume, Snapshot, Ephemeral)
	free := p.Capacity
	for _, r := range all {
		free -= r.Bytes
	}
	return max(free, 0), err
}

// Expand enlarges a volume. It saves the record first: if it is killed after that, the next call or the next stage
// enlarges the image.
func (p *Pool) Expand(h *Hold, r Record, atLeast, atMost int64) (Record, error) {
	if err := checkRange(atLeast, atMost); err != nil {
		return r, err
	}
	want := max(blocks(atLeast), r.Bytes)
	switch {
	case want > p.Capacity && want > r.Bytes:
		return r, status.Errorf(codes.OutOfRange, "requested are %d bytes; the capacity is %d", atLeast, p.Capacity)
	case atMost > 0 && want > atMost:
		return r, status.Errorf(codes.OutOfRange, "requested are at most %d bytes; volume %s would have %d, as it never "+
			"shrinks", atMost, r.ID, want)
	}
	if more := want - r.Bytes; more > 0 {
		r.Bytes = want
		if err := p.reserve(more, func() error { return h.Save(r) }); err != nil {
			return r, err
		}
	}
	return r, p.Backend(r.Backend).Grow(r.ID, r.Bytes)
}

// Delete removes a volume, a snapshot or a group of snapshots that is not used, if may returns no error. That it does
// not exist is no error.
func (p *Pool) Delete(k Kind, id string, may func(Record) error) error {
	parsed, err := ParseID(k, id)
	if err == nil {
		err = p.remove(parsed, func(r Record) error { return cmp.Or(may(r), p.unused(r)) })
	}
	if status.Code(err) == codes.NotFound {
		return nil
	}
	return err
}

func (p *Pool) remove(id ID, may func(Record) error) error {
	h, err := p.Lock(id)
	if err != nil {
		return err
	}
	defer h.Release()
	r, err := h.Load()
	if err == nil && r.State == Ready {
		err = may(r)
	}
	if err != nil {
		return err
	}
	return p.Discard(h, r)
}

// unused returns FAILED_PRECONDITION for a used volume. A stage of an earlier boot is no use.
func (p *Pool) unused(r Record) error {
	for node, st := range r.Staged {
		if st.Boot == p.boot {
			return status.Errorf(codes.FailedPrecondition, "volume %s is staged at %s on node %s", r.ID, st.Path, node)
		}
	}
	for node := range r.Attached {
		return status.Errorf(codes.FailedPrecondition, "volume %s is attached to node %s", r.ID, node)
	}
	user, err := p.heldBy(r)
	if user != "" {
		return status.Errorf(codes.FailedPrecondition, "%s still uses volume %s", user, r.ID)
	}
	return err
}

// Discard removes a volume, snapshot or group, even if it is used. The record says so first, so a kill leaves no bytes
// behind.
func (p *Pool) Discard(h *Hold, r Record) error {
	r.State = Removing
	if err := h.Save(r); err != nil {
		return err
	}
	for _, member := range r.Members {
		err := p.remove(member, func(Record) error { return nil })
		if err != nil && status.Code(err) != codes.NotFound {
			return err
		}
	}
	if r.ID.Kind() != Group {
		if err := p.Backend(r.Backend).Remove(r.ID); err != nil {
			return fmt.Errorf("remove %s: %w", r.ID, err)
		}
	}
	return h.drop()
}

// Recover removes incomplete volumes and thaws frozen ones, except those that another process has locked. It returns
// the IDs of the removed volumes.
func (p *Pool) Recover() (removed []ID, err error) {
	p.removeTemporary()
	all, err := p.All(Group, Volume, Snapshot, Ephemeral)
	if err != nil {
		return nil, err
	}
	for _, r := range all {
		if r.State == Ready && !r.Frozen {
			continue
		}
		gone, err := p.recover(r.ID)
		if code := status.Code(err); err != nil && code != codes.Aborted && code != codes.NotFound &&
			code != codes.FailedPrecondition {
			return removed, err
		}
		if gone {
			removed = append(removed, r.ID)
		}
	}
	return removed, nil
}

func (p *Pool) recover(id ID) (gone bool, err error) {
	h, err := p.Lock(id)
	if err != nil {
		return false, err
	}
	defer h.Release()
	r, err := h.Load()
	switch {
	case err == nil && r.State != Ready:
		err = p.Discard(h, r)
		return err == nil, err
	case err == nil && r.Frozen:
		err = p.thaw(h, r)
	}
	return false, err
}

// Attach saves an attachment, unless the node has the limit of volumes (0: no limit).
func (p *Pool) Attach(h *Hold, r Record, node string, limit int, a Attachment) error {
	return p.accounting(func() error {
		all, err := p.All(Volume)
		if err != nil {
			return err
		}
		attached := 0
		for _, r := range all {
			if _, ok := r.Attached[node]; ok {
				attached++
			}
		}
		if limit > 0 && attached >= limit {
			return status.Errorf(codes.ResourceExhausted, "node %s has %d volumes, which is its limit", node, attached)
		}
		return h.Save(r.WithAttachment(node, &a))
	})
}
