package registry

import (
	"context"
	"slices"
	"strings"
)

// State is durable state as everybody who changes it needs it. The store implements it on disk, package registrytest in
// memory; both pass one suite.
type State interface {
	// Commit runs decide against the state that all earlier commits left, and makes what it returns durable: all of it
	// in one transaction, or nothing. Concurrent commits may share a transaction; decide then sees the changes of those
	// before it. decide must be quick, must not block and may be run only once.
	//
	// An error of decide is returned as it is, and nothing has changed. An empty Change commits nothing and returns the
	// index as it is. Any other error leaves the outcome unknown (ErrUncertain) or says that nothing was written
	// (ErrExhausted: the disk is full, ErrFenced: a newer generation owns the state). When Commit returns nil, the
	// change is durable and has been applied: whoever registered with the Log for changes has seen it. The Seq returned
	// is the index of the change.
	Commit(ctx context.Context, decide func(View) (Change, error)) (Seq, error)

	// View runs read against the last committed state. It waits for no commit.
	View(ctx context.Context, read func(View) error) error
}

// Ensure commits what decide wants, unless nothing is to be changed: then it waits for no commit, and at is the index
// of what decide has seen. decide may be run twice.
func Ensure(ctx context.Context, log State, decide func(View) (Change, error)) (at Seq, err error) {
	settled := false
	err = log.View(ctx, func(v View) error {
		change, refused := decide(v)
		at, settled = v.Index(), refused == nil && change.Empty()
		return nil
	})
	if err != nil || settled {
		return at, err
	}
	return log.Commit(ctx, decide)
}

// View is the state as one transaction sees it. Lists are in key order. What cannot be decoded ends the transaction
// with ErrDamaged. Records are shared with other readers: a map, a slice or what a pointer points to is cloned before
// it is changed.
type View interface {
	Index() Seq
	Instance(InstanceKey) (Instance, bool)
	Instances(Role, PluginID) []Instance // newest first
	AllInstances() []Instance            // by role, plugin, then newest first
	Task(TaskKey) (Task, bool)
	Tasks() []Task
	Alloc(AllocID) (Alloc, bool)
	Allocs() []Alloc
	AllocsWhere(pass func(Alloc) bool) []Alloc // as VolumesWhere
	// Volumes and inline volumes are found alike. Should both have a name, the volume that is not inline is found.
	Volume(VolumeName) (Volume, bool)
	VolumeByKey(VolumeKey) (Volume, bool)
	// VolumesNamed are the volumes that were created under a name at a plugin's controller (Volume.CreatedAs). Its cost
	// is that of what it finds.
	VolumesNamed(plugin PluginID, name string) []Volume
	Volumes() []Volume
	// VolumesWhere are those volumes that pass. Unlike Volumes, to leave most of them out costs little.
	VolumesWhere(pass func(Volume) bool) []Volume
	// VolumesOf are an alloc's inline volumes (Volume.InlineOf). No other is read.
	VolumesOf(AllocID) []Volume
	Claims(VolumeKey) []Claim
	ClaimsOf(AllocID) []Claim
	AllClaims() []Claim
	Attachment(AttachmentKey) (Attachment, bool)
	Attachments(VolumeKey) []Attachment
	AllAttachments() []Attachment
	Staging(VolumeKey) (Staging, bool)
	Stagings() []Staging
	Refs(VolumeKey) []Ref
	AllRefs() []Ref
	// Intent returns the open controller call of a volume, NodeIntent its open call at this node.
	Intent(VolumeKey) (Intent, bool)
	NodeIntent(VolumeKey) (Intent, bool)
	Intents() []Intent // of both, controller calls first
	Operation(OperationID) (Operation, bool)
	// Events are up to limit events with a number above after, in order, and the floor: events up to it have been
	// pruned, so a cursor below it has missed some.
	Events(after Seq, limit int) (events []Event, floor Seq)
}

// Change is what one transaction writes: records to put, records to delete by their key, and the events that tell it.
// The Log numbers the events and sets CreateIndex (of a record that is new) and ModifyIndex of what is put.
type Change struct {
	Put    []Record
	Delete []Key
	Events []Event
}

