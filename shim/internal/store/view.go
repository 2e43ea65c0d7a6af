package store

import (
	"bytes"
	"cmp"
	"encoding/json"
	"slices"

	bolt "go.etcd.io/bbolt"

	"holdfast/registry"
)

// head holds the numbers of a transaction: the last one used, and the floor up to which events are pruned.
type head struct{ seq, floor registry.Seq }

func readHead(tx *bolt.Tx) *head {
	var h head
	getMeta(tx, metaSeq, &h.seq)
	getMeta(tx, metaFloor, &h.floor)
	return &h
}

// view reads one transaction. A record that cannot be decoded ends the transaction: see damage.
type view struct {
	tx *bolt.Tx
	*head
	forms forms
}

var _ registry.View = view{}

func one[T registry.Record](v view, k registry.Key) (record T, found bool) {
	path := []byte(k.Path)
	value := bucketOf(v.tx, string(k.Bucket)).Get(path)
	if value == nil {
		return record, false
	}
	record, err := recordOf[T](v, k.Bucket, path, value)
	must(err)
	return record, true
}

// anyOf has a function for each bucket that reads one of its records.
var anyOf = map[registry.Bucket]func(view, registry.Key) (registry.Record, bool){
	registry.BucketInstances:     some[registry.Instance],
	registry.BucketTasks:         some[registry.Task],
	registry.BucketAllocs:        some[registry.Alloc],
	registry.BucketVolumes:       some[registry.Volume],
	registry.BucketInlineVolumes: some[registry.Volume],
	registry.BucketClaims:        some[registry.Claim],
	registry.BucketAttachments:   some[registry.Attachment],
	registry.BucketStagings:      some[registry.Staging],
	registry.BucketRefs:          some[registry.Ref],
	registry.BucketIntents:       some[registry.Intent],
	registry.BucketNodeIntents:   some[registry.Intent],
	registry.BucketRequests:      some[registry.Operation],
}

func some[T registry.Record](v view, k registry.Key) (registry.Record, bool) { return one[T](v, k) }

// recordOf decodes a stored value.
func recordOf[T registry.Record](v view, bucket registry.Bucket, path, value []byte) (record T, err error) {
	text, err := unseal(string(bucket), path, value)
	if err == nil {
		err = v.decode(registry.Key{Bucket: bucket, Path: string(path)}, text, &record)
	}
	return record, err
}

// decode decodes the text of a record, whose form is that of the schema.
func (v view) decode(k registry.Key, text json.RawMessage, into any) error {
	text, err := v.forms.read(k.Bucket, text)
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	if err != nil {
		return registry.Errorf(registry.ErrDamaged, "record %s %q cannot be decoded: %w", k.Bucket, k.Path, err)
	}
	return nil
}

// list returns the records whose path begins with prefix and passes, in key order. A nil pass passes all.
func list[T registry.Record](v view, bucket registry.Bucket, prefix string, pass func(path []byte) bool) (records []T) {
	cursor := bucketOf(v.tx, string(bucket)).Cursor()
	for key, value := cursor.Seek([]byte(prefix)); key != nil; key, value = cursor.Next() {
		if !bytes.HasPrefix(key, []byte(prefix)) {
			break
		}
		if pass != nil && !pass(key) {
			continue
		}
		record, err := recordOf[T](v, bucket, key, value)
		must(err)
		records = append(records, record)
	}
	return records
}

// where returns the records of a bucket that pass, in key order.
func where[T registry.Record](v view, bucket registry.Bucket, pass func(T) bool) []T {
	return slices.DeleteFunc(list[T](v, bucket, "", nil), func(r T) bool { return !pass(r) })
}

// part returns the n-th id of a path, or nil if there are fewer.
func part(path []byte, n int) []byte {
	for len(path) >= 2 {
		end := 2 + int(path[0])<<8 + int(path[1])
		if end > len(path) {
			return nil
		}
		if n == 0 {
			return path[2:end]
		}
		path, n = path[end:], n-1
	}
	return nil
}

