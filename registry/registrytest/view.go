package registrytest

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"sort"
	"strings"

	"holdfast/registry"
)

// state holds everything that was committed up to an index. It is immutable. A record is kept as JSON, so a reader
// shares nothing with the writer, and as decoded from it. Readers share the decoded record; a change in place panics
// at the next read.
type state struct {
	index      registry.Seq
	generation registry.Generation
	buckets    map[registry.Bucket][]entry
	events     []registry.Event
	floor      registry.Seq
}

// entry is one record of a bucket. A bucket is sorted by path.
type entry struct {
	path   string
	text   []byte
	record any // decoded from text, and shared by all readers
}

func position(entries []entry, path string) (int, bool) {
	at := sort.Search(len(entries), func(i int) bool { return entries[i].path >= path })
	return at, at < len(entries) && entries[at].path == path
}

// with returns the state after a change, and the change as it was written.
func (s *state) with(c registry.Change, keep int) (*state, registry.Applied) {
	at := s.index + 1
	a := registry.Applied{Index: at, Change: c.Stamped(at, s.generation, s.created)}
	next := &state{index: a.Last(), generation: s.generation, buckets: map[registry.Bucket][]entry{}, floor: s.floor}
	for name, entries := range s.buckets {
		next.buckets[name] = entries
	}
	owned := map[registry.Bucket]bool{}
	own := func(b registry.Bucket) {
		if !owned[b] {
			next.buckets[b], owned[b] = slices.Clone(next.buckets[b]), true
		}
	}
	for _, r := range a.Change.Put {
		own(r.Key().Bucket)
		next.put(r)
	}
	for _, k := range a.Change.Delete {
		own(k.Bucket)
		if i, found := position(next.buckets[k.Bucket], k.Path); found {
			next.buckets[k.Bucket] = slices.Delete(next.buckets[k.Bucket], i, i+1)
		}
	}
	next.events = slices.Concat(s.events, copyEvents(a.Change.Events))
	if over := len(next.events) - keep; over > 0 {
		next.floor, next.events = next.events[over-1].Seq, next.events[over:]
	}
	return next, a
}

func (s *state) put(r registry.Record) {
	text, err := json.Marshal(r)
	if err != nil {
		panic(fmt.Sprintf("record %+v cannot be encoded: %v", r, err))
	}
	k := r.Key()
	entries := s.buckets[k.Bucket]
	record := reflect.New(reflect.TypeOf(r))
	if err := json.Unmarshal(text, record.Interface()); err != nil {
		panic(fmt.Sprintf("record %s cannot be decoded: %v", text, err))
	}
	e := entry{k.Path, text, record.Elem().Interface()}
	at, found := position(entries, k.Path)
	if found {
		entries[at] = e
		return
	}
	s.buckets[k.Bucket] = slices.Insert(entries, at, e)
}

// created returns the CreateIndex of the record at k, or 0 if there is none.
func (s *state) created(k registry.Key) registry.Seq {
	at, found := position(s.buckets[k.Bucket], k.Path)
	if !found {
		return 0
	}
	created, _ := s.buckets[k.Bucket][at].record.(registry.Record).Indexes()
	return created
}

// recordOf returns the entry's record. It panics if a reader has changed the record in place.
func recordOf[T any](e entry) T {
	var again T
	if err := json.Unmarshal(e.text, &again); err != nil || !reflect.DeepEqual(e.record, any(again)) {
		panic(fmt.Sprintf("record %s was changed in place to %+v: clone a record before changing it", e.text, e.record))
	}
	return e.record.(T)
}

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

// view implements registry.View.
type view struct{ *state }

func one[T any](v view, k registry.Key) (T, bool) {
	at, found := position(v.buckets[k.Bucket], k.Path)
	if !found {
		var none T
		return none, false
	}
	return recordOf[T](v.buckets[k.Bucket][at]), true
}

// many returns the records whose path begins with prefix, in key order.
func many[T any](v view, b registry.Bucket, prefix string) []T {
	entries := v.buckets[b]
	at, _ := position(entries, prefix)
	var out []T
	for ; at < len(entries) && strings.HasPrefix(entries[at].path, prefix); at++ {
		out = append(out, recordOf[T](entries[at]))
	}
	return out
}

func where[T any](records []T, holds func(T) bool) []T {
	return slices.DeleteFunc(records, func(r T) bool { return !holds(r) })
}

func (v view) Index() registry.Seq { return v.index }

func (v view) Instance(k registry.InstanceKey) (registry.Instance, bool) {
	return one[registry.Instance](v, k.Key())
}

func (v view) Instances(role registry.Role, id registry.PluginID) []registry.Instance {
	found := many[registry.Instance](v, registry.BucketInstances, registry.PathOf(role, string(id)))
	slices.SortFunc(found, registry.CompareRank)
	return found
}

