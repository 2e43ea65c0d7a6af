package lane

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// Lanes are the lanes of all volumes, or of all tasks. The zero value is ready.
type Lanes struct {
	mu    sync.Mutex // guards lanes and what is in them but turn; held for no longer than a look-up
	lanes map[Key]*lane
}

// Key is the name of what has a lane: a registry.VolumeKey, a registry.VolumeName or a registry.TaskKey. What two of different types name
// never shares a lane.
type Key fmt.Stringer

type lane struct {
	turn chan struct{} // holds one token while the lane is in use
	who  string        // what is under way in it
	uses int           // users and waiters

	entering int                     // those of uses that came by Enter
	yield    context.CancelCauseFunc // cancels the user inside if it came by EnterYielding, else nil
}

// ErrYielded is the cause of a context of EnterYielding that ended for another user of the lane.
var ErrYielded = errors.New("the volume is needed for something else")

// Enter waits for the lane of k and enters it. who says what is done there, for those that wait. Leave it by calling leave.
func (l *Lanes) Enter(ctx context.Context, k Key, who string) (leave func(), err error) {
	ln := l.join(k)
	l.mu.Lock()
	ln.entering++
	if ln.yield != nil {
		ln.yield(ErrYielded)
	}
	l.mu.Unlock()
	left := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		ln.entering--
	}
	part, err := l.wait(ctx, k, ln, who)
	if err != nil {
		left()
		return nil, err
	}
	return func() { left(); part() }, nil
}

// EnterYielding enters the lane of k as Enter does, for a call that changes nothing. The context that it returns ends with
// ErrYielded as soon as another caller waits in Enter, so that the call can be given up and leave be called.
func (l *Lanes) EnterYielding(ctx context.Context, k Key, who string) (inside context.Context, leave func(), err error) {
	ln := l.join(k)
	part, err := l.wait(ctx, k, ln, who)
	if err != nil {
		return nil, nil, err
	}
	inside, cancel := context.WithCancelCause(ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	ln.yield = cancel
	if ln.entering > 0 {
		cancel(ErrYielded)
	}
	return inside, func() {
		l.mu.Lock()
		ln.yield = nil
		l.mu.Unlock()
		cancel(nil)
		part()
	}, nil
}

// wait takes ln, which the caller has joined, once it is free.
func (l *Lanes) wait(ctx context.Context, k Key, ln *lane, who string) (leave func(), err error) {
	select {
	case ln.turn <- struct{}{}:
	case <-ctx.Done():
		busy := l.part(k, ln)
		return nil, fmt.Errorf("wait for %s, where %s is under way: %w", k, busy, context.Cause(ctx))
	}
	l.mu.Lock()
	ln.who = who
	l.mu.Unlock()
	return func() {
		<-ln.turn
		l.part(k, ln)
	}, nil
}

// Busy says what is under way in the lane of k; empty: nothing.
func (l *Lanes) Busy(k Key) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if ln := l.lanes[k]; ln != nil {
		return ln.who
	}
	return ""
}

func (l *Lanes) join(k Key) *lane {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lanes == nil {
		l.lanes = map[Key]*lane{}
	}
	ln := l.lanes[k]
	if ln == nil {
		ln = &lane{turn: make(chan struct{}, 1)}
		l.lanes[k] = ln
	}
	ln.uses++
	return ln
}

// part gives up the place in the lane, and the lane with its last user. It returns what is under way there.
func (l *Lanes) part(k Key, ln *lane) (busy string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if ln.uses--; ln.uses == 0 {
		delete(l.lanes, k)
	}
	return ln.who
}
