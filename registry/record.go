package registry

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"reflect"
	"strings"
)

// Record is a value that a State keeps. Its Go type and its bucket are in RecordTypes.
type Record interface{ Key() Key }

// Bucket is the name of a set of records of one type, or of an index of them.
type Bucket string

const (
	BucketInstances      Bucket = "instances"
	BucketTasks          Bucket = "tasks"
	BucketAllocs         Bucket = "allocs"
	BucketVolumes        Bucket = "volumes"
	BucketInlineVolumes  Bucket = "inline_volumes"
	BucketClaims         Bucket = "claims"
	BucketAttachments    Bucket = "attachments"
	BucketStagings       Bucket = "stagings"
	BucketRefs           Bucket = "refs"
	BucketIntents        Bucket = "intents"
	BucketNodeIntents    Bucket = "node_intents"
	BucketRequests       Bucket = "requests"
	BucketSnapshots      Bucket = "snapshots"
	BucketGroupSnapshots Bucket = "group_snapshots"
	BucketEndpointUses   Bucket = "endpoint_uses"
	BucketDeregistered   Bucket = "deregistered_volumes"
	BucketCopies         Bucket = "copies"
	BucketNodes          Bucket = "nodes"
	BucketNodeLeases     Bucket = "node_leases"
	BucketExecutors      Bucket = "executors"
	BucketLateCalls      Bucket = "late_calls"
	BucketRemoteCalls    Bucket = "remote_calls"
	BucketFormations     Bucket = "formations"
)

// RecordType describes the records of one bucket.
type RecordType struct {
	Bucket Bucket
	Owner  string // package of the shim that writes the records
	Shared bool   // the nodes of a cluster share the records; else each belongs to one node
	// Release means that a release of volumes adds such records, so they are stored even if the disk is full.
	Release bool
	Path    []string // the parts of a key's path
	Indexes []Index
	GoType  reflect.Type // has the field CreateIndex, and ModifyIndex unless it is Operation
}

// RecordTypes describes every bucket of records, in the order of Buckets.
var RecordTypes = []RecordType{
	{Bucket: BucketInstances, Owner: "task", Path: []string{"role", "plugin", "alloc", "task"},
		GoType: reflect.TypeFor[Instance]()},
	{Bucket: BucketTasks, Owner: "task", Path: []string{"alloc", "task"}, GoType: reflect.TypeFor[Task]()},
	{Bucket: BucketAllocs, Owner: "node", Path: []string{"alloc"}, GoType: reflect.TypeFor[Alloc]()},
	{Bucket: BucketVolumes, Owner: "controller", Shared: true, Path: []string{"namespace", "volume"},
		Indexes: volumeIndexes, GoType: reflect.TypeFor[Volume]()},
	{Bucket: BucketInlineVolumes, Owner: "node", Path: []string{"namespace", "volume"},
		Indexes: volumeIndexes, GoType: reflect.TypeFor[Volume]()},
	{Bucket: BucketClaims, Owner: "controller", Shared: true,
		Path: []string{"plugin", "external id", "alloc", "request"}, GoType: reflect.TypeFor[Claim]()},
	{Bucket: BucketAttachments, Owner: "controller", Shared: true, Path: []string{"plugin", "external id", "node"},
		GoType: reflect.TypeFor[Attachment]()},
	{Bucket: BucketStagings, Owner: "node", Path: []string{"plugin", "external id"},
		GoType: reflect.TypeFor[Staging]()},
	{Bucket: BucketRefs, Owner: "node", Path: []string{"plugin", "external id", "alloc", "request"},
		GoType: reflect.TypeFor[Ref]()},
	{Bucket: BucketIntents, Owner: "intent", Shared: true, Release: true, Path: []string{"plugin", "external id"},
		GoType: reflect.TypeFor[Intent]()},
	{Bucket: BucketNodeIntents, Owner: "intent", Release: true, Path: []string{"plugin", "external id"},
		GoType: reflect.TypeFor[Intent]()},
	{Bucket: BucketSnapshots, Owner: "controller", Shared: true, Path: []string{"namespace", "snapshot"},
		GoType: reflect.TypeFor[VolumeSnapshot]()},
	{Bucket: BucketGroupSnapshots, Owner: "controller", Shared: true, Path: []string{"namespace", "group snapshot"},
		GoType: reflect.TypeFor[VolumeSnapshot]()},
	{Bucket: BucketEndpointUses, Owner: "endpoint", Shared: true,
		Path: []string{"plugin", "external id", "node", "call", "target"}, GoType: reflect.TypeFor[EndpointUse]()},
	{Bucket: BucketDeregistered, Owner: "controller", Shared: true, Path: []string{"plugin", "external id"},
		GoType: reflect.TypeFor[Deregistered]()},
	{Bucket: BucketNodes, Owner: "cluster", Shared: true, Path: []string{"node"}, GoType: reflect.TypeFor[Node]()},
	{Bucket: BucketNodeLeases, Owner: "cluster", Shared: true, Path: []string{"node"},
		GoType: reflect.TypeFor[NodeLease]()},
	{Bucket: BucketExecutors, Owner: "cluster", Shared: true, Path: []string{"plugin"},
		GoType: reflect.TypeFor[Executor]()},
	{Bucket: BucketLateCalls, Owner: "intent", Shared: true, Release: true,
		Path:   []string{"plugin", "volume or snapshot", "node", "call", "hash of the request"},
		GoType: reflect.TypeFor[LateCall]()},
	{Bucket: BucketRemoteCalls, Owner: "cluster", Shared: true, Path: []string{"operation"},
		GoType: reflect.TypeFor[RemoteCall]()},
	{Bucket: BucketFormations, Owner: "cluster", Shared: true, Path: []string{"cluster"},
		GoType: reflect.TypeFor[Formation]()},
	{Bucket: BucketCopies, Owner: "cluster", Shared: true, Path: []string{"cluster"}, GoType: reflect.TypeFor[Copy]()},
	{Bucket: BucketRequests, Owner: "rpc", Release: true, Path: []string{"operation"},
		Indexes: []Index{requestsByIndex}, GoType: reflect.TypeFor[Operation]()},
}

