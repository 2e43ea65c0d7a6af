package store

import (
	"errors"
	"fmt"

	"holdfast/registry"
)

// Check reads everything and returns what is wrong. Commits wait meanwhile. Its rules:
//
//	C1  bbolt's own check finds nothing, and checksums and tallies are right
//	C2  each record can be decoded and lies at its own key
//	C3  no index is above the last one, and no record was changed before it was created
//	C4  event numbers increase and lie above the floor, and there are no more than the limit
//	C5  the indexes have exactly the entries of the records
//	C6  each ref has its claim: the claim is created before the ref and deleted after it
//	C7  each claim has its volume
//
// C6 and C7 do not hold in a cluster: other nodes release the claims of a lost node before it has unmounted, and the
// inline volumes of another node are not known here.
func (s *Store) Check() []error {
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
	// This transaction must be new: bbolt checks it against its current list of free pages.
	tx, err := s.db.Begin(false)
	if err != nil {
		return []error{registry.Errorf(registry.ErrUnavailable, "begin: %w", err)}
	}
	defer func() { _ = tx.Rollback() }()
	c := newChecker(s.reader(tx, p.head), s.options.EventLimit)
	if err := catchDamage(c.checkAll); err != nil {
		c.report("%w", err)
	}
	return c.errs
}

// CheckRecords is Check for a file that was just opened and migrated. It skips C1, which the verification has checked,
// and events and answers, which no migration changes.
func (s *Store) CheckRecords() []error {
	p, err := s.readers.acquire()
	if err != nil {
		return []error{err}
	}
	defer s.readers.release(p)
	c := newChecker(s.reader(p.tx, p.head), s.options.EventLimit)
	if err := catchDamage(func() error { c.checkRecords(); return nil }); err != nil {
		c.report("%w", err)
	}
	return c.errs
}

// errDangling marks a violation of C6 or C7: the file is intact, but its records contradict each other.
var errDangling = errors.New("a record refers to nothing")

type checker struct {
	reader
	limit   int
	errs    []error
	volumes map[registry.VolumeKey]bool
	claims  map[string]bool         // by path
	entries map[registry.Bucket]int // number of entries that the indexes should have
}

func newChecker(r reader, eventLimit int) *checker {
	return &checker{
		reader: r, limit: eventLimit, volumes: map[registry.VolumeKey]bool{}, claims: map[string]bool{},
		entries: map[registry.Bucket]int{},
	}
}

func (c *checker) report(format string, args ...any) {
	c.errs = append(c.errs, registry.Errorf(registry.ErrDamaged, format, args...))
}

// checkAll reports violations of all rules. It returns an error if it had to stop.
func (c *checker) checkAll() error {
	for err := range c.tx.Check() {
		c.report("bbolt: %w", err)
	}
	if err := checkContent(c.tx); err != nil {
		c.report("%w", err)
	}
	c.checkRecords()
	c.checkBucket(registry.BucketRequests)
	for _, x := range registry.Indexes {
		if got, want := bucketOf(c.tx, string(x.Bucket)).Stats().KeyN, c.entries[x.Bucket]; got != want {
			c.report("%s has %d entries instead of %d", x.Bucket, got, want)
		}
	}
	return c.checkEvents()
}

// checkRecords checks all records except answers (C2, C3, C5 to C7).
func (c *checker) checkRecords() {
	for _, bucket := range registry.Buckets { // volumes before claims, claims before refs
		if bucket != registry.BucketRequests {
			c.checkBucket(bucket)
		}
	}
}

// checkBucket checks the records of a bucket, and counts the index entries that they should have.
func (c *checker) checkBucket(bucket registry.Bucket) {
	_ = bucketOf(c.tx, string(bucket)).ForEach(func(key, value []byte) error {
		record, err := c.decode(bucket, key, value)
		if err != nil {
			c.report("%w", err)
			return nil
		}
		if want := (registry.Key{Bucket: bucket, Path: string(key)}); record.Key() != want {
			c.report("%s %q lies at %q", bucket, record.Key().Path, key)
		}
		if create, last := registry.IndexesOf(record); create == 0 || last < create || last > c.seq {
			c.report("%s %q was created at %d and changed at %d, and the last index is %d", bucket, key, create, last,
				c.seq)
		}
		for _, e := range registry.IndexKeys(record) {
			c.entries[e.Bucket]++
			if bucketOf(c.tx, string(e.Bucket)).Get([]byte(e.Path)) == nil {
				c.report("%s does not list %q", e.Bucket, e.Path)
			}
		}
		c.checkReferences(record)
		return nil
	})
}

// checkReferences checks that the claim of a ref and the volume of a claim have been seen, and remembers each volume
// and claim that it sees.
func (c *checker) checkReferences(record registry.Record) {
	switch r := record.(type) {
	case registry.Volume:
		if r.External != "" {
			c.volumes[r.VolumeKey()] = true
		}
	case registry.Claim:
		c.claims[r.Key().Path] = true
		if !c.volumes[r.Volume] && !c.clustered() {
			c.report("claim %s: there is no such volume: %w", r.ClaimKey(), errDangling)
		}
	case registry.Ref:
		if !c.claims[r.ClaimKey().ClaimRecord().Path] && !c.clustered() {
			c.report("ref %s: there is no such claim: %w", r.ClaimKey(), errDangling)
		}
	}
}

// clustered reports whether the node is a member of a cluster.
func (c *checker) clustered() bool {
	key, _ := bucketOf(c.tx, string(registry.BucketCopies)).Cursor().First()
	return key != nil
}

// checkEvents checks the events (C4).
func (c *checker) checkEvents() error {
	count := 0
	last := c.floor
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
		count++
		last = event.Seq
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
