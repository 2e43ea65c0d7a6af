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

// maxFailures bounds Failures, because entries of deleted volumes are not removed. At the bound, all entries are
// dropped.
const maxFailures = 10_000

// Record records the error of a volume, and reports whether it differs from the last one. A nil error removes the
// entry, and Record returns false.
func (f *Failures) Record(key registry.VolumeKey, err error) bool {
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
