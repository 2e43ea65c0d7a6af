package host

import (
	"sync"
	"time"
)

// ShimState is how the shim stands, as the host knows it without asking the shim.
type ShimState struct {
	Serving  bool         `json:"serving"`            // false: calls are held
	Since    time.Time    `json:"since"`              // that it serves, or that none does
	SHA256   string       `json:"sha256"`             // of the binary that serves, or is to be started next
	PID      int          `json:"pid,omitempty"`      // while it serves
	Failures int          `json:"failures,omitempty"` // starts, and lives of less than a minute, that went wrong one after the other
	Reason   string       `json:"reason,omitempty"`   // what the last of them ended of
	Next     time.Time    `json:"next,omitzero"`      // when it is started again
	Swap     *SwapRunning `json:"swap,omitempty"`     // under way, up to its resume
	Bakes    time.Time    `json:"bakes,omitzero"`     // until when the shim before this one stands by
}

// SwapRunning is a swap that has not ended yet.
type SwapRunning struct {
	By    string    `json:"by,omitempty"`
	Path  string    `json:"path"`
	Began time.Time `json:"began"`
	Step  SwapStep  `json:"step"`
	Since time.Time `json:"since"` // that it does this step
}

// Standing tells how the shim stands. It waits for nobody.
func (h *Host) ShimState() ShimState { return h.standing.now() }

// standing is the Standing of now.
type standing struct {
	mu sync.Mutex // guards is; held for no longer than a look-up
	is ShimState
}

func (s *standing) now() ShimState {
	s.mu.Lock()
	defer s.mu.Unlock()
	is := s.is
	if is.Serving && time.Since(is.Since) > goodLife {
		is.Failures, is.Reason = 0, ""
	}
	if is.Swap != nil {
		swap := *is.Swap
		is.Swap = &swap
	}
	return is
}

func (s *standing) set(f func(is *ShimState)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.is)
}

// serves notes the shim that calls go to.
func (s *standing) serves(pid int, binary digest) {
	s.set(func(is *ShimState) {
		is.Serving, is.Since, is.PID, is.SHA256, is.Next = true, time.Now(), pid, binary.SHA256, time.Time{}
	})
}

// fails notes that no shim serves, or still none, why, and when the next one is started.
func (s *standing) fails(why error, failures int, binary digest, next time.Time) {
	s.set(func(is *ShimState) {
		if is.Serving {
			is.Since = time.Now()
		}
		is.Serving, is.PID, is.SHA256, is.Next = false, 0, binary.SHA256, next
		is.Failures, is.Reason = failures, text(why)
	})
}

// explains records how the previous shim ended, once that is known.
func (s *standing) explains(why error) { s.set(func(is *ShimState) { is.Reason = text(why) }) }

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// bakes notes until when a replaced shim stands by; zero: none does.
func (s *standing) bakes(until time.Time) { s.set(func(is *ShimState) { is.Bakes = until }) }

// swaps notes the step that a swap has come to; "": it has ended.
func (s *standing) swaps(r SwapReport, step SwapStep) {
	s.set(func(is *ShimState) {
		is.Swap = nil
		if step != "" {
			is.Swap = &SwapRunning{By: r.By, Path: r.Path, Began: r.Began, Step: step, Since: time.Now()}
		}
	})
}
