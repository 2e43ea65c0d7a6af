package lane

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"holdfast/registry"
)

var (
	key  = registry.VolumeKey{Plugin: "p", External: "1"}
	name = registry.VolumeName{Namespace: "default", ID: "data"}
)

func enter(t *testing.T, l *Lanes, k Key, who string) (leave func()) {
	t.Helper()
	leave, err := l.Enter(t.Context(), k, who)
	if err != nil {
		t.Fatal(err)
	}
	return leave
}

func TestOneAtATime(t *testing.T) {
	var l Lanes
	var inside, most atomic.Int32
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			leave := enter(t, &l, key, "a test")
			most.Store(max(most.Load(), inside.Add(1)))
			inside.Add(-1)
			leave()
		})
	}
	all.Wait()
	if most.Load() != 1 || len(l.lanes) != 0 {
		t.Errorf("%d at a time; %d lanes without users are kept", most.Load(), len(l.lanes))
	}
}

// Different volumes do not wait for each other, nor do the two names of one.
func TestLanesAreApart(t *testing.T) {
	var l Lanes
	defer enter(t, &l, key, "x")()
	defer enter(t, &l, registry.VolumeKey{Plugin: "p", External: "2"}, "y")()
	defer enter(t, &l, name, "z")()
}

// Who gives up waiting is told what is under way.
func TestWaitEnds(t *testing.T) {
	var l Lanes
	leave := enter(t, &l, name, "the deletion")
	why := errors.New("nobody waits any more")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	if _, err := l.Enter(ctx, name, "other"); !errors.Is(err, why) || !strings.Contains(err.Error(), "the deletion is under way") {
		t.Errorf("%v", err)
	}
	leave()
	if len(l.lanes) != 0 {
		t.Errorf("lanes without users are kept: %v", l.lanes)
	}
}

// Several that yield share the lane one after the other; the first that does not ends the one inside, and keeps the others from staying.
func TestLaneIsYieldedToEnter(t *testing.T) {
	var l Lanes
	inside, leave, err := l.EnterYielding(t.Context(), key, "a question")
	if err != nil {
		t.Fatal(err)
	}
	waiting, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := l.EnterYielding(waiting, key, "another question"); err == nil || inside.Err() != nil {
		t.Fatalf("entered: %v; the one inside: %v", err, context.Cause(inside))
	}
	entered := make(chan func())
	go func() { entered <- enter(t, &l, key, "a mount") }()
	<-inside.Done()
	if why := context.Cause(inside); !errors.Is(why, ErrYielded) {
		t.Error(why)
	}
	leave()
	leaveMount := <-entered
	asked := make(chan error)
	go func() {
		inside, leave, err := l.EnterYielding(t.Context(), key, "a third question")
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
	if len(l.lanes) != 0 {
		t.Errorf("lanes without users are kept: %v", l.lanes)
	}
}