// ofAlloc passes paths of claims, whose third id is the alloc's.
func ofAlloc(id registry.AllocID) func(path []byte) bool {
	return func(path []byte) bool { return string(part(path, 2)) == string(id) }
}

func (v view) Index() registry.Seq { return v.seq }

func (v view) Instance(k registry.InstanceKey) (registry.Instance, bool) {
	return one[registry.Instance](v, k.Key())
}

func (v view) Instances(role registry.Role, plugin registry.PluginID) []registry.Instance {
	found := list[registry.Instance](v, registry.BucketInstances, registry.PathOf(role, string(plugin)), nil)
	slices.SortFunc(found, registry.CompareRank)
	return found
}

func (v view) AllInstances() []registry.Instance {
	all := list[registry.Instance](v, registry.BucketInstances, "", nil)
	slices.SortFunc(all, func(a, b registry.Instance) int {
		return cmp.Or(cmp.Compare(a.Role, b.Role), cmp.Compare(a.Plugin, b.Plugin), registry.CompareRank(a, b))
	})
	return all
}

func (v view) Task(k registry.TaskKey) (registry.Task, bool) { return one[registry.Task](v, k.Key()) }

func (v view) Tasks() []registry.Task {
	return list[registry.Task](v, registry.BucketTasks, "", nil)
}

func (v view) Alloc(id registry.AllocID) (registry.Alloc, bool) {
	return one[registry.Alloc](v, registry.AllocRecord(id))
}
func (v view) Allocs() []registry.Alloc {
	return list[registry.Alloc](v, registry.BucketAllocs, "", nil)
}

func (v view) AllocsWhere(pass func(registry.Alloc) bool) []registry.Alloc {
	return where(v, registry.BucketAllocs, pass)
}

func (v view) Volume(n registry.VolumeName) (registry.Volume, bool) { return v.volumeAt(n.Key().Path) }

// volumeAt returns the volume at a path in one of the two buckets.
func (v view) volumeAt(path string) (volume registry.Volume, found bool) {
	for _, bucket := range volumeBuckets {
		if volume, found = one[registry.Volume](v, registry.Key{Bucket: bucket, Path: path}); found {
			break
		}
	}
	return volume, found
}

var volumeBuckets = []registry.Bucket{registry.BucketVolumes, registry.BucketInlineVolumes}

// byPath merges volumes of the two buckets, each of which is in order.
func byPath(volumes, inline []registry.Volume) []registry.Volume {
	if len(volumes) == 0 || len(inline) == 0 {
		return append(volumes, inline...)
	}
	all := append(volumes, inline...)
	slices.SortStableFunc(all, func(a, b registry.Volume) int { return cmp.Compare(a.Key().Path, b.Key().Path) })
	return all
}

// VolumeByKey returns the first by name if a volume has two names.
func (v view) VolumeByKey(k registry.VolumeKey) (volume registry.Volume, found bool) {
	prefix := []byte(registry.PathOf(k.Plugin, string(k.External)))
	key, _ := bucketOf(v.tx, bucketVolumeKeys).Cursor().Seek(prefix)
	if k.External == "" || !bytes.HasPrefix(key, prefix) || key == nil {
		return volume, false
	}
	return v.volumeListed(bucketVolumeKeys, key, len(prefix)), true
}

func (v view) VolumesNamed(plugin registry.PluginID, name string) (volumes []registry.Volume) {
	prefix := nameListKey(plugin, name, "")
	cursor := bucketOf(v.tx, bucketVolumeNames).Cursor()
	for key, _ := cursor.Seek(prefix); bytes.HasPrefix(key, prefix); key, _ = cursor.Next() {
		// Otherwise only the beginning of its name is the same
		if volume := v.volumeListed(bucketVolumeNames, key, len(prefix)); volume.CreatedAs(plugin, name) {
			volumes = append(volumes, volume)
		}
	}
	return volumes
}

