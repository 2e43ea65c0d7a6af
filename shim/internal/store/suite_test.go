package store

import (
	"errors"
	"sync"
	"testing"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// told is a store whose applied changes can be listened to.
type told struct {
	*running
	mu        sync.Mutex
	listeners []func(registry.Applied)
}

func (l *told) OnApplied(f func(registry.Applied)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.listeners = append(l.listeners, f)
}

func (l *told) tell(a registry.Applied) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, f := range l.listeners {
		f(a)
	}
}

func TestLog(t *testing.T) {
	registrytest.TestLog(t, func(t *testing.T) (registry.State, func() registry.State) {
		path := statePath(t)
		var log *told
		open := func() registry.State {
			l := &told{}
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

// wholeFile fails the test on all that Check finds but C6 and C7: the suite's records stand alone.
func wholeFile(t *testing.T, l *told) {
	t.Helper()
	for err := range l.Check() {
		if !errors.Is(err, errDangling) {
			t.Errorf("check: %v", err)
		}
	}
}
