package csi

import (
	"sync"

	"holdfast/registry"
)

// Failures remembers the last error about each volume, so that each new one is logged once. The zero value is ready to
// use.
type Failures struct {
	mu   sync.Mutex // guards last
	last map[registry.VolumeKey]string
}

// maxFailures bounds Failures. Beyond it, all are forgotten: volumes go without a call.
const maxFailures = 10_000

// Changed records the error, and reports whether it is one that differs from the last one. A nil error ends it.
func (f *Failures) Changed(key registry.VolumeKey, err error) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil {
		delete(f.last, key)
		return false
	}
	if f.last == nil || len(f.last) == maxFailures {
		f.last = map[registry.VolumeKey]string{}
	}
	changed := f.last[key] != err.Error()
	f.last[key] = err.Error()
	return changed
}
