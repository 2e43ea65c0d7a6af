package intent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Locks serializes the operations on each volume or task. Different volumes run in parallel. The zero value is ready.
// Locks are in memory only: after a restart, the open intent shows that an operation is unfinished.
//
// A volume has two locks: one by its VolumeName, and one by its VolumeKey once the plugin has assigned its id. An
// operation that creates, deregisters or deletes a volume locks the name first and then the key. An operation that only
// uses the volume locks the key. An operation on several volumes locks their keys in order, and no names of volumes.
// This order excludes deadlocks.
type Locks struct {
	mu    sync.Mutex // guards locks and all fields of a lock except token; held only briefly
	locks map[Key]*lock
}

// Key identifies a lock, for example a registry.VolumeKey, a registry.VolumeName or a registry.TaskKey. Keys of
// different types never share a lock.
type Key fmt.Stringer

type lock struct {
	token   chan struct{}           // holds one while the lock is held
	holder  string                  // description of the holder's operation; stays until the next holder
	users   int                     // the holder and waiters
	locking int                     // how many of them called Lock
	yield   context.CancelCauseFunc // cancels a holder that called LockYielding; otherwise nil
}

// ErrYielded is the cause of a context of LockYielding that ended because another caller waits in Lock.
var ErrYielded = errors.New("another operation needs the volume")

// Lock waits for the lock of k and takes it. what describes the operation to other callers.
func (l *Locks) Lock(ctx context.Context, k Key, what string) (unlock func(), err error) {
	_, unlock, err = l.lock(ctx, k, what, false)
	return unlock, err
}

// LockYielding takes the lock of k as Lock does, for a call that changes nothing. The context that it returns ends with
// ErrYielded as soon as another caller waits in Lock. The holder then gives up its call and unlocks.
func (l *Locks) LockYielding(ctx context.Context, k Key, what string) (held context.Context, unlock func(), err error) {
	return l.lock(ctx, k, what, true)
}

// LockAll takes the locks of all keys. All callers must pass keys in one common order, so that there is no deadlock.
func (l *Locks) LockAll(ctx context.Context, keys []Key, what string) (unlock func(), err error) {
	var held []func()
	unlock = func() {
		for _, one := range slices.Backward(held) {
			one()
		}
	}
	for _, key := range keys {
		one, err := l.Lock(ctx, key, what)
		if err != nil {
			unlock()
			return nil, err
		}
		held = append(held, one)
	}
	return unlock, nil
}

func (l *Locks) lock(
	ctx context.Context, k Key, what string, yields bool,
) (held context.Context, unlock func(), err error) {
	lk := l.join(k, yields)
	select {
	case lk.token <- struct{}{}:
	case <-ctx.Done():
		busy := l.leave(k, lk, yields)
		return nil, nil, fmt.Errorf("wait for %s, where %s is under way: %w", k, busy, context.Cause(ctx))
	}
	held, cancel := context.WithCancelCause(ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	lk.holder = what
	if yields {
		lk.yield = cancel
		if lk.locking > 0 {
			cancel(ErrYielded)
		}
	}
	return held, func() {
		l.mu.Lock()
		lk.yield = nil
		l.mu.Unlock()
		cancel(nil)
		<-lk.token
		l.leave(k, lk, yields)
	}, nil
}

// Busy returns the description of the operation that holds the lock of k. It returns an empty string if the lock is
// free.
func (l *Locks) Busy(k Key) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if lk := l.locks[k]; lk != nil {
		return lk.holder
	}
	return ""
}

// busyLimit bounds AwaitFree. Calls that only read end sooner; a call that changes something may take minutes.
const busyLimit = 2 * time.Second

// AwaitFree waits until no operation holds the lock of k, for a call that only reads and yields to all others. If that
// takes longer than busyLimit, it returns false, and the caller tries again later.
func (l *Locks) AwaitFree(ctx context.Context, k Key) bool {
	for end := time.Now().Add(busyLimit); l.Busy(k) != ""; {
		if time.Now().After(end) || !Sleep(ctx, busyLimit/40) {
			return false
		}
	}
	return true
}

// join adds a user to the lock of k. A user that does not yield itself cancels a holder that does.
func (l *Locks) join(k Key, yields bool) *lock {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.locks == nil {
		l.locks = map[Key]*lock{}
	}
	lk := l.locks[k]
	if lk == nil {
		lk = &lock{token: make(chan struct{}, 1)}
		l.locks[k] = lk
	}
	lk.users++
	if !yields {
		lk.locking++
		if lk.yield != nil {
			lk.yield(ErrYielded)
		}
	}
	return lk
}

// leave removes a user from lk, and deletes lk after its last user. It returns the description of the holder.
func (l *Locks) leave(k Key, lk *lock, yields bool) (busy string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !yields {
		lk.locking--
	}
	if lk.users--; lk.users == 0 {
		delete(l.locks, k)
	}
	return lk.holder
}
