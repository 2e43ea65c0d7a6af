package intent

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
)

var (
	lockKey  = registry.VolumeKey{Plugin: "p", External: "1"}
	lockName = registry.VolumeName{Namespace: "default", ID: "data"}
)

func lockFor(t *testing.T, l *Locks, k Key, who string) (leave func()) {
	t.Helper()
	leave, err := l.Lock(t.Context(), k, who)
	if err != nil {
		t.Fatal(err)
	}
	return leave
}

func TestOneHolderAtATime(t *testing.T) {
	var l Locks
	var inside, most atomic.Int32
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			leave := lockFor(t, &l, lockKey, "a test")
			most.Store(max(most.Load(), inside.Add(1)))
			inside.Add(-1)
			leave()
		})
	}
	all.Wait()
	if most.Load() != 1 || len(l.locks) != 0 {
		t.Errorf("%d at a time; %d lanes without users are kept", most.Load(), len(l.locks))
	}
}

// The error of a caller that gives up waiting names the operation that holds the lock.
func TestWaitForALockEndsWithItsContext(t *testing.T) {
	var l Locks
	leave := lockFor(t, &l, lockName, "the deletion")
	why := errors.New("nobody waits any more")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	if _, err := l.Lock(ctx, lockName, "other"); !errors.Is(err, why) ||
		!strings.Contains(err.Error(), "the deletion is under way") {
		t.Errorf("%v", err)
	}
	leave()
	if len(l.locks) != 0 {
		t.Errorf("lanes without users are kept: %v", l.locks)
	}
}

// AwaitFree waits for a short call, but not for a long one.
func TestQuestionWaitsForAShortCallOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for takes, free := range map[time.Duration]bool{0: true, time.Second: true, time.Hour: false} {
			var l Locks
			leave := lockFor(t, &l, lockKey, "a call")
			time.AfterFunc(takes, leave)
			if got := l.AwaitFree(t.Context(), lockKey); got != free {
				t.Errorf("free during a call of %v: %v", takes, got)
			}
		}
	})
}

// Callers of LockYielding hold the lock one after the other. The first caller of Lock ends the current hold and cancels
// later ones at once.
func TestLockIsYieldedToLock(t *testing.T) {
	var l Locks
	inside, leave, err := l.LockYielding(t.Context(), lockKey, "a question")
	if err != nil {
		t.Fatal(err)
	}
	waiting, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := l.LockYielding(waiting, lockKey, "another question"); err == nil || inside.Err() != nil {
		t.Fatalf("entered: %v; the one inside: %v", err, context.Cause(inside))
	}
	entered := make(chan func())
	go func() { entered <- lockFor(t, &l, lockKey, "a mount") }()
	<-inside.Done()
	if why := context.Cause(inside); !errors.Is(why, ErrYielded) {
		t.Error(why)
	}
	leave()
	leaveMount := <-entered
	asked := make(chan error)
	go func() {
		inside, leave, err := l.LockYielding(t.Context(), lockKey, "a third question")
		if err == nil {
			err = inside.Err()
			leave()
		}
		asked <- err
	}()
	leaveMount()
	if err := <-asked; err != nil {
		t.Error(err)
	}
	if len(l.locks) != 0 {
		t.Errorf("lanes without users are kept: %v", l.locks)
	}
}