func (v view) AllInstances() []registry.Instance {
	all := many[registry.Instance](v, registry.BucketInstances, "")
	slices.SortFunc(all, func(a, b registry.Instance) int {
		if n := strings.Compare(string(a.Role), string(b.Role)); n != 0 {
			return n
		}
		if n := strings.Compare(string(a.Plugin), string(b.Plugin)); n != 0 {
			return n
		}
		return registry.CompareRank(a, b)
	})
	return all
}

func (v view) Task(k registry.TaskKey) (registry.Task, bool) { return one[registry.Task](v, k.Key()) }
func (v view) Tasks() []registry.Task                        { return many[registry.Task](v, registry.BucketTasks, "") }

func (v view) Alloc(id registry.AllocID) (registry.Alloc, bool) {
	return one[registry.Alloc](v, registry.AllocRecord(id))
}
func (v view) Allocs() []registry.Alloc { return many[registry.Alloc](v, registry.BucketAllocs, "") }

func (v view) AllocsWhere(pass func(registry.Alloc) bool) []registry.Alloc {
	return where(v.Allocs(), pass)
}

func (v view) Volume(n registry.VolumeName) (registry.Volume, bool) {
	found := where(v.Volumes(), func(r registry.Volume) bool { return r.VolumeName() == n })
	if len(found) == 0 {
		return registry.Volume{}, false
	}
	return found[0], true
}

func (v view) VolumeByKey(k registry.VolumeKey) (registry.Volume, bool) {
	found := where(v.Volumes(), func(r registry.Volume) bool { return r.VolumeKey() == k })
	if len(found) == 0 {
		return registry.Volume{}, false
	}
	return found[0], true
}

func (v view) VolumesNamed(plugin registry.PluginID, name string) []registry.Volume {
	return where(v.Volumes(), func(r registry.Volume) bool { return r.CreatedAs(plugin, name) })
}

func (v view) Volumes() []registry.Volume {
	all := append(many[registry.Volume](v, registry.BucketVolumes, ""),
		many[registry.Volume](v, registry.BucketInlineVolumes, "")...)
	slices.SortStableFunc(all, func(a, b registry.Volume) int { return strings.Compare(a.Key().Path, b.Key().Path) })
	return all
}

func (v view) VolumesWhere(pass func(registry.Volume) bool) []registry.Volume {
	return where(v.Volumes(), pass)
}

func (v view) VolumesOf(id registry.AllocID) []registry.Volume {
	return where(v.Volumes(), func(r registry.Volume) bool { return r.InlineOf(id) })
}

func (v view) Claims(k registry.VolumeKey) []registry.Claim {
	return many[registry.Claim](v, registry.BucketClaims, registry.PathOf(k.Plugin, string(k.External)))
}

func (v view) ClaimsOf(id registry.AllocID) []registry.Claim {
	return where(v.AllClaims(), func(c registry.Claim) bool { return c.Alloc == id })
}

func (v view) AllClaims() []registry.Claim {
	return many[registry.Claim](v, registry.BucketClaims, "")
}

func (v view) Attachment(k registry.AttachmentKey) (registry.Attachment, bool) {
	return one[registry.Attachment](v, k.Key())
}

func (v view) Attachments(k registry.VolumeKey) []registry.Attachment {
	return many[registry.Attachment](v, registry.BucketAttachments, registry.PathOf(k.Plugin, string(k.External)))
}

func (v view) AllAttachments() []registry.Attachment {
	return many[registry.Attachment](v, registry.BucketAttachments, "")
}

func (v view) Staging(k registry.VolumeKey) (registry.Staging, bool) {
	return one[registry.Staging](v, k.StagingRecord())
}

func (v view) Stagings() []registry.Staging {
	return many[registry.Staging](v, registry.BucketStagings, "")
}

func (v view) Refs(k registry.VolumeKey) []registry.Ref {
	return many[registry.Ref](v, registry.BucketRefs, registry.PathOf(k.Plugin, string(k.External)))
}

func (v view) AllRefs() []registry.Ref { return many[registry.Ref](v, registry.BucketRefs, "") }

func (v view) Intent(k registry.VolumeKey) (registry.Intent, bool) {
	return one[registry.Intent](v, k.IntentRecord())
}

func (v view) NodeIntent(k registry.VolumeKey) (registry.Intent, bool) {
	return one[registry.Intent](v, k.NodeIntentRecord())
}

func (v view) Intents() []registry.Intent {
	return append(many[registry.Intent](v, registry.BucketIntents, ""),
		many[registry.Intent](v, registry.BucketNodeIntents, "")...)
}

func (v view) Operation(id registry.OperationID) (registry.Operation, bool) {
	return one[registry.Operation](v, registry.OperationRecord(id))
}

func (v view) Events(after registry.Seq, limit int) ([]registry.Event, registry.Seq) {
	from := sort.Search(len(v.events), func(i int) bool { return v.events[i].Seq > after })
	rest := v.events[from:]
	return copyEvents(rest[:min(len(rest), limit)]), v.floor
}
