package csifake

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"sync"
)

// script has the rules of a plugin, and how often each has matched.
type script struct {
	mu       sync.Mutex
	rules    []*scripted
	file     string
	text     []byte // of the file, when it was last read
	fromFile []*scripted
	seen     map[string]int // matches of the file's rules; stored beside the file, for a restarted plugin
}

type scripted struct {
	Rule
	key  string // key in seen; empty for a rule that is not from the file
	seen int
}

// acts are the rules for one call, at most one for each moment.
type acts map[Moment]*Rule

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

// match finds the rules for a call, and counts the call for each rule that it matches.
func (s *script) match(rpc, volume string) (found acts, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.reload(); err != nil {
		return nil, err
	}
	found = acts{}
	for _, r := range append(s.rules[:len(s.rules):len(s.rules)], s.fromFile...) {
		if !r.matches(rpc, volume) {
			continue
		}
		r.seen++
		if r.key != "" {
			s.seen[r.key] = r.seen
		}
		if when := cmp.Or(r.When, Before); found[when] == nil && r.due() {
			rule := r.Rule
			found[when] = &rule
		}
	}
	return found, s.keepCounts()
}

func (r *scripted) matches(rpc, volume string) bool {
	every := r.everyRPC() && rpc != Fuse
	return (every || r.RPC == rpc) && (r.Volume == "" || r.Volume == volume)
}

func (r *scripted) due() bool {
	first := max(r.Nth, 1)
	return r.seen >= first && (r.Times == 0 || r.seen < first+r.Times)
}

// reload reads the file again. A call uses the content that the file has when the call arrives.
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
			_ = json.Unmarshal(counts, &s.seen) // a foreign file resets the counts
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