// Index is a set of keys derived from records. It finds a record by a field that is not in its key. An entry's path is
// a prefix followed by the path of the record.
type Index struct {
	Bucket Bucket
	Path   []string // the parts of an entry's path before that of the record
	// Prefix returns the prefix of a record's entry; empty: the record has none.
	Prefix func(Record) string
}

var (
	volumesByKey = Index{"volumes_by_key", []string{"plugin", "external id"}, func(r Record) string {
		v := r.(Volume)
		if v.External == "" { // its plugin has not named it yet
			return ""
		}
		return v.VolumeKey().path()
	}}
	volumesByName = Index{"volumes_by_name", []string{"plugin", "name, its first 128 bytes"}, func(r Record) string {
		v := r.(Volume)
		if !v.Created {
			return ""
		}
		return namePrefix(v.Plugin, v.Name)
	}}
	requestsByIndex = Index{RequestsByIndex, []string{"create index, 8 bytes"}, func(r Record) string {
		return NumberPath(r.(Operation).CreateIndex)
	}}
	volumeIndexes = []Index{volumesByKey, volumesByName}
)

// RequestsByIndex is the index of operations by age, the oldest first.
const RequestsByIndex Bucket = "requests_by_index"

// namePrefix returns the prefix in volumesByName. It truncates a name that is longer than CSI allows ("Size Limits"),
// so readers compare the whole name.
func namePrefix(plugin PluginID, name string) string {
	return pathOf(plugin, name[:min(len(name), MaxID)])
}

// Buckets lists the buckets of records.
var Buckets = func() (all []Bucket) {
	for _, t := range RecordTypes {
		all = append(all, t.Bucket)
	}
	return all
}()

// Indexes lists the indexes of all record types.
var Indexes = []Index{volumesByKey, volumesByName, requestsByIndex}

var typeOfBucket = func() map[Bucket]*RecordType {
	types := map[Bucket]*RecordType{}
	for i := range RecordTypes {
		types[RecordTypes[i].Bucket] = &RecordTypes[i]
	}
	return types
}()

// Type returns the type of the bucket's records, or nil if the bucket holds none.
func (b Bucket) Type() *RecordType { return typeOfBucket[b] }

// Shared reports whether the nodes of a cluster share the records of the bucket. Records of any other bucket belong to
// one node.
func (b Bucket) Shared() bool { t := b.Type(); return t != nil && t.Shared }

// Decode decodes the JSON of a record.
func (t *RecordType) Decode(text []byte) (Record, error) {
	r := reflect.New(t.GoType)
	err := json.Unmarshal(text, r.Interface())
	return r.Elem().Interface().(Record), err
}

