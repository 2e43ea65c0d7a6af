package csifake

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"holdfast/internal/csifake/journal"
)

// Moment is when a rule acts: before the call takes effect, or after it and before the answer.
type Moment string

const (
	Before Moment = "before"
	After  Moment = "after"
)

// Hang is how long a call hangs.
type Hang string

const (
	UntilCancelled Hang = "context" // until its caller gives up; it then ends without going on
	ForEver        Hang = "forever" // until the plugin ends
)

// Rule changes what happens to some calls. Its actions happen in the order of the fields: delay, wait, hang, crash,
// code. The first rule that matches a call at a moment is the one that acts.
type Rule struct {
	RPC    string `json:"rpc,omitempty"`    // empty: every one
	Volume string `json:"volume,omitempty"` // empty: every one
	Nth    int    `json:"nth,omitempty"`    // the first of the matching calls to act on, from 1; 0 is the first
	Times  int    `json:"times,omitempty"`  // on how many of them; 0 is all
	When   Moment `json:"when,omitempty"`   // empty: before

	Delay    Duration `json:"delay,omitempty"` // does not end with the caller: the effect may come late
	Until    string   `json:"until,omitempty"` // wait until this file exists
	Hang     Hang     `json:"hang,omitempty"`
	Crash    bool     `json:"crash,omitempty"`
	Code     string   `json:"code,omitempty"` // name of a gRPC code: INTERNAL
	Message  string   `json:"message,omitempty"`
	NotReady bool     `json:"not_ready,omitempty"` // Probe answers ready=false
	Answer   Answer   `json:"-"`                   // rewrites the answer

	gate *Gate
}

// Answer rewrites what a call answers, as the last thing before the answer leaves: for hostile plugins. The reply is
// nil where err is not, and the other way round; the request must not be changed.
type Answer func(ctx context.Context, req, reply proto.Message, err error) (proto.Message, error)

// Duration is a time.Duration that is written as "150ms" in JSON.
type Duration time.Duration

func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	*d = Duration(v)
	return err
}

// ParseScript reads a JSON list of rules. Unknown fields and codes are errors.
func ParseScript(b []byte) ([]Rule, error) {
	var rules []Rule
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&rules); err != nil {
		return nil, fmt.Errorf("csifake: script: %w", err)
	}
	for _, r := range rules {
		if err := r.check(); err != nil {
			return nil, err
		}
	}
	return rules, nil
}

func (r Rule) check() error {
	if _, ok := journal.CodeNumber(r.Code); r.Code != "" && !ok {
		return fmt.Errorf("csifake: script: unknown code %q", r.Code)
	}
	if r.When != "" && r.When != Before && r.When != After {
		return fmt.Errorf("csifake: script: when is %q, not before or after", r.When)
	}
	if r.Hang != "" && r.Hang != UntilCancelled && r.Hang != ForEver {
		return fmt.Errorf("csifake: script: hang is %q, not context or forever", r.Hang)
	}
	return nil
}

// script is the rules of a plugin and how often each has matched.
type script struct {
	mu       sync.Mutex
	rules    []*scripted
	file     string
	text     []byte // of the file, as last read
	fromFile []*scripted
	seen     map[string]int // matches of the rules of the file: kept beside it, so that a restarted plugin counts on
}

type scripted struct {
	Rule
	key  string // in seen; empty for a rule that is not from the file
	seen int
}

func (s *script) add(rules ...Rule) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range rules {
		s.rules = append(s.rules, &scripted{Rule: r})
	}
}

func (s *script) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rules = nil
}

// match finds the rules for a call, one for each moment, and counts it for every rule that it matches.
func (s *script) match(rpc, volume string) (before, after *Rule, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.reload(); err != nil {
		return nil, nil, err
	}
	for _, r := range append(s.rules[:len(s.rules):len(s.rules)], s.fromFile...) {
		if !r.matches(rpc, volume) {
			continue
		}
		r.seen++
		if r.key != "" {
			s.seen[r.key] = r.seen
		}
		slot := &before
		if r.When == After {
			slot = &after
		}
		if *slot == nil && r.due() {
			*slot = &r.Rule
		}
	}
	return before, after, s.keepCounts()
}

func (r *scripted) matches(rpc, volume string) bool {
	return (r.RPC == "" || r.RPC == "*" || r.RPC == rpc) && (r.Volume == "" || r.Volume == volume)
}

func (r *scripted) due() bool {
	first := max(r.Nth, 1)
	return r.seen >= first && (r.Times == 0 || r.seen < first+r.Times)
}

// reload reads the file again. What it says as a call arrives is in force for that call.
func (s *script) reload() error {
	if s.file == "" {
		return nil
	}
	b, err := os.ReadFile(s.file)
	if err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("csifake: script: %w", err)
	}
	if s.seen != nil && bytes.Equal(b, s.text) {
		return nil
	}
	var rules []Rule
	if len(bytes.TrimSpace(b)) > 0 {
		if rules, err = ParseScript(b); err != nil {
			return err
		}
	}
	if s.seen == nil {
		s.seen = map[string]int{}
		if counts, err := os.ReadFile(s.file + ".counts"); err == nil {
			_ = json.Unmarshal(counts, &s.seen) // a file that is not ours starts the count anew
		}
	}
	s.text, s.fromFile = b, nil
	for i, r := range rules {
		text, _ := json.Marshal(r)
		key := fmt.Sprintf("%d-%x", i, sha256.Sum256(text))[:20]
		s.fromFile = append(s.fromFile, &scripted{Rule: r, key: key, seen: s.seen[key]})
	}
	return nil
}

func (s *script) keepCounts() error {
	if len(s.fromFile) == 0 {
		return nil
	}
	b, err := json.Marshal(s.seen)
	if err != nil {
		return err
	}
	return replaceFile(s.file+".counts", b)
}
