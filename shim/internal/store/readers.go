package store

import (
	"errors"
	"runtime/debug"
	"sync"

	bolt "go.etcd.io/bbolt"

	"holdfast/registry"
)

// readers hands out one read transaction to all views: the one that was opened after the last commit was acknowledged. A
// transaction of one's own could see a commit whose sync is still under way, and might yet fail.
//
// bbolt calls a transaction unsafe for several goroutines. A read-only one keeps nothing that reading changes (its bucket
// and node caches are nil), and TestConcurrentViews holds it to that under the race detector.
type readers struct {
	mu      sync.Mutex
	current *pin
	closed  bool
	open    sync.WaitGroup
}

// pin is a read transaction, ended by the last who uses it after it has been replaced.
type pin struct {
	tx *bolt.Tx
	*head
	users    int
	replaced bool
}

// publish makes what is committed now visible.
func (r *readers) publish(db *bolt.DB) error {
	tx, err := db.Begin(false)
	if err != nil {
		return err
	}
	next := &pin{tx: tx}
	defer func() {
		if next.head == nil { // damage: the lock that the transaction holds must not outlive us
			_ = tx.Rollback()
		}
	}()
	next.head = readHead(tx)
	r.mu.Lock()
	last := r.current
	r.current = next
	r.mu.Unlock()
	r.replace(last)
	return nil
}

func (r *readers) replace(p *pin) {
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

// close refuses new readers and waits for the others.
func (r *readers) close() {
	r.mu.Lock()
	again := r.closed
	r.closed = true
	r.mu.Unlock()
	if again {
		return
	}
	r.open.Wait()
	r.replace(r.current)
}

// errBroken marks errors that say that the file cannot be trusted, as against what a caller's function returned.
var errBroken = errors.New("the store is broken")

// broken keeps the text of the error it marks.
type broken struct{ error }

func (b broken) Unwrap() []error { return []error{b.error, errBroken} }

// caught turns damage, and a fault of the mapped file, into an error; all else goes on panicking. A truncated file faults where
// it is read.
func caught(err *error) {
	switch r := recover().(type) {
	case nil:
	case damage:
		*err = broken{r.err}
	case interface {
		error
		Addr() uintptr
	}:
		*err = broken{registry.Errorf(registry.ErrDamaged, "the state file was cut off under us: %w", r)}
	default:
		panic(r)
	}
}

// reading runs a function that reads the mapped file.
func reading(do func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer caught(&err)
	return do()
}
