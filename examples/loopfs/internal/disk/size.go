package disk

import "math"

// Limits of a volume's size. Sizes are whole blocks.
const (
	MinBytes     = 16 << 20
	MinXFSBytes  = 300 << 20 // mkfs.xfs makes nothing smaller
	DefaultBytes = 64 << 20
	blockBytes   = 4096
)

// Request is a requested volume.
type Request struct {
	Name       Name
	AtLeast    int64 // bytes; 0: no wish
	AtMost     int64 // bytes; 0: no limit
	Usage      Usage
	Parameters string // a digest
	Source     ID     // a volume or a snapshot; "": it begins empty
	ReadAhead  int64  // KiB; 0: that of the kernel
}

// MinSize returns the smallest size of a new volume.
func (p *Pool) MinSize(u Usage) int64 {
	fs := u.FileSystem
	if fs == "" {
		fs = p.FileSystem
	}
	if fs == "xfs" && u.Access != Raw && p.NewVolumes == LoopBackend {
		return MinXFSBytes
	}
	return MinBytes
}

// SizeOf returns the size of a new volume.
func (p *Pool) SizeOf(w Request) (int64, error) { return w.size(p.Capacity, p.MinSize(w.Usage)) }

// size returns the size of a new volume.
func (w Request) size(capacity, least int64) (int64, error) {
	most := w.most()
	if w.AtLeast > capacity {
		return 0, Errorf(ErrRange, "requested are %d bytes; the capacity is %d", w.AtLeast, capacity)
	}
	bytes := min(max(DefaultBytes, least), most/blockBytes*blockBytes)
	if w.AtLeast > 0 {
		bytes = blocks(max(w.AtLeast, least))
	}
	if bytes < least || bytes > most {
		return 0, Errorf(ErrRange, "requested are at most %d bytes; such a volume has at least %d, in blocks of %d",
			most, least, blockBytes)
	}
	return bytes, nil
}

// sizeFrom returns the size of a copy, which is never smaller than its source.
func (w Request) sizeFrom(source, capacity, least int64) (int64, error) {
	switch {
	case w.AtMost > 0 && w.AtMost < source, w.AtMost == 0 && w.AtLeast > 0 && blocks(max(w.AtLeast, least)) < source:
		return 0, Errorf(ErrRange, "the source has %d bytes; its copy cannot be smaller", source)
	case w.AtLeast <= source && source >= least:
		return source, nil
	}
	w.AtLeast = max(w.AtLeast, source)
	return w.size(capacity, least)
}

func (w Request) most() int64 {
	if w.AtMost == 0 {
		return math.MaxInt64
	}
	return w.AtMost
}

// blocks rounds a size up to whole blocks.
func blocks(bytes int64) int64 { return (bytes + blockBytes - 1) / blockBytes * blockBytes }

func checkRange(atLeast, atMost int64) error {
	if atLeast < 0 || atMost < 0 || atMost > 0 && atMost < atLeast {
		return Errorf(ErrRange, "no size is at least %d and at most %d bytes", atLeast, atMost)
	}
	return nil
}

// satisfies returns ErrExists if the existing volume is not the requested one.
func (r Record) satisfies(w Request) error {
	switch {
	case r.Bytes < w.AtLeast || w.AtMost > 0 && r.Bytes > w.AtMost:
		return Errorf(ErrExists, "volume %q exists with %d bytes", r.Name, r.Bytes)
	case !r.Usage.Fits(w.Usage), w.Usage.FileSystem != "" && w.Usage.FileSystem != r.Usage.FileSystem:
		return Errorf(ErrExists, "volume %q exists, made for %s", r.Name, r.Usage)
	case r.Parameters != w.Parameters:
		return Errorf(ErrExists, "volume %q exists, made with other parameters", r.Name)
	case r.Source != w.Source:
		return Errorf(ErrExists, "volume %q exists, made from another source (%q)", r.Name, r.Source)
	}
	return nil
}

// Modify changes the read-ahead of a volume. It saves the record first: the next stage sets what a kill prevented.
func (p *Pool) Modify(id ID, readAhead int64) error {
	h, r, err := p.Acquire(id)
	if err != nil {
		return err
	}
	defer h.Release()
	b, err := p.Backend(r)
	if err != nil {
		return err
	}
	tuner, ok := b.(Tuner)
	if !ok {
		return Errorf(ErrInvalid, "volume %s has no device: the %s backend has no mutable parameters", id, r.Backend)
	}
	r.ReadAhead = readAhead
	if err := h.Save(r); err != nil {
		return err
	}
	return tuner.SetReadAhead(id, readAhead)
}

// Expand enlarges a volume. It saves the record first: if it is killed after that, the next call or the next stage
// enlarges the image.
func (p *Pool) Expand(id ID, atLeast, atMost int64, may func(Record) error) (Record, error) {
	if err := checkRange(atLeast, atMost); err != nil {
		return Record{}, err
	}
	h, r, err := p.Acquire(id)
	if err != nil {
		return Record{}, err
	}
	defer h.Release()
	if err := may(r); err != nil {
		return Record{}, err
	}
	b, err := p.Backend(r)
	if err != nil {
		return Record{}, err
	}
	want := max(blocks(atLeast), r.Bytes)
	switch {
	case want > p.Capacity && want > r.Bytes:
		return Record{}, Errorf(ErrRange, "requested are %d bytes; the capacity is %d", atLeast, p.Capacity)
	case atMost > 0 && want > atMost:
		return Record{}, Errorf(ErrRange, "requested are at most %d bytes; volume %s would have %d, as it never shrinks",
			atMost, id, want)
	}
	if more := want - r.Bytes; more > 0 {
		r.Bytes = want
		if err := p.reserve(more, func() error { return h.Save(r) }); err != nil {
			return Record{}, err
		}
	}
	return r, b.Grow(id, r.Bytes)
}
