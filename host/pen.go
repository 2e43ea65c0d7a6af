package host

import (
	"errors"
	"sync"
	"time"
)

// pen writes files of the state directory, one after the other. A disk that hangs holds up nobody for long: what is written then is there once
// the disk goes on.
type pen struct {
	writing sync.WaitGroup
	mu      sync.Mutex    // guards last; held for no longer than a look at it
	last    chan struct{} // closed once the last that was begun is written; nil: none was
}

// penLimit is how long a write is waited for.
const penLimit = time.Second

var errDiskHangs = errors.New("the disk of the state directory gives no answer; it is written once the disk does")

// write does one write after those before it, and gives its error.
func (p *pen) write(do func() error) error {
	p.mu.Lock()
	before, written, failed := p.last, make(chan struct{}), make(chan error, 1)
	p.last = written
	p.mu.Unlock()
	p.writing.Go(func() {
		defer close(written)
		if before != nil {
			<-before
		}
		failed <- do()
	})
	select {
	case err := <-failed:
		return err
	case <-time.After(penLimit):
		return errDiskHangs
	}
}

// rest returns once all is written: until then the directory is not to be another host's.
func (p *pen) rest() { p.writing.Wait() }