// Empty says whether the change writes nothing.
func (c Change) Empty() bool { return len(c.Put)+len(c.Delete)+len(c.Events) == 0 }

// Touches reports whether the change puts or deletes a record of one of the buckets.
func (c Change) Touches(buckets ...Bucket) bool {
	return slices.ContainsFunc(c.Put, func(r Record) bool { return slices.Contains(buckets, r.Key().Bucket) }) ||
		slices.ContainsFunc(c.Delete, func(k Key) bool { return slices.Contains(buckets, k.Bucket) })
}

// And is the change with more added: for one decision that is made of several.
func (c Change) And(more Change) Change {
	return Change{append(c.Put, more.Put...), append(c.Delete, more.Delete...), append(c.Events, more.Events...)}
}

// OpenIntent returns the open call of a volume: that of its controller, or else that of this node.
func OpenIntent(v View, k VolumeKey) (Intent, bool) {
	if open, found := v.Intent(k); found {
		return open, true
	}
	return v.NodeIntent(k)
}

// Split returns the part of the change that writes records which nodes share, and the rest, which has the events.
func (c Change) Split() (shared, node Change) {
	node.Events = c.Events
	for _, r := range c.Put {
		if r.Key().Bucket.Shared() {
			shared.Put = append(shared.Put, r)
		} else {
			node.Put = append(node.Put, r)
		}
	}
	for _, k := range c.Delete {
		if k.Bucket.Shared() {
			shared.Delete = append(shared.Delete, k)
		} else {
			node.Delete = append(node.Delete, k)
		}
	}
	return shared, node
}

// Unmixed returns state as use cases get it: a commit of both records that nodes share and records of one node is an
// ErrInternal. In a cluster the two are not stored in one place.
func Unmixed(state State) State { return unmixed{state} }

type unmixed struct{ State }

func (u unmixed) Commit(ctx context.Context, decide func(View) (Change, error)) (Seq, error) {
	return u.State.Commit(ctx, func(v View) (Change, error) {
		change, err := decide(v)
		if err == nil && change.Mixed() {
			return Change{}, Errorf(ErrInternal, "commit mixes shared and node records: %s",
				strings.Join(change.buckets(), ", "))
		}
		return change, err
	})
}

// buckets lists the buckets that the change writes to, in the order of the change.
func (c Change) buckets() (names []string) {
	for _, r := range c.Put {
		names = append(names, string(r.Key().Bucket))
	}
	for _, k := range c.Delete {
		names = append(names, string(k.Bucket))
	}
	return names
}

// Mixed reports whether the change writes both records that nodes share and records of one node.
func (c Change) Mixed() bool {
	var shared, node bool
	see := func(k Key) { shared, node = shared || k.Bucket.Shared(), node || !k.Bucket.Shared() }
	for _, r := range c.Put {
		see(r.Key())
	}
	for _, k := range c.Delete {
		see(k)
	}
	return shared && node
}

// Record is one of the records that a State keeps: Instance, Task, Alloc, Volume, Claim, Attachment, Staging,
// Ref, Intent, Operation.
type Record interface {
	Key() Key
	// Indexed is the record with ModifyIndex at, and with CreateIndex created, or at if that is 0.
	Indexed(created, at Seq) Record
	// Indexes are what Indexed has set. A record without a ModifyIndex never changes.
	Indexes() (created, modified Seq)
}

// Bucket is one kind of record.
type Bucket string

const (
	BucketInstances     Bucket = "instances"
	BucketTasks         Bucket = "tasks"
	BucketAllocs        Bucket = "allocs"
	BucketVolumes       Bucket = "volumes"
	BucketInlineVolumes Bucket = "inline_volumes"
	BucketClaims        Bucket = "claims"
	BucketAttachments   Bucket = "attachments"
	BucketStagings      Bucket = "stagings"
	BucketRefs          Bucket = "refs"
	BucketIntents       Bucket = "intents"
	BucketNodeIntents   Bucket = "node_intents"
	BucketRequests      Bucket = "requests"
)

