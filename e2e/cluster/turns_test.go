package cluster

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"holdfast/host"
)

// triesAtOnce is how many allocs of a node try to claim a volume at the same time, once it looks free.
const triesAtOnce = 2

// turns makes the allocs of a node wait until their volumes can be used. One blocking query serves all allocs, so a
// waiting alloc costs nothing.
type turns struct {
	tries map[string]chan struct{} // by volume; each of capacity triesAtOnce

	mu      sync.Mutex // guards held and changed
	held    map[string][]use
	changed map[string]chan struct{} // by volume; closed when its holders have changed
}

func newTurns(volumes int) *turns {
	t := &turns{tries: map[string]chan struct{}{}, held: map[string][]use{}, changed: map[string]chan struct{}{}}
	for i := range volumes {
		t.tries[volumeID(i)] = make(chan struct{}, triesAtOnce)
		t.changed[volumeID(i)] = make(chan struct{})
	}
	return t
}

// follow keeps the holders up to date until ctx ends.
func (t *turns) follow(ctx context.Context, h *host.Host) {
	for at := host.Seq(0); ctx.Err() == nil; {
		list, next, err := h.Claims(ctx, host.ClaimQuery{Blocking: host.Blocking{MinIndex: at, Wait: callLimit}})
		if err != nil {
			fmt.Fprintf(os.Stderr, "claims: %v\n", err)
			time.Sleep(100 * time.Millisecond)
			continue
		}
		at = next
		held := map[string][]use{}
		for _, c := range list {
			volume := string(c.Name.ID)
			held[volume] = append(held[volume],
				use{string(c.Alloc), string(c.Node), string(c.Usage.Access), !c.Usage.ReadOnly})
		}
		t.set(held)
	}
}

func (t *turns) set(held map[string][]use) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for volume, changed := range t.changed {
		if !slices.Equal(held[volume], t.held[volume]) {
			close(changed)
			t.changed[volume] = make(chan struct{})
		}
	}
	t.held = held
}

// wait waits until no known holder of the volume excludes the use, or until ctx ends. The caller calls done after its
// try to claim the volume.
func (t *turns) wait(ctx context.Context, volume string, u use) (done func()) {
	tries := t.tries[volume]
	select {
	case tries <- struct{}{}:
	case <-ctx.Done():
		return func() {}
	}
	for {
		free, changed := t.free(volume, u)
		if !free {
			select {
			case <-changed:
				continue
			case <-ctx.Done():
			}
		}
		return func() { <-tries }
	}
}

// free reports whether no known holder of the volume excludes the use. changed is closed when the holders have changed.
func (t *turns) free(volume string, u use) (free bool, changed <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return !slices.ContainsFunc(t.held[volume], func(other use) bool {
		return other.Alloc != u.Alloc && excludes(other, u)
	}), t.changed[volume]
}
