package disk

import "math"

// Limits of a volume's size. Sizes are whole blocks.
const (
	MinBytes     = 16 << 20
	MinXFSBytes  = 300 << 20 // mkfs.xfs makes nothing smaller
	DefaultBytes = 64 << 20
	blockBytes   = 4096
)

// Wanted is a volume as a caller asks for it.
type Wanted struct {
	Name       Name
	AtLeast    int64 // bytes; 0: no wish
	AtMost     int64 // bytes; 0: no limit
	Usage      Usage
	Parameters string // a digest
	Source     ID     // a volume or a snapshot; "": it begins empty
}

// Least is the smallest size of a volume for that usage.
func (p *Pool) Least(u Usage) int64 {
	fs := u.FileSystem
	if fs == "" {
		fs = p.FileSystem
	}
	if fs == "xfs" && u.Access != Raw && p.Making == LoopBackend {
		return MinXFSBytes
	}
	return MinBytes
}

// SizeOf is how many bytes a new volume would get.
func (p *Pool) SizeOf(w Wanted) (int64, error) { return w.size(p.Capacity, p.Least(w.Usage)) }

// size picks how many bytes a new volume gets.
func (w Wanted) size(capacity, least int64) (int64, error) {
	most := w.most()
	if w.AtLeast > capacity {
		return 0, Errorf(ErrRange, "%d bytes are asked for, loopfs has %d in all", w.AtLeast, capacity)
	}
	bytes := min(max(DefaultBytes, least), most/blockBytes*blockBytes)
	if w.AtLeast > 0 {
		bytes = blocks(max(w.AtLeast, least))
	}
	if bytes < least || bytes > most {
		return 0, Errorf(ErrRange, "at most %d bytes are asked for, such a volume has at least %d, in blocks of %d",
			most, least, blockBytes)
	}
	return bytes, nil
}

// sizeFrom picks how many bytes a copy gets: never fewer than its source has.
func (w Wanted) sizeFrom(source, capacity, least int64) (int64, error) {
	switch {
	case w.AtMost > 0 && w.AtMost < source, w.AtMost == 0 && w.AtLeast > 0 && blocks(max(w.AtLeast, least)) < source:
		return 0, Errorf(ErrRange, "the source has %d bytes; its copy cannot be smaller", source)
	case w.AtLeast <= source && source >= least:
		return source, nil
	}
	w.AtLeast = max(w.AtLeast, source)
	return w.size(capacity, least)
}

func (w Wanted) most() int64 {
	if w.AtMost == 0 {
		return math.MaxInt64
	}
	return w.AtMost
}

// blocks is the size rounded up.
func blocks(bytes int64) int64 { return (bytes + blockBytes - 1) / blockBytes * blockBytes }

func checkRange(atLeast, atMost int64) error {
	if atLeast < 0 || atMost < 0 || atMost > 0 && atMost < atLeast {
		return Errorf(ErrRange, "no size is at least %d and at most %d bytes", atLeast, atMost)
	}
	return nil
}

// satisfies says whether the volume that exists is what is wanted.
func (r Record) satisfies(w Wanted) error {
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

// Expand makes the volume larger, if it is smaller than asked for. The record comes first: an image that a kill left
// small is enlarged by the next call, or when the volume is staged.
func (p *Pool) Expand(id ID, atLeast, atMost int64, may func(Record) error) (Record, error) {
	if err := checkRange(atLeast, atMost); err != nil {
		return Record{}, err
	}
	h, r, err := p.Take(id)
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
		return Record{}, Errorf(ErrRange, "%d bytes are asked for, loopfs has %d in all", atLeast, p.Capacity)
	case atMost > 0 && want > atMost:
		return Record{}, Errorf(ErrRange, "at most %d bytes are asked for, volume %s would have %d; it never shrinks",
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
