package store

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"io"
)

// The form of a bbolt file, version 2. All numbers are in the machine's byte order.
const (
	boltMagic   = 0xED0CDAED
	boltVersion = 2

	headerSize  = 16 // of a page: id, flags, count, overflow
	elementSize = 16 // of a page's list of keys
	metaSize    = 64 // of a meta page's content, its checksum last
	rootSize    = 16 // of a bucket's value: root page, sequence; an inline page follows if the root page is 0

	flagBranch   = 0x01
	flagLeaf     = 0x02
	flagMeta     = 0x04
	flagFreelist = 0x10
	flagBucket   = 0x01 // of a leaf's element
	maxFreeCount = 0xFFFF
	minPageSize  = 512
	maxPageSize  = 64 << 10
	maxDepth     = 64
)

var order = binary.NativeEndian

// pages walks the pages of one state of a bbolt file by reading it, checks all that bbolt relies on, and hands out what it
// finds. It trusts nothing that it reads.
type pages struct {
	file io.ReaderAt
	size int64
	meta meta
	seen map[uint64]bool // pages that are in use
	free map[uint64]bool

	buckets map[string]bool // as they were met
}

type meta struct {
	pageSize            uint64
	root, freelist      uint64
	highWater, sequence uint64 // sequence is the transaction's number
}

// found is told each key and value, with the bucket's name. The bytes are valid during the call.
type found func(bucket string, key, value []byte) error

func newPages(file io.ReaderAt, size int64) (*pages, error) {
	p := &pages{file: file, size: size, seen: map[uint64]bool{}, free: map[uint64]bool{}, buckets: map[string]bool{}}
	first, err := p.readMeta(0)
	if err != nil {
		return nil, fmt.Errorf("meta page 0: %w", err)
	}
	second, err := p.readMeta(int64(first.pageSize))
	if err != nil {
		return nil, fmt.Errorf("meta page 1: %w", err)
	}
	p.meta = first
	if second.sequence > first.sequence {
		p.meta = second
	}
	if uint64(size)/p.meta.pageSize < p.meta.highWater {
		return nil, fmt.Errorf("the file is cut off: %d bytes, %d pages of %d bytes are in use", size, p.meta.highWater, p.meta.pageSize)
	}
	return p, nil
}

// readMeta insists on both metas. bbolt would go on with the older of the two and so forget an acknowledged commit; a meta page
// that is torn by a crash is not to be expected, as it lies within one sector.
func (p *pages) readMeta(at int64) (meta, error) {
	var buf [headerSize + metaSize]byte
	if _, err := p.file.ReadAt(buf[:], at); err != nil {
		return meta{}, err
	}
	body := buf[headerSize:]
	sum := fnv.New64a()
	_, _ = sum.Write(body[:metaSize-8])
	switch {
	case order.Uint16(buf[8:]) != flagMeta:
		return meta{}, fmt.Errorf("not a meta page")
	case order.Uint32(body) != boltMagic || order.Uint32(body[4:]) != boltVersion:
		return meta{}, fmt.Errorf("not a bbolt file of version %d", boltVersion)
	case order.Uint64(body[metaSize-8:]) != sum.Sum64():
		return meta{}, fmt.Errorf("its checksum is wrong")
	}
	m := meta{uint64(order.Uint32(body[8:])), order.Uint64(body[16:]), order.Uint64(body[32:]), order.Uint64(body[40:]), order.Uint64(body[48:])}
	if m.pageSize < minPageSize || m.pageSize > maxPageSize || m.pageSize&(m.pageSize-1) != 0 {
		return meta{}, fmt.Errorf("pages of %d bytes", m.pageSize)
	}
	return m, nil
}

// walk goes through everything. It fails at the first thing that is wrong.
func (p *pages) walk(each found) error {
	return p.walkBuckets(func(string) bool { return true }, each)
}

// walkBucket goes through the list of free pages and that bucket.
func (p *pages) walkBucket(name string, each found) error {
	return p.walkBuckets(func(n string) bool { return n == name }, each)
}

func (p *pages) walkBuckets(wanted func(name string) bool, each found) error {
	p.seen[0], p.seen[1] = true, true
	if err := p.readFreelist(); err != nil {
		return fmt.Errorf("list of free pages: %w", err)
	}
	return p.tree(p.meta.root, 0, nil, nil, func(flags uint32, key, value []byte) error {
		if flags&flagBucket == 0 {
			return fmt.Errorf("key %q outside of any bucket", key)
		}
		name := string(key)
		p.buckets[name] = true
		if !wanted(name) {
			return nil
		}
		if err := p.bucket(name, value, each); err != nil {
			return fmt.Errorf("bucket %q: %w", name, err)
		}
		return nil
	})
}

func (p *pages) readFreelist() error {
	page, err := p.page(p.meta.freelist, flagFreelist)
	if err != nil {
		return err
	}
	count, at := uint64(order.Uint16(page[10:])), uint64(headerSize)
	if count == maxFreeCount {
		count, at = order.Uint64(page[at:]), at+8
	}
	if count > (uint64(len(page))-at)/8 {
		return fmt.Errorf("%d entries do not fit", count)
	}
	for i := range count {
		id := order.Uint64(page[at+8*i:])
		if id < 2 || id >= p.meta.highWater || p.free[id] || p.seen[id] {
			return fmt.Errorf("page %d cannot be free", id)
		}
		p.free[id] = true
	}
	return nil
}

