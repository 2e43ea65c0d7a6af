package tenure

import (
	"sync"
	"time"

	"holdfast/internal/priority"
)

// What a rehearsal leaves to who serves.
const (
	// idling is how long it takes only what nobody else wants of the processors.
	idling = 3 * time.Second
	// yielding is how much nicer it is than who serves after that, so that it ends where processors are always wanted: with this it gets a tenth.
	yielding = 10
)

// gently does what nobody waits for: others that want a processor get it first. Only who may take the priority back gives it up at all, which
// without root is nobody.
func gently(do func()) {
	base := priority.Usual(0)
	if base == nil {
		do()
		return
	}
	var p pace
	p.set(base.Idle())
	long := time.AfterFunc(idling, func() { p.set(base.Nicer(yielding)) })
	defer p.end(base)
	defer long.Stop()
	do()
}

// pace is how this process is scheduled, until its end.
type pace struct {
	mu   sync.Mutex // guards over; held while threads are set
	over bool
}

func (p *pace) set(s *priority.Schedule) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.over {
		_ = priority.Set(0, s) // else it is not as gentle
	}
}

func (p *pace) end(s *priority.Schedule) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.over = true
	_ = priority.Set(0, s) // which may be done: it was tried
}
