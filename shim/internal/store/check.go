package store

import (
	"errors"
	"fmt"
	"iter"

	"holdfast/registry"
)

// Check reads everything and yields what is wrong. Commits wait meanwhile. Its rules:
//
//	C1  bbolt's own check finds nothing, and checksums and tallies are right
//	C2  each record can be decoded and lies at its own key
//	C3  no index is above the last one, and no record was changed before it was created
//	C4  event numbers increase and lie above the floor, and there are no more than the limit
//	C5  the derived lists have exactly the entries of the records
//	C6  each ref has its claim: it is created after the claim and deleted before it
//	C7  each claim has its volume
func (s *Store) Check() iter.Seq[error] {
	return func(yield func(error) bool) {
		for _, err := range s.check() {
			if !yield(err) {
				return
			}
		}
	}
}

// CheckRecords is Check for a file that was just opened and migrated. It leaves out what verification has shown (C1),
// and events and answers, which no migration changes.
func (s *Store) CheckRecords() []error {
	p, err := s.readers.acquire()
	if err != nil {
		return []error{err}
	}
	defer s.readers.release(p)
	c := newChecker(s.view(p.tx, p.head), s.options.EventLimit)
	if err := reading(func() error { c.records(); return nil }); err != nil {
		c.report("%w", err)
	}
	return c.errs
}

func (s *Store) check() []error {
	s.writing.Lock()
	defer s.writing.Unlock()
	p, err := s.readers.acquire()
	if err != nil {
		return []error{err}
	}
	defer s.readers.release(p)
	if err := checkMetas(s.file); err != nil {
		return []error{registry.Errorf(registry.ErrDamaged, "%w", err)}
	}
	// Of its own: bbolt checks against its list of free pages, which is that of the last commit
	tx, err := s.db.Begin(false)
	if err != nil {
		return []error{registry.Errorf(registry.ErrUnavailable, "begin: %w", err)}
	}
	defer func() { _ = tx.Rollback() }()
	c := newChecker(s.view(tx, p.head), s.options.EventLimit)
	if err := reading(c.all); err != nil {
		c.report("%w", err)
	}
	return c.errs
}

// errDangling marks a violation of C6 or C7: the file is whole, and its records contradict each other.
var errDangling = errors.New("a record refers to nothing")

type checker struct {
	view
	limit   int
	errs    []error
	volumes map[registry.VolumeKey]bool
	claims  map[string]bool // by path
	lists   map[string]int  // entries that the derived lists should have
}

func newChecker(v view, eventLimit int) *checker {
	return &checker{
		view: v, limit: eventLimit, volumes: map[registry.VolumeKey]bool{}, claims: map[string]bool{},
		lists: map[string]int{bucketVolumeKeys: 0, bucketVolumeNames: 0, bucketRequestAge: 0},
	}
}

func (c *checker) report(format string, args ...any) {
	c.errs = append(c.errs, registry.Errorf(registry.ErrDamaged, format, args...))
}

func (c *checker) all() error {
	for err := range c.tx.Check() {
		c.report("bbolt: %w", err)
	}
	if err := checkContent(c.tx); err != nil {
		c.report("%w", err)
	}
	c.records()
	walk(c, registry.BucketRequests, func(o registry.Operation) { c.listed(o) })
	for bucket, want := range c.lists {
		if got := bucketOf(c.tx, bucket).Stats().KeyN; got != want {
			c.report("%s has %d entries instead of %d", bucket, got, want)
		}
	}
	return c.events()
}

// records checks all records that are changed in place.
func (c *checker) records() {
	walk(c, registry.BucketInstances, func(registry.Instance) {})
	walk(c, registry.BucketTasks, func(registry.Task) {})
	walk(c, registry.BucketAllocs, func(registry.Alloc) {})
	walk(c, registry.BucketVolumes, c.volume)
	walk(c, registry.BucketInlineVolumes, c.volume)
	walk(c, registry.BucketClaims, c.claim)
	walk(c, registry.BucketAttachments, func(registry.Attachment) {})
	walk(c, registry.BucketStagings, func(registry.Staging) {})
	walk(c, registry.BucketRefs, c.ref)
	walk(c, registry.BucketIntents, func(registry.Intent) {})
	walk(c, registry.BucketNodeIntents, func(registry.Intent) {})
}

// walk checks C2 and C3 for each record of a bucket, then calls also.
func walk[T registry.Record](c *checker, bucket registry.Bucket, also func(T)) {
	_ = bucketOf(c.tx, string(bucket)).ForEach(func(key, value []byte) error {
		record, err := recordOf[T](c.view, bucket, key, value)
		if err != nil {
			c.report("%w", err)
			return nil
		}
		if want := (registry.Key{Bucket: bucket, Path: string(key)}); record.Key() != want {
			c.report("%s %q lies at %q", bucket, record.Key().Path, key)
		}
		c.indexes(bucket, key, record)
		also(record)
		return nil
	})
}

func (c *checker) indexes(bucket registry.Bucket, key []byte, record registry.Record) {
	if create, last := record.Indexes(); create == 0 || last < create || last > c.seq {
		c.report("%s %q was created at %d and changed at %d, and the last index is %d", bucket, key, create, last,
			c.seq)
	}
}

func (c *checker) volume(v registry.Volume) {
	if v.External != "" {
		c.volumes[v.VolumeKey()] = true
	}
	c.listed(v)
}

func (c *checker) listed(record registry.Record) {
	for _, e := range listEntries(record) {
		c.lists[e.list]++
		if bucketOf(c.tx, e.list).Get([]byte(e.key)) == nil {
			c.report("%s does not list %q", e.list, e.key)
		}
	}
}

func (c *checker) claim(claim registry.Claim) {
	c.claims[claim.Key().Path] = true
	if !c.volumes[claim.Volume] {
		c.report("claim %s: there is no such volume: %w", claim.ClaimKey(), errDangling)
	}
}

func (c *checker) ref(r registry.Ref) {
	if !c.claims[r.ClaimKey().ClaimRecord().Path] {
		c.report("ref %s: there is no such claim: %w", r.ClaimKey(), errDangling)
	}
}

func (c *checker) events() error {
	count, last := 0, c.floor
	err := bucketOf(c.tx, bucketEvents).ForEach(func(key, value []byte) error {
		var event registry.Event
		if err := decode(bucketEvents, key, value, &event); err != nil {
			return err
		}
		if string(numberKey(event.Seq)) != string(key) {
			c.report("event %d lies at %x", event.Seq, key)
		}
		if event.Seq <= last || event.Seq > c.seq {
			c.report("event %d follows %d, and the last index is %d", event.Seq, last, c.seq)
		}
		count, last = count+1, event.Seq
		return nil
	})
	if count > c.limit {
		c.report("%d events are kept, and the limit is %d", count, c.limit)
	}
	if err != nil {
		return fmt.Errorf("events: %w", err)
	}
	return nil
}