// Buckets lists every kind of record.
var Buckets = []Bucket{
	BucketInstances, BucketTasks, BucketAllocs, BucketVolumes, BucketInlineVolumes, BucketClaims,
	BucketAttachments, BucketStagings, BucketRefs, BucketIntents, BucketNodeIntents, BucketRequests,
}

// Shared reports whether the nodes of a cluster share the records of the bucket. Those of any other bucket belong to
// one node.
func (b Bucket) Shared() bool {
	switch b {
	case BucketVolumes, BucketClaims, BucketAttachments, BucketIntents:
		return true
	}
	return false
}

// Key names a record. Its path is encoded with length prefixes, so that no choice of ids makes two keys alike, and so
// that all records whose path begins alike lie together.
type Key struct {
	Bucket Bucket
	Path   string
}

// MaxEvents is how many events a Log keeps. Older ones are pruned in the transaction that writes new ones.
const MaxEvents = 10_000

// Stamped is the change as a Log writes it at an index: events numbered from there, records with their indexes, and in
// each event the instance as the change puts it. created is the CreateIndex of the record that a key names now, 0 if
// there is none.
func (c Change) Stamped(at Seq, generation Generation, created func(Key) Seq) Change {
	out := Change{Put: make([]Record, len(c.Put)), Delete: c.Delete, Events: make([]Event, len(c.Events))}
	instances := map[InstanceKey]Instance{}
	for i, r := range c.Put {
		out.Put[i] = r.Indexed(created(r.Key()), at)
		if instance, ok := out.Put[i].(Instance); ok {
			instances[instance.InstanceKey] = instance
		}
	}
	for i, e := range c.Events {
		e.Seq, e.Generation = at+Seq(i), generation
		if e.Instance != nil {
			if instance, put := instances[e.Instance.InstanceKey]; put {
				e.Instance = &instance
			}
		}
		out.Events[i] = e
	}
	return out
}

// Applied is one committed change as it is told after the commit, in commit order: the records as they were written.
type Applied struct {
	Index  Seq // of the change; its events have the numbers Index, Index+1, ...
	Change Change
}

// Last is the highest number that the change used.
func (a Applied) Last() Seq { return a.Index + Seq(max(len(a.Change.Events), 1)) - 1 }

// PathOf encodes ids into a key's path, each prefixed by its length as two big-endian bytes.
func PathOf[T ~string](first T, rest ...string) string {
	path := appendPart(nil, string(first))
	for _, part := range rest {
		path = appendPart(path, part)
	}
	return string(path)
}

func appendPart(path []byte, part string) []byte {
	return append(append(path, byte(len(part)>>8), byte(len(part))), part...)
}

func (k InstanceKey) Key() Key {
	return Key{BucketInstances, PathOf(k.Role, string(k.Plugin), string(k.Alloc), string(k.Task))}
}
func (k TaskKey) Key() Key    { return Key{BucketTasks, PathOf(k.Alloc, string(k.Task))} }
func (n VolumeName) Key() Key { return Key{BucketVolumes, PathOf(n.Namespace, string(n.ID))} }

// ClaimRecord and RefRecord are the keys of the two records that a claim key names.
func (k ClaimKey) ClaimRecord() Key { return Key{BucketClaims, k.path()} }
func (k ClaimKey) RefRecord() Key   { return Key{BucketRefs, k.path()} }
func (k ClaimKey) path() string {
	return PathOf(k.Volume.Plugin, string(k.Volume.External), string(k.Alloc), string(k.Request))
}

// The keys of records that a volume has at most one of. IntentRecord is the key of a controller call's intent.
func (k VolumeKey) StagingRecord() Key    { return Key{BucketStagings, k.path()} }
func (k VolumeKey) IntentRecord() Key     { return Key{BucketIntents, k.path()} }
func (k VolumeKey) NodeIntentRecord() Key { return Key{BucketNodeIntents, k.path()} }
func (k VolumeKey) path() string          { return PathOf(k.Plugin, string(k.External)) }

