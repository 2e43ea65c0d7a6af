package registrytest

import (
	"encoding/json"
	"fmt"
	"iter"
	"slices"
	"sort"
	"strings"

	"holdfast/registry"
)

// state holds everything that was committed up to an index. It is immutable and implements registry.Reader. A record
// is kept as JSON, so readers share nothing with the writer or with each other.
type state struct {
	index      registry.Seq
	generation registry.Generation
	buckets    map[registry.Bucket][]entry // of records and index entries
	events     []registry.Event
	floor      registry.Seq
}

// entry is a record or an index entry, which has no text. A bucket is sorted by path.
type entry struct{ path, text string }

func position(entries []entry, path string) (int, bool) {
	at := sort.Search(len(entries), func(i int) bool { return entries[i].path >= path })
	return at, at < len(entries) && entries[at].path == path
}

// with returns the state after a change, and the change as it was written.
func (s *state) with(c registry.Change, keep int) (*state, registry.Applied) {
	at := s.index + 1
	created := func(k registry.Key) registry.Seq { created, _ := registry.IndexesOf(s.Get(k)); return created }
	a := registry.Applied{Index: at, Change: c.Stamped(at, s.generation, created)}
	next := &state{index: a.Last(), generation: s.generation, buckets: map[registry.Bucket][]entry{}, floor: s.floor}
	for name, entries := range s.buckets {
		next.buckets[name] = slices.Clone(entries)
	}
	for _, r := range a.Change.Put {
		text, err := json.Marshal(r)
		if err != nil {
			panic(fmt.Sprintf("record %+v cannot be encoded: %v", r, err))
		}
		next.unset(r.Key())
		next.set(r.Key(), string(text))
		for _, k := range registry.IndexKeys(r) {
			next.set(k, "")
		}
	}
	for _, k := range a.Change.Delete {
		next.unset(k)
	}
	next.events = append(s.events, copyEvents(a.Change.Events)...) // readers of s see only their part of the array
	if over := len(next.events) - keep; over > 0 {
		next.floor, next.events = next.events[over-1].Seq, next.events[over:]
	}
	return next, a
}

func (s *state) set(k registry.Key, text string) {
	at, _ := position(s.buckets[k.Bucket], k.Path)
	s.buckets[k.Bucket] = slices.Insert(s.buckets[k.Bucket], at, entry{k.Path, text})
}

// unset removes the record of a key, if there is one, and its index entries.
func (s *state) unset(k registry.Key) {
	for _, k := range append(registry.IndexKeys(s.Get(k)), k) {
		if at, found := position(s.buckets[k.Bucket], k.Path); found {
			s.buckets[k.Bucket] = slices.Delete(s.buckets[k.Bucket], at, at+1)
		}
	}
}

func (s *state) Index() registry.Seq { return s.index }

func (s *state) Get(k registry.Key) registry.Record {
	at, found := position(s.buckets[k.Bucket], k.Path)
	if !found {
		return nil
	}
	text := s.buckets[k.Bucket][at].text
	record, err := k.Bucket.Type().Decode([]byte(text))
	if err != nil {
		panic(fmt.Sprintf("record %s cannot be decoded: %v", text, err))
	}
	return record
}

func (s *state) Paths(b registry.Bucket, prefix string) iter.Seq[string] {
	return func(yield func(string) bool) {
		entries := s.buckets[b]
		for at, _ := position(entries, prefix); at < len(entries); at++ {
			if path := entries[at].path; !strings.HasPrefix(path, prefix) || !yield(path) {
				return
			}
		}
	}
}

func (s *state) Events(after registry.Seq, limit int) ([]registry.Event, registry.Seq) {
	from := sort.Search(len(s.events), func(i int) bool { return s.events[i].Seq > after })
	rest := s.events[from:]
	return copyEvents(rest[:min(len(rest), limit)]), s.floor
}

// Text returns the JSON of a record.
func (s *state) Text(r registry.Record) ([]byte, error) { return json.Marshal(r) }

// Damaged panics: only a wrong test leads here.
func (s *state) Damaged(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }

func copyEvents(events []registry.Event) []registry.Event {
	out := slices.Clone(events)
	for i, e := range out {
		if e.Instance != nil {
			instance := e.Instance.Clone()
			out[i].Instance = &instance
		}
	}
	return out
}