// indexFields returns the fields CreateIndex and ModifyIndex of a record. An Operation has no ModifyIndex, because it
// keeps its CreateIndex when it is answered.
func indexFields(record reflect.Value) (create, modify reflect.Value) {
	create = record.FieldByName("CreateIndex")
	if modify = record.FieldByName("ModifyIndex"); !modify.IsValid() {
		modify = create
	}
	return create, modify
}

// IndexesOf returns the CreateIndex and ModifyIndex of a record; 0 if r is nil.
func IndexesOf(r Record) (created, modified Seq) {
	if r == nil {
		return 0, 0
	}
	create, modify := indexFields(reflect.ValueOf(r))
	return Seq(create.Uint()), Seq(modify.Uint())
}

// Indexed returns r with ModifyIndex set to at, and CreateIndex set to created, or to at if created is 0.
func Indexed(r Record, created, at Seq) Record {
	indexed := reflect.New(reflect.TypeOf(r)).Elem()
	indexed.Set(reflect.ValueOf(r))
	create, modify := indexFields(indexed)
	modify.SetUint(uint64(at))
	create.SetUint(uint64(cmp.Or(created, at)))
	return indexed.Interface().(Record)
}

// IndexKeys returns the keys of a record's index entries.
func IndexKeys(r Record) (keys []Key) {
	if r == nil {
		return nil
	}
	k := r.Key()
	for _, x := range k.Bucket.Type().Indexes {
		if prefix := x.Prefix(r); prefix != "" {
			keys = append(keys, Key{x.Bucket, prefix + k.Path})
		}
	}
	return keys
}

// Key names a record or an index entry. Length prefixes in its path keep the keys of different ids different, and sort
// keys with the same first ids next to each other.
type Key struct {
	Bucket Bucket
	Path   string
}

// maxPath bounds Key.Path, in bytes: bbolt accepts no longer key.
const maxPath = 32768

// check returns an error if no record can have the key.
func (k Key) check() error {
	if k.Bucket.Type() == nil || k.Path == "" || len(k.Path) > maxPath {
		return Errorf(ErrInternal, "no record can have the key %s %.200q", k.Bucket, k.Path)
	}
	return nil
}

const (
	// MaxShared bounds the shared records and index entries that a change may write, as a transaction of etcd has at
	// most 128 operations. A change with a Copy is not written to etcd and may have more.
	MaxShared = 120
	// Batch is how many shared records without indexes one decision of EnsureAll writes at most.
	Batch = 100
)

// operations returns how many keys a change of the record may write: itself, and its old and new index entries.
func (k Key) operations() int {
	if t := k.Bucket.Type(); t != nil {
		return 1 + 2*len(t.Indexes)
	}
	return 1
}

// Check returns an ErrInternal if no State can store the change. Such a change has an impossible key, too many shared
// records for one transaction, or both shared records and records of one node. A cluster stores these in different
// places.
func (c Change) Check() error {
	for _, k := range c.Keys() {
		if err := k.check(); err != nil {
			return err
		}
	}
	for _, r := range c.Put {
		for _, k := range IndexKeys(r) {
			if len(k.Path) > maxPath {
				return Errorf(ErrInternal, "%s %.200q is too long for %s", r.Key().Bucket, r.Key().Path, k.Bucket)
			}
		}
	}
	if n, bucket := c.sharedOperations(); n > MaxShared {
		return Errorf(ErrInternal, "commit writes %d shared records with index entries, but at most %d fit; "+
			"the last one is in %s: decide about some of them at a time, as EnsureAll does", n, MaxShared, bucket)
	}
	if c.Mixed() {
		var buckets []string
		for _, k := range c.Keys() {
			buckets = append(buckets, string(k.Bucket))
		}
		return Errorf(ErrInternal, "commit mixes shared and node records: %s", strings.Join(buckets, ", "))
	}
	return nil
}

// sharedOperations returns how many shared records and index entries the change may write, and the bucket of the last
// record. It returns 0 for a change with a Copy.
func (c Change) sharedOperations() (n int, last Bucket) {
	for _, k := range c.Keys() {
		switch {
		case k.Bucket == BucketCopies:
			return 0, ""
		case k.Bucket.Shared():
			n, last = n+k.operations(), k.Bucket
		}
	}
	return n, last
}

// pathOf encodes ids into a key's path, each prefixed by its length as two big-endian bytes.
func pathOf[T ~string](first T, rest ...string) string {
	path := appendPart(nil, string(first))
	for _, part := range rest {
		path = appendPart(path, part)
	}
	return string(path)
}

