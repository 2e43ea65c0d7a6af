package alloc

import (
	"context"
	"fmt"
	"sync"

	"holdfast/registry"
)

// Lanes lets one thing at a time happen to each volume; different volumes run side by side. The zero value is ready.
type Lanes struct {
	mu    sync.Mutex // guards lanes and their waiting counts; held for no longer than a look-up
	lanes map[registry.VolumeKey]*lane
}

type lane struct {
	turn chan struct{} // holds one token while the lane is in use
	who  string        // what is under way in it
	uses int           // users and waiters
}

// Enter waits for the volume's lane and enters it. who says what is done there, for those that wait. Leave it by calling leave.
func (l *Lanes) Enter(ctx context.Context, v registry.VolumeKey, who string) (leave func(), err error) {
	ln := l.join(v)
	select {
	case ln.turn <- struct{}{}:
	case <-ctx.Done():
		busy := l.part(v, ln)
		return nil, fmt.Errorf("wait for volume %s, where %s is under way: %w", v, busy, context.Cause(ctx))
	}
	l.mu.Lock()
	ln.who = who
	l.mu.Unlock()
	return func() {
		<-ln.turn
		l.part(v, ln)
	}, nil
}

func (l *Lanes) join(v registry.VolumeKey) *lane {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lanes == nil {
		l.lanes = map[registry.VolumeKey]*lane{}
	}
	ln := l.lanes[v]
	if ln == nil {
		ln = &lane{turn: make(chan struct{}, 1)}
		l.lanes[v] = ln
	}
	ln.uses++
	return ln
}

// part gives up the place in the lane, and the lane with its last user. It returns what is under way there.
func (l *Lanes) part(v registry.VolumeKey, ln *lane) (busy string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if ln.uses--; ln.uses == 0 {
		delete(l.lanes, v)
	}
	return ln.who
}
