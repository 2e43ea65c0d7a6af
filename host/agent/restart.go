package agent

import (
	"encoding/json"
	"fmt"
	"time"

	"holdfast/registry"
)

// Policy says whether and when a task that has ended is started again: Attempts times within Interval, each after Delay. Then Mode: to
// fail is final, to delay waits for the interval to end.
type Policy struct {
	Attempts int
	Interval time.Duration
	Delay    time.Duration
	Mode     Mode
}

// Mode is what happens when the attempts are used up.
type Mode string

const (
	ModeFail  Mode = "fail"
	ModeDelay Mode = "delay"
)

// Tally counts restarts within an interval.
type Tally struct {
	Since time.Time `json:"since,omitzero"` // the interval's begin
	Count int       `json:"count,omitempty"`
	Total int       `json:"total,omitempty"` // of all intervals
}

// defaultPolicy is Nomad's.
func defaultPolicy(jobType string) Policy {
	if isBatch(jobType) {
		return Policy{Attempts: 3, Interval: 24 * time.Hour, Delay: 15 * time.Second, Mode: ModeFail}
	}
	return Policy{Attempts: 2, Interval: 30 * time.Minute, Delay: 15 * time.Second, Mode: ModeFail}
}

// restartBlock is restart { } as a job carries it.
type restartBlock struct {
	Attempts *number   `json:"attempts"`
	Interval *duration `json:"interval"`
	Delay    *duration `json:"delay"`
	Mode     *Mode     `json:"mode"`
}

// with is the policy with what the blocks set.
func (p Policy) with(blocks []restartBlock) (Policy, error) {
	for _, b := range blocks {
		if b.Attempts != nil {
			p.Attempts = int(*b.Attempts)
		}
		if b.Interval != nil {
			p.Interval = time.Duration(*b.Interval)
		}
		if b.Delay != nil {
			p.Delay = time.Duration(*b.Delay)
		}
		if b.Mode != nil {
			p.Mode = *b.Mode
		}
	}
	switch {
	case p.Mode != ModeFail && p.Mode != ModeDelay:
		return p, registry.Invalid("restart mode %q is unknown; use %q or %q", p.Mode, ModeFail, ModeDelay)
	case p.Attempts < 0 || p.Interval < 0 || p.Delay < 0:
		return p, registry.Invalid("restart: attempts, interval and delay cannot be negative")
	}
	return p, nil
}

// next judges the end of an attempt: how long to wait for the next one, or, if again is false, why there is none. The tally is that after
// it. Ended well says that the task was meant to end, and did so without an error.
func (p Policy) next(t Tally, endedWell bool, now time.Time) (after Tally, delay time.Duration, again bool, why string) {
	if endedWell {
		return t, 0, false, ""
	}
	if t.Since.IsZero() || now.Before(t.Since) || now.Sub(t.Since) >= p.Interval {
		t.Since, t.Count = now, 0
	}
	switch {
	case t.Count < p.Attempts:
		t.Count, t.Total = t.Count+1, t.Total+1
		return t, p.Delay, true, ""
	case p.Mode == ModeDelay && p.Attempts > 0:
		rest := t.Since.Add(p.Interval).Sub(now)
		t.Since, t.Count, t.Total = now.Add(rest), 1, t.Total+1
		return t, max(rest, p.Delay), true, ""
	case p.Attempts == 0:
		return t, 0, false, "its restart policy allows no restart"
	}
	return t, 0, false, fmt.Sprintf("its restart policy allows %d restarts within %v", p.Attempts, p.Interval)
}

// number is a JSON number, or the text of one: HCL converts freely.
type number int

func (n *number) UnmarshalJSON(b []byte) error {
	var s json.Number
	if err := json.Unmarshal(b, &s); err != nil {
		return err
	}
	i, err := s.Int64()
	*n = number(i)
	return err
}

// duration is a text such as "30s", or a number of nanoseconds.
type duration time.Duration

func (d *duration) UnmarshalJSON(b []byte) error {
	var v any
	if err := json.Unmarshal(b, &v); err != nil {
		return err
	}
	switch v := v.(type) {
	case float64:
		*d = duration(v)
		return nil
	case string:
		t, err := time.ParseDuration(v)
		*d = duration(t)
		if err != nil {
			return registry.Invalid("%q is no duration; write as in \"30s\"", v)
		}
		return nil
	}
	return registry.Invalid("%s is no duration; write as in \"30s\"", b)
}