// volumeListed returns the volume that a list's entry names after a prefix of that length.
func (v view) volumeListed(list string, key []byte, prefix int) registry.Volume {
	volume, found := v.volumeAt(string(key[prefix:]))
	if !found {
		panic(damage{registry.Errorf(registry.ErrDamaged, "%s lists a volume that is not there: %q", list, key)})
	}
	return volume
}

func (v view) Volumes() []registry.Volume {
	return byPath(
		list[registry.Volume](v, registry.BucketVolumes, "", nil),
		list[registry.Volume](v, registry.BucketInlineVolumes, "", nil))
}

func (v view) VolumesWhere(pass func(registry.Volume) bool) []registry.Volume {
	return byPath(where(v, registry.BucketVolumes, pass), where(v, registry.BucketInlineVolumes, pass))
}

// VolumesOf decodes only volumes whose id, the end of the path, is that of an inline volume of the alloc.
func (v view) VolumesOf(id registry.AllocID) []registry.Volume {
	ending := []byte(registry.InlineID(id, ""))
	found := list[registry.Volume](v, registry.BucketInlineVolumes, "", func(path []byte) bool {
		return bytes.HasSuffix(path, ending)
	})
	return slices.DeleteFunc(found, func(r registry.Volume) bool { return !r.InlineOf(id) })
}

func (v view) Claims(k registry.VolumeKey) []registry.Claim {
	return list[registry.Claim](v, registry.BucketClaims, registry.PathOf(k.Plugin, string(k.External)), nil)
}
func (v view) ClaimsOf(id registry.AllocID) []registry.Claim {
	return list[registry.Claim](v, registry.BucketClaims, "", ofAlloc(id))
}
func (v view) AllClaims() []registry.Claim {
	return list[registry.Claim](v, registry.BucketClaims, "", nil)
}

func (v view) Attachment(k registry.AttachmentKey) (registry.Attachment, bool) {
	return one[registry.Attachment](v, k.Key())
}
func (v view) Attachments(k registry.VolumeKey) []registry.Attachment {
	return list[registry.Attachment](v, registry.BucketAttachments, registry.PathOf(k.Plugin, string(k.External)), nil)
}
func (v view) AllAttachments() []registry.Attachment {
	return list[registry.Attachment](v, registry.BucketAttachments, "", nil)
}

func (v view) Staging(k registry.VolumeKey) (registry.Staging, bool) {
	return one[registry.Staging](v, k.StagingRecord())
}
func (v view) Stagings() []registry.Staging {
	return list[registry.Staging](v, registry.BucketStagings, "", nil)
}

func (v view) Refs(k registry.VolumeKey) []registry.Ref {
	return list[registry.Ref](v, registry.BucketRefs, registry.PathOf(k.Plugin, string(k.External)), nil)
}
func (v view) AllRefs() []registry.Ref { return list[registry.Ref](v, registry.BucketRefs, "", nil) }

func (v view) Intent(k registry.VolumeKey) (registry.Intent, bool) {
	return one[registry.Intent](v, k.IntentRecord())
}
func (v view) NodeIntent(k registry.VolumeKey) (registry.Intent, bool) {
	return one[registry.Intent](v, k.NodeIntentRecord())
}
func (v view) Intents() []registry.Intent {
	intents := list[registry.Intent](v, registry.BucketIntents, "", nil)
	return append(intents, list[registry.Intent](v, registry.BucketNodeIntents, "", nil)...)
}

func (v view) Operation(id registry.OperationID) (registry.Operation, bool) {
	return one[registry.Operation](v, registry.OperationRecord(id))
}

func (v view) Events(after registry.Seq, limit int) (events []registry.Event, floor registry.Seq) {
	if after+1 == 0 {
		return nil, v.floor
	}
	cursor := bucketOf(v.tx, bucketEvents).Cursor()
	for key, value := cursor.Seek(numberKey(after + 1)); key != nil && len(events) < limit; key, value = cursor.Next() {
		var e registry.Event
		must(decode(bucketEvents, key, value, &e))
		events = append(events, e)
	}
	return events, v.floor
}
