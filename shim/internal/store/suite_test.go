package store

import (
	"errors"
	"sync"
	"testing"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// observed is a store with a listener for applied changes.
type observed struct {
	*running
	mu        sync.Mutex
	listeners []func(registry.Applied)
}

func (l *observed) OnApplied(f func(registry.Applied)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.listeners = append(l.listeners, f)
}

func (l *observed) tell(a registry.Applied) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, f := range l.listeners {
		f(a)
	}
}

func TestLog(t *testing.T) {
	registrytest.TestLog(t, func(t *testing.T) (registry.State, func() registry.State) {
		path := statePath(t)
		var log *observed
		open := func() registry.State {
			l := &observed{}
			l.running = start(t, Options{Path: path, Applied: l.tell})
			log = l
			t.Cleanup(func() {
				if log == l {
					wholeFile(t, l)
				}
			})
			return l
		}
		return open(), func() registry.State {
			wholeFile(t, log)
			log.cancel()
			<-log.ended
			if err := log.Close(); err != nil {
				t.Error(err)
			}
			return open()
		}
	})
}

// wholeFile fails the test on all findings of Check except C6 and C7, because the suite's records do not refer to
// others.
func wholeFile(t *testing.T, l *observed) {
	t.Helper()
	for _, err := range l.Check() {
		if !errors.Is(err, errDangling) {
			t.Errorf("check: %v", err)
		}
	}
}
