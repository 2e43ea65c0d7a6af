package store

import (
	"errors"
	"runtime/debug"
	"sync"

	bolt "go.etcd.io/bbolt"

	"holdfast/registry"
)

// readers gives all views the same read transaction: the one opened after the last acknowledged commit. A transaction
// opened by the view itself could show a commit whose sync may still fail.
//
// bbolt does not allow several goroutines to use a transaction. Here it is safe, because a read-only transaction has no
// bucket and node caches, so reading changes nothing. Subtest ReadersNeverSeeHalf of registrytest checks that under
// the race detector.
type readers struct {
	mu      sync.Mutex
	current *pin
	closed  bool
	open    sync.WaitGroup // counts the views that have acquired a pin and not released it
}

// pin is a read transaction. Once it is replaced, its last user ends it.
type pin struct {
	tx *bolt.Tx
	*head
	users    int
	replaced bool
}

// publish makes the last commit visible.
func (r *readers) publish(db *bolt.DB) error {
	tx, err := db.Begin(false)
	if err != nil {
		return err
	}
	next := &pin{tx: tx}
	defer func() {
		if next.head == nil { // reading the head panicked; the transaction holds a lock
			_ = tx.Rollback()
		}
	}()
	next.head = readHead(tx)
	r.mu.Lock()
	last := r.current
	r.current = next
	r.mu.Unlock()
	r.retire(last)
	return nil
}

// retire marks a pin as replaced, and ends it if no view uses it; nil: there is none.
func (r *readers) retire(p *pin) {
	if p == nil {
		return
	}
	r.mu.Lock()
	p.replaced = true
	unused := p.users == 0
	r.mu.Unlock()
	if unused {
		_ = p.tx.Rollback()
	}
}

func (r *readers) acquire() (*pin, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, registry.Errorf(registry.ErrUnavailable, "the store is closed")
	}
	r.open.Add(1)
	r.current.users++
	return r.current, nil
}

func (r *readers) release(p *pin) {
	defer r.open.Done()
	r.mu.Lock()
	p.users--
	last := p.users == 0 && p.replaced
	r.mu.Unlock()
	if last {
		_ = p.tx.Rollback()
	}
}

func (r *readers) index() registry.Seq {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.current.seq
}

// close refuses new views, waits for running ones, and ends the last transaction. A second call does nothing.
func (r *readers) close() {
	r.mu.Lock()
	again := r.closed
	r.closed = true
	r.mu.Unlock()
	if again {
		return
	}
	r.open.Wait()
	r.retire(r.current)
}

// errBroken marks errors of the file, to tell them from errors that a caller's function returned.
var errBroken = errors.New("the store is broken")

// brokenError marks an error with errBroken and keeps its text.
type brokenError struct{ error }

func (b brokenError) Unwrap() []error { return []error{b.error, errBroken} }

// recoverDamage turns two panics into an error: damage, and a fault of the mapped file. Reading a file that was cut off
// causes such a fault. Other panics continue.
func recoverDamage(err *error) {
	switch r := recover().(type) {
	case nil:
	case damage:
		*err = brokenError{r.err}
	case interface {
		error
		Addr() uintptr
	}:
		*err = brokenError{registry.Errorf(registry.ErrDamaged, "the state file was cut off while it was open: %w", r)}
	default:
		panic(r)
	}
}

// catchDamage runs a function that reads the mapped file. It returns damage that the function finds as an ErrDamaged.
func catchDamage(do func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer recoverDamage(&err)
	return do()
}

// read calls do with the transaction of the last commit. Damage stops the store.
func (s *Store) read(do func(*pin) error) error {
	p, err := s.readers.acquire()
	if err != nil {
		return err
	}
	defer s.readers.release(p)
	err = catchDamage(func() error { return do(p) })
	if errors.Is(err, errBroken) {
		s.fail(err)
	}
	return err
}
