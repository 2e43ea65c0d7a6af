package host

import (
	"sync"
	"time"
)

// ShimState is the state of the shim as the host knows it without a call to the shim.
type ShimState struct {
	Serving  bool         `json:"serving"`            // false: calls are held
	Since    time.Time    `json:"since"`              // when Serving changed last
	SHA256   string       `json:"sha256"`             // of the binary that serves, or is started next
	PID      int          `json:"pid,omitempty"`      // while it serves
	Failures int          `json:"failures,omitempty"` // failed starts and deaths within a minute, in a row
	Reason   string       `json:"reason,omitempty"`   // of the last failure
	Next     time.Time    `json:"next,omitzero"`      // when it is started again
	Swap     *SwapRunning `json:"swap,omitempty"`     // under way, up to its resume
	Bakes    time.Time    `json:"bakes,omitzero"`     // until when the previous shim stands by
	Previous string       `json:"previous,omitempty"` // SHA-256 of the last other binary that was not rolled back
}

// SwapRunning is a swap that has not ended yet.
type SwapRunning struct {
	By    string    `json:"by,omitempty"`
	Path  string    `json:"path"`
	Began time.Time `json:"began"`
	Step  SwapStep  `json:"step"`
	Since time.Time `json:"since"` // when the step began
}

// ShimState returns the state of the shim. It never blocks.
func (h *Host) ShimState() ShimState { return h.shimState.get() }

// shimState holds the current ShimState.
type shimState struct {
	mu  sync.Mutex // guards now; held only to read or change it
	now ShimState
}

func (s *shimState) get() ShimState {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now
	if now.Serving && time.Since(now.Since) > goodLife {
		now.Failures, now.Reason = 0, ""
	}
	if now.Swap != nil {
		swap := *now.Swap
		now.Swap = &swap
	}
	return now
}

func (s *shimState) set(f func(now *ShimState)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.now)
}

// setServing notes the shim that calls go to.
func (s *shimState) setServing(pid int, binary digest) {
	s.set(func(now *ShimState) {
		now.Serving, now.Since, now.PID, now.SHA256, now.Next = true, time.Now(), pid, binary.SHA256, time.Time{}
	})
}

// setDown notes that no shim serves, and why. next is when the next one is started, zero if that is not known.
func (s *shimState) setDown(why error, failures int, binary digest, next time.Time) {
	s.set(func(now *ShimState) {
		if now.Serving {
			now.Since = time.Now()
		}
		now.Serving, now.PID, now.SHA256, now.Next = false, 0, binary.SHA256, next
		now.Failures, now.Reason = failures, why.Error()
	})
}

// setPrevious records the previous binary. ran lists the digests of binaries that have run: first the running one, then
// the one before it.
func (s *shimState) setPrevious(ran []string) {
	s.set(func(now *ShimState) {
		now.Previous = ""
		if len(ran) > 1 {
			now.Previous = ran[1]
		}
	})
}

// setReason notes how the previous shim ended, once that is known.
func (s *shimState) setReason(why error) { s.set(func(now *ShimState) { now.Reason = why.Error() }) }

// setBakeEnd notes until when a replaced shim stands by; zero: none does.
func (s *shimState) setBakeEnd(t time.Time) { s.set(func(now *ShimState) { now.Bakes = t }) }

// setSwapStep notes the step that a swap has reached; "": it has ended.
func (s *shimState) setSwapStep(r SwapReport, step SwapStep) {
	s.set(func(now *ShimState) {
		now.Swap = nil
		if step != "" {
			now.Swap = &SwapRunning{By: r.By, Path: r.Path, Began: r.Began, Step: step, Since: time.Now()}
		}
	})
}