// page reads a page with its overflow, and notes that it is in use.
func (p *pages) page(id uint64, flags uint16) ([]byte, error) {
	if id < 2 || id >= p.meta.highWater {
		return nil, fmt.Errorf("page %d does not exist", id)
	}
	buf := make([]byte, p.meta.pageSize)
	if _, err := p.file.ReadAt(buf, int64(id*p.meta.pageSize)); err != nil {
		return nil, fmt.Errorf("page %d: %w", id, err)
	}
	more := uint64(order.Uint32(buf[12:]))
	switch {
	case order.Uint64(buf) != id:
		return nil, fmt.Errorf("page %d calls itself page %d", id, order.Uint64(buf))
	case order.Uint16(buf[8:])&flags == 0 || order.Uint16(buf[8:])&(order.Uint16(buf[8:])-1) != 0:
		return nil, fmt.Errorf("page %d is of kind %#x", id, order.Uint16(buf[8:]))
	case more >= p.meta.highWater-id:
		return nil, fmt.Errorf("page %d is longer than the file", id)
	}
	for n := id; n <= id+more; n++ {
		if p.seen[n] || p.free[n] {
			return nil, fmt.Errorf("page %d is used twice", n)
		}
		p.seen[n] = true
	}
	if more == 0 {
		return buf, nil
	}
	rest := make([]byte, more*p.meta.pageSize)
	if _, err := p.file.ReadAt(rest, int64((id+1)*p.meta.pageSize)); err != nil {
		return nil, fmt.Errorf("page %d: %w", id, err)
	}
	return append(buf, rest...), nil
}

type element func(flags uint32, key, value []byte) error

func (p *pages) bucket(name string, value []byte, each found) error {
	if len(value) < rootSize {
		return fmt.Errorf("its root is cut off")
	}
	inBucket := func(flags uint32, key, value []byte) error {
		if flags&flagBucket != 0 {
			return fmt.Errorf("bucket %q within a bucket", key)
		}
		return each(name, key, value)
	}
	if root := order.Uint64(value); root != 0 {
		return p.tree(root, 0, nil, nil, inBucket)
	}
	inline := value[rootSize:]
	if len(inline) < headerSize || order.Uint16(inline[8:]) != flagLeaf {
		return fmt.Errorf("its inline page is not one")
	}
	return leaf(inline, nil, nil, inBucket)
}

// tree walks a page and those below it. Its keys lie from first, which its parent says it begins with, to before end. bbolt
// finds a page in its parent by that very key when it writes: were it another, the parent would keep the old page.
func (p *pages) tree(id uint64, depth int, first, end []byte, each element) error {
	page, err := p.page(id, flagBranch|flagLeaf)
	switch {
	case err != nil:
		return err
	case depth > maxDepth:
		return fmt.Errorf("page %d lies too deep", id)
	case order.Uint16(page[8:]) == flagLeaf:
		err = leaf(page, first, end, each)
	default:
		err = p.branch(page, depth, first, end, each)
	}
	if err != nil {
		return fmt.Errorf("page %d: %w", id, err)
	}
	return nil
}

func (p *pages) branch(page []byte, depth int, first, end []byte, each element) error {
	count := int(order.Uint16(page[10:]))
	keys, children := make([][]byte, count), make([]uint64, count)
	for i := range count {
		at := headerSize + elementSize*i
		if at+elementSize > len(page) {
			return fmt.Errorf("%d entries do not fit", count)
		}
		start := uint64(at) + uint64(order.Uint32(page[at:]))
		stop := start + uint64(order.Uint32(page[at+4:]))
		if stop > uint64(len(page)) {
			return fmt.Errorf("entry %d does not fit", i)
		}
		keys[i], children[i] = page[start:stop], order.Uint64(page[at+8:])
	}
	if count == 0 {
		return fmt.Errorf("nothing lies below it")
	}
	if err := ordered(keys, first, end); err != nil {
		return err
	}
	for i, child := range children {
		next := end
		if i+1 < count {
			next = keys[i+1]
		}
		if err := p.tree(child, depth+1, keys[i], next, each); err != nil {
			return err
		}
	}
	return nil
}

// leaf hands out a leaf's keys and values.
func leaf(page, first, end []byte, each element) error {
	count := int(order.Uint16(page[10:]))
	keys, values, flags := make([][]byte, count), make([][]byte, count), make([]uint32, count)
	for i := range count {
		at := headerSize + elementSize*i
		if at+elementSize > len(page) {
			return fmt.Errorf("%d entries do not fit", count)
		}
		start := uint64(at) + uint64(order.Uint32(page[at+4:]))
		middle := start + uint64(order.Uint32(page[at+8:]))
		stop := middle + uint64(order.Uint32(page[at+12:]))
		if stop > uint64(len(page)) {
			return fmt.Errorf("entry %d does not fit", i)
		}
		keys[i], values[i], flags[i] = page[start:middle], page[middle:stop], order.Uint32(page[at:])
		if flags[i]&^flagBucket != 0 {
			return fmt.Errorf("entry %d has flags %#x", i, flags[i])
		}
	}
	if err := ordered(keys, first, end); err != nil {
		return err
	}
	for i := range count {
		if err := each(flags[i], keys[i], values[i]); err != nil {
			return err
		}
	}
	return nil
}

// ordered checks that keys rise strictly, begin with first and stay below end; nil is no bound.
func ordered(keys [][]byte, first, end []byte) error {
	for i, key := range keys {
		switch {
		case len(key) == 0:
			return fmt.Errorf("key %d is empty", i)
		case i > 0 && bytes.Compare(keys[i-1], key) >= 0:
			return fmt.Errorf("key %d is out of order", i)
		case end != nil && bytes.Compare(key, end) >= 0:
			return fmt.Errorf("key %d belongs to the next page", i)
		}
	}
	if first != nil && (len(keys) == 0 || !bytes.Equal(keys[0], first)) {
		return fmt.Errorf("the page above says that it begins with another key")
	}
	return nil
}