// AllocRecord and OperationRecord are the keys of records that are named by one id.
func AllocRecord(id AllocID) Key         { return Key{BucketAllocs, PathOf(id)} }
func OperationRecord(id OperationID) Key { return Key{BucketRequests, PathOf(id)} }

func (a Alloc) Key() Key      { return AllocRecord(a.ID) }
func (c Claim) Key() Key      { return c.ClaimKey().ClaimRecord() }
func (a Attachment) Key() Key { return a.AttachmentKey().Key() }
func (s Staging) Key() Key    { return s.Volume.StagingRecord() }
func (r Ref) Key() Key        { return r.ClaimKey().RefRecord() }
func (o Operation) Key() Key  { return OperationRecord(o.ID) }

// Key returns the key of the volume's record. An inline volume has a bucket of its own, as it belongs to one node.
func (v Volume) Key() Key {
	key := v.VolumeName().Key()
	if v.Ephemeral {
		key.Bucket = BucketInlineVolumes
	}
	return key
}

// Key returns the key of the intent's record. The intent of a call to a node has a bucket of its own.
func (i Intent) Key() Key {
	if i.RPC.OnNode() {
		return i.Volume.NodeIntentRecord()
	}
	return i.Volume.IntentRecord()
}

func indexes(create, modify *Seq, created, at Seq) {
	*create, *modify = created, at
	if created == 0 {
		*create = at
	}
}

func (i Instance) Indexed(created, at Seq) Record {
	indexes(&i.CreateIndex, &i.ModifyIndex, created, at)
	return i
}

func (t Task) Indexed(created, at Seq) Record {
	indexes(&t.CreateIndex, &t.ModifyIndex, created, at)
	return t
}

func (a Alloc) Indexed(created, at Seq) Record {
	indexes(&a.CreateIndex, &a.ModifyIndex, created, at)
	return a
}

func (v Volume) Indexed(created, at Seq) Record {
	indexes(&v.CreateIndex, &v.ModifyIndex, created, at)
	return v
}

func (c Claim) Indexed(created, at Seq) Record {
	indexes(&c.CreateIndex, &c.ModifyIndex, created, at)
	return c
}

func (a Attachment) Indexed(created, at Seq) Record {
	indexes(&a.CreateIndex, &a.ModifyIndex, created, at)
	return a
}

func (s Staging) Indexed(created, at Seq) Record {
	indexes(&s.CreateIndex, &s.ModifyIndex, created, at)
	return s
}

func (r Ref) Indexed(created, at Seq) Record {
	indexes(&r.CreateIndex, &r.ModifyIndex, created, at)
	return r
}

func (i Intent) Indexed(created, at Seq) Record {
	indexes(&i.CreateIndex, &i.ModifyIndex, created, at)
	return i
}

func (o Operation) Indexed(created, at Seq) Record {
	var modify Seq
	indexes(&o.CreateIndex, &modify, created, at)
	return o
}

func (i Instance) Indexes() (created, modified Seq)   { return i.CreateIndex, i.ModifyIndex }
func (t Task) Indexes() (created, modified Seq)       { return t.CreateIndex, t.ModifyIndex }
func (a Alloc) Indexes() (created, modified Seq)      { return a.CreateIndex, a.ModifyIndex }
func (v Volume) Indexes() (created, modified Seq)     { return v.CreateIndex, v.ModifyIndex }
func (c Claim) Indexes() (created, modified Seq)      { return c.CreateIndex, c.ModifyIndex }
func (a Attachment) Indexes() (created, modified Seq) { return a.CreateIndex, a.ModifyIndex }
func (s Staging) Indexes() (created, modified Seq)    { return s.CreateIndex, s.ModifyIndex }
func (r Ref) Indexes() (created, modified Seq)        { return r.CreateIndex, r.ModifyIndex }
func (i Intent) Indexes() (created, modified Seq)     { return i.CreateIndex, i.ModifyIndex }
func (o Operation) Indexes() (created, modified Seq)  { return o.CreateIndex, o.CreateIndex }