func appendPart(path []byte, part string) []byte {
	return append(append(path, byte(len(part)>>8), byte(len(part))), part...)
}

// partsOf decodes a path made by pathOf. It returns nil for any other path.
func partsOf(path string) (parts []string) {
	for path != "" {
		if len(path) < 2 || len(path) < 2+int(path[0])<<8+int(path[1]) {
			return nil
		}
		end := 2 + int(path[0])<<8 + int(path[1])
		parts, path = append(parts, path[2:end]), path[end:]
	}
	return parts
}

// NumberPath returns a path of 8 bytes that sorts like its number.
func NumberPath(n Seq) string { return string(binary.BigEndian.AppendUint64(nil, uint64(n))) }

// The keys of records. A Volume, a VolumeSnapshot and an Intent choose one of two buckets.

func (k InstanceKey) Key() Key {
	return Key{BucketInstances, pathOf(k.Role, string(k.Plugin), string(k.Alloc), string(k.Task))}
}
func (k TaskKey) Key() Key    { return Key{BucketTasks, pathOf(k.Alloc, string(k.Task))} }
func (n VolumeName) Key() Key { return Key{BucketVolumes, pathOf(n.Namespace, string(n.ID))} }

// Key returns the key of the attachment's record.
func (k AttachmentKey) Key() Key {
	return Key{BucketAttachments, pathOf(k.Volume.Plugin, string(k.Volume.External), string(k.Node))}
}

// ClaimRecord and RefRecord return the keys of the two records that a claim key names.
func (k ClaimKey) ClaimRecord() Key { return Key{BucketClaims, k.path()} }
func (k ClaimKey) RefRecord() Key   { return Key{BucketRefs, k.path()} }
func (k ClaimKey) path() string {
	return pathOf(k.Volume.Plugin, string(k.Volume.External), string(k.Alloc), string(k.Request))
}

// StagingRecord, IntentRecord and NodeIntentRecord return the keys of a volume's records. A volume has at most one of
// each. IntentRecord is for the intent of a controller call.
func (k VolumeKey) StagingRecord() Key    { return Key{BucketStagings, k.path()} }
func (k VolumeKey) IntentRecord() Key     { return Key{BucketIntents, k.path()} }
func (k VolumeKey) NodeIntentRecord() Key { return Key{BucketNodeIntents, k.path()} }
func (k VolumeKey) path() string          { return pathOf(k.Plugin, string(k.External)) }

// AllocRecord and OperationRecord return the keys of records that one id names.
func AllocRecord(id AllocID) Key         { return Key{BucketAllocs, pathOf(id)} }
func OperationRecord(id OperationID) Key { return Key{BucketRequests, pathOf(id)} }

func (a Alloc) Key() Key      { return AllocRecord(a.ID) }
func (c Claim) Key() Key      { return c.ClaimKey().ClaimRecord() }
func (a Attachment) Key() Key { return a.AttachmentKey().Key() }
func (s Staging) Key() Key    { return s.Volume.StagingRecord() }
func (r Ref) Key() Key        { return r.ClaimKey().RefRecord() }
func (o Operation) Key() Key  { return OperationRecord(o.ID) }

// Copy records that a node is a member of a cluster, and the revision of its copy of the cluster's records. One
// transaction writes the Copy and the copied records.
type Copy struct {
	Cluster  string `json:"cluster"`
	Member   string `json:"member"`   // random ID that distinguishes this node from another of the same name
	Revision int64  `json:"revision"` // of etcd; 0: there is no copy yet
	// Buckets lists the buckets that the copy has. A release that knows other buckets loads the copy anew.
	Buckets []Bucket `json:"buckets,omitempty"`
	// Epoch is the Node.Epoch at which the node last knew that its volumes are its own.
	Epoch       uint64 `json:"epoch,omitempty"`
	CreateIndex Seq    `json:"create_index"`
	ModifyIndex Seq    `json:"modify_index"`
}

// CopyRecord returns the key of the Copy of a cluster.
func CopyRecord(cluster string) Key { return Key{BucketCopies, pathOf(cluster)} }

func (c Copy) Key() Key { return CopyRecord(c.Cluster) }

// Copies returns the node's Copy, as a list of at most one.
func (v View) Copies() []Copy { return list[Copy](v, BucketCopies, "", nil) }

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
