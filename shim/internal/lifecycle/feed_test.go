package lifecycle

import (
	"context"
	"slices"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

// happen commits n events of a kind.
func (p *process) happen(kind registry.EventKind, n int) {
	p.t.Helper()
	_, err := p.current().store.Commit(p.t.Context(), func(registry.View) (registry.Change, error) {
		return registry.Change{Events: slices.Repeat([]registry.Event{{Kind: kind}}, n)}, nil
	})
	must(p.t, err)
}

// listen receives the events after a number, until one has the kind "end" or the stream ends. It returns their numbers,
// without those of bookmarks.
func (p *process) listen(after uint64) (received []uint64, over bool, err error) {
	ctx, cancel := context.WithCancel(p.t.Context())
	defer cancel()
	stream, err := pb.NewEventsClient(p.conn).Watch(ctx, &pb.WatchRequest{After: after})
	if err != nil {
		return nil, false, err
	}
	for {
		reply, err := stream.Recv()
		if err != nil {
			return received, false, err
		}
		if e := reply.GetEvent(); e != nil {
			received = append(received, e.GetSeq())
			if e.GetKind() == "end" {
				return received, true, nil
			}
		}
	}
}

// Watchers with cursors of all ages resume after each release of the state. Each of them gets each event once,
// including events from before the serving shim. The error that ends a stream says that another shim serves.
func TestWatchersResumeFromOldCursors(t *testing.T) {
	p := newProcess(t)
	l := dirs(t)
	p.activate(l)
	const apart = 250 // the watchers' cursors
	received := make([][]uint64, 8)
	p.happen("early", len(received)*apart)
	var swapping sync.RWMutex // locked while no shim is active
	var watching sync.WaitGroup
	for w := range received {
		watching.Go(func() {
			for over := false; !over; {
				swapping.RLock()
				after := uint64(w) * apart
				if n := len(received[w]); n > 0 {
					after = received[w][n-1]
				}
				swapping.RUnlock()
				more, ended, err := p.listen(after)
				if over = ended; err != nil && status.Code(err) != codes.Unavailable {
					t.Error(err)
					return
				}
				received[w] = append(received[w], more...)
			}
		})
	}
	for range 5 {
		p.happen("later", 30)
		swapping.Lock()
		mustRelease(t, p)
		p.activate(l)
		swapping.Unlock()
	}
	p.happen("end", 1)
	watching.Wait()
	must(t, p.current().store.View(t.Context(), func(v registry.View) error {
		for w, got := range received {
			var want []uint64
			events, _ := v.Events(registry.Seq(w)*apart, registry.MaxEvents)
			for _, e := range events {
				want = append(want, uint64(e.Seq))
			}
			if !slices.Equal(got, want) || len(want) < apart {
				t.Errorf("the watcher that began after %d got %d events of %d: %v", w*apart, len(got), len(want), got)
			}
		}
		return nil
	}))
}
