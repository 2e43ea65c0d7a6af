package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// leavers notes who has gone through a gate.
type leavers struct {
	mu    sync.Mutex
	names []string
}

func (l *leavers) add(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.names = append(l.names, name)
}

// take is who has gone since it was asked last.
func (l *leavers) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer func() { l.names = nil }()
	return l.names
}

// enters starts a call and returns once it waits, or has gone. It is on its way a tick of the clock after it has gone.
func (l *leavers) enters(ctx context.Context, g *gate, k kind, name string) {
	go func() {
		hold := time.Hour
		_, sent, err := g.enter(ctx, k, &hold, nil)
		if err != nil {
			name += " failed"
		}
		l.add(name)
		time.Sleep(time.Millisecond)
		sent()
	}()
	synctest.Wait()
}

// Calls that were held go out in the order in which they came, one after the other, and a later one does not overtake them. One whose deadline
// is over leaves the line. Reads are in none.
func TestHeldCallsKeepTheirOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, first, second := newGate(), &shim{}, &shim{}
		var gone leavers
		g.open(first)
		g.hush()
		var want []string
		for i := range 50 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			name := fmt.Sprint("write ", i)
			if i%7 == 3 {
				cancel()
				name += " of nobody"
			} else {
				want = append(want, name)
			}
			gone.enters(ctx, g, writes, name)
		}
		gone.enters(t.Context(), g, reads, "read")
		if left := gone.take(); len(left) != 8 || left[7] != "read" {
			t.Fatalf("while writes are held: %v", left)
		}
		g.close(errors.New("between two shims"))
		g.open(second)
		synctest.Wait()
		gone.enters(t.Context(), g, writes, "late")
		gone.enters(t.Context(), g, reads, "read")
		if left := gone.take(); !slices.Equal(left, []string{want[0], "read"}) {
			t.Errorf("before the first is on its way: %v", left)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if left, want := gone.take(), append(want[1:], "late"); !slices.Equal(left, want) {
			t.Errorf("they went as\n%v\nnot as they came\n%v", left, want)
		}
		if held := g.held(); held != 51 || len(g.line) != 0 {
			t.Errorf("%d were held, and %d still are", held, len(g.line))
		}
	})
}
