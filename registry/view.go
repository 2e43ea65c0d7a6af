package registry

import (
	"cmp"
	"iter"
	"slices"
	"strings"
)

// Reader reads one transaction of a State. A record that cannot be decoded ends the transaction with ErrDamaged.
type Reader interface {
	// Index returns the index of the last change.
	Index() Seq
	// Get returns the record of a key, or nil. The record belongs to the caller.
	Get(Key) Record
	// Paths yields, in order, the paths that begin with prefix of the records or index entries in a bucket.
	Paths(b Bucket, prefix string) iter.Seq[string]
	// Events returns up to limit events with a number above after, in order, and the floor. Events up to the floor have
	// been pruned, so a cursor below it has missed some.
	Events(after Seq, limit int) (events []Event, floor Seq)
	// Text returns the JSON of a record, with the fields that this build does not know but the stored record has.
	Text(Record) ([]byte, error)
	// Damaged ends the transaction with an ErrDamaged.
	Damaged(format string, args ...any)
}

// View is the state as one transaction sees it. Lists are in key order. Records belong to the caller.
type View struct{ Reader }

// Aside returns a view for records that a decision reads without depending on them. In a cluster, the commit succeeds
// even if another node changes such a record meanwhile.
func (v View) Aside() View {
	if r, is := v.Reader.(interface{ Aside() Reader }); is {
		return View{r.Aside()}
	}
	return v
}

func one[T Record](v View, k Key) (T, bool) {
	record, found := v.Get(k).(T)
	return record, found
}

// list returns the records whose path begins with prefix and passes. It decodes no others. A nil pass passes all.
func list[T Record](v View, b Bucket, prefix string, pass func(path string) bool) (records []T) {
	for path := range v.Paths(b, prefix) {
		if pass == nil || pass(path) {
			records = append(records, v.Get(Key{b, path}).(T))
		}
	}
	return records
}

func (v View) Instance(k InstanceKey) (Instance, bool) { return one[Instance](v, k.Key()) }

// members returns the instances of one role of a plugin, newest first.
func (v View) members(role Role, id PluginID) (members []*Instance) {
	for _, i := range list[Instance](v, BucketInstances, pathOf(role, string(id)), nil) {
		members = append(members, &i)
	}
	slices.SortFunc(members, compareRank)
	return members
}

// Instances returns the instances of one role of a plugin, newest first.
func (v View) Instances(role Role, id PluginID) []Instance { return copiesOf(v.members(role, id)) }

// ActiveInstance returns the active instance of a plugin in a role: the newest healthy one, or the newest if none is
// healthy.
func (v View) ActiveInstance(role Role, id PluginID) (Instance, bool) {
	return copyOf(activeOf(v.members(role, id)))
}

// AllInstances returns the instances by role, plugin, then newest first.
func (v View) AllInstances() []Instance {
	all := list[Instance](v, BucketInstances, "", nil)
	slices.SortFunc(all, func(a, b Instance) int { return compareInstances(&a, &b) })
	return all
}

func (v View) Task(k TaskKey) (Task, bool) { return one[Task](v, k.Key()) }
func (v View) Tasks() []Task               { return list[Task](v, BucketTasks, "", nil) }

func (v View) Alloc(id AllocID) (Alloc, bool) { return one[Alloc](v, AllocRecord(id)) }
func (v View) Allocs() []Alloc                { return list[Alloc](v, BucketAllocs, "", nil) }

// AllocsWhere returns the allocs that pass.
func (v View) AllocsWhere(pass func(Alloc) bool) []Alloc {
	return slices.DeleteFunc(v.Allocs(), func(a Alloc) bool { return !pass(a) })
}

// Volume returns a volume, inline or not. If an inline volume and another volume have the name, it returns the one that
// is not inline.
func (v View) Volume(n VolumeName) (Volume, bool) { return v.volumeAt(n.Key().Path) }

func (v View) volumeAt(path string) (Volume, bool) {
	if volume, found := one[Volume](v, Key{BucketVolumes, path}); found {
		return volume, true
	}
	return one[Volume](v, Key{BucketInlineVolumes, path})
}

// VolumeByKey returns the volume with the key. If several volumes have it, it returns the first by name.
func (v View) VolumeByKey(k VolumeKey) (Volume, bool) {
	for volume := range v.volumesIn(volumesByKey, k.path()) {
		return volume, true
	}
	return Volume{}, false
}

// VolumesNamed returns the volumes that were created under a name at a plugin's controller (Volume.CreatedAs). It reads
// few others.
func (v View) VolumesNamed(plugin PluginID, name string) (volumes []Volume) {
	for volume := range v.volumesIn(volumesByName, namePrefix(plugin, name)) {
		if volume.CreatedAs(plugin, name) { // else the names only begin alike
			volumes = append(volumes, volume)
		}
	}
	return volumes
}

// volumesIn yields the volumes that have an entry with the prefix in the index.
func (v View) volumesIn(x Index, prefix string) iter.Seq[Volume] {
	return func(yield func(Volume) bool) {
		for path := range v.Paths(x.Bucket, prefix) {
			volume, found := v.volumeAt(path[len(prefix):])
			if !found {
				v.Damaged("%s lists a volume that does not exist: %q", x.Bucket, path)
			}
			if !yield(volume) {
				return
			}
		}
	}
}

// Volumes returns all volumes, inline or not.
func (v View) Volumes() []Volume {
	all := append(list[Volume](v, BucketVolumes, "", nil), list[Volume](v, BucketInlineVolumes, "", nil)...)
	slices.SortStableFunc(all, func(a, b Volume) int { return cmp.Compare(a.Key().Path, b.Key().Path) })
	return all
}

// VolumesOf returns an alloc's inline volumes (Volume.InlineOf). It decodes few others.
func (v View) VolumesOf(id AllocID) []Volume {
	found := list[Volume](v, BucketInlineVolumes, "", func(path string) bool {
		return strings.HasSuffix(path, string(InlineID(id, "")))
	})
	return slices.DeleteFunc(found, func(r Volume) bool { return !r.InlineOf(id) })
}

func (v View) Claims(k VolumeKey) []Claim { return list[Claim](v, BucketClaims, k.path(), nil) }
func (v View) AllClaims() []Claim         { return list[Claim](v, BucketClaims, "", nil) }

// ClaimsAt returns the claims of a plugin's volumes. AttachmentsAt and StagingsAt do the same for other records.
func (v View) ClaimsAt(id PluginID) []Claim {
	return list[Claim](v, BucketClaims, pathOf(id), nil)
}

func (v View) AttachmentsAt(id PluginID) []Attachment {
	return list[Attachment](v, BucketAttachments, pathOf(id), nil)
}

func (v View) StagingsAt(id PluginID) []Staging {
	return list[Staging](v, BucketStagings, pathOf(id), nil)
}

// ClaimsOf returns the claims of an alloc.
func (v View) ClaimsOf(id AllocID) []Claim {
	return list[Claim](v, BucketClaims, "", func(path string) bool {
		parts := partsOf(path)
		return len(parts) == 4 && parts[2] == string(id)
	})
}

func (v View) Attachment(k AttachmentKey) (Attachment, bool) { return one[Attachment](v, k.Key()) }
func (v View) Attachments(k VolumeKey) []Attachment {
	return list[Attachment](v, BucketAttachments, k.path(), nil)
}
func (v View) AllAttachments() []Attachment { return list[Attachment](v, BucketAttachments, "", nil) }

func (v View) Staging(k VolumeKey) (Staging, bool) { return one[Staging](v, k.StagingRecord()) }
func (v View) Stagings() []Staging                 { return list[Staging](v, BucketStagings, "", nil) }

func (v View) Ref(k ClaimKey) (Ref, bool) { return one[Ref](v, k.RefRecord()) }
func (v View) Refs(k VolumeKey) []Ref     { return list[Ref](v, BucketRefs, k.path(), nil) }
func (v View) AllRefs() []Ref             { return list[Ref](v, BucketRefs, "", nil) }

// Intent returns the open controller call of a volume, NodeIntent its open call at this node.
func (v View) Intent(k VolumeKey) (Intent, bool)     { return one[Intent](v, k.IntentRecord()) }
func (v View) NodeIntent(k VolumeKey) (Intent, bool) { return one[Intent](v, k.NodeIntentRecord()) }

// Intents returns all open calls, controller calls first.
func (v View) Intents() []Intent {
	return append(list[Intent](v, BucketIntents, "", nil), list[Intent](v, BucketNodeIntents, "", nil)...)
}

// Snapshot returns a snapshot, also one that belongs to a group snapshot and has no record of its own.
func (v View) Snapshot(n SnapshotName) (VolumeSnapshot, bool) {
	if snap, found := one[VolumeSnapshot](v, n.Key()); found {
		return snap, true
	}
	for _, group := range v.GroupSnapshots() {
		for _, member := range group.snapshots() {
			if member.SnapshotName() == n {
				return member, true
			}
		}
	}
	return VolumeSnapshot{}, false
}

// Snapshots returns all snapshots, also those that belong to a group snapshot.
func (v View) Snapshots() []VolumeSnapshot {
	all := list[VolumeSnapshot](v, BucketSnapshots, "", nil)
	for _, group := range v.GroupSnapshots() {
		all = append(all, group.snapshots()...)
	}
	slices.SortFunc(all, func(a, b VolumeSnapshot) int { return cmp.Compare(a.Key().Path, b.Key().Path) })
	return all
}

func (v View) GroupSnapshot(n SnapshotName) (VolumeSnapshot, bool) {
	return one[VolumeSnapshot](v, n.GroupKey())
}

func (v View) GroupSnapshots() []VolumeSnapshot {
	return list[VolumeSnapshot](v, BucketGroupSnapshots, "", nil)
}

// SnapshotRecords returns the records of snapshots and of group snapshots.
func (v View) SnapshotRecords() []VolumeSnapshot {
	return append(list[VolumeSnapshot](v, BucketSnapshots, "", nil), v.GroupSnapshots()...)
}

// EndpointUsesAt returns how clients of CSI endpoints use volumes of a plugin.
func (v View) EndpointUsesAt(id PluginID) []EndpointUse {
	return list[EndpointUse](v, BucketEndpointUses, pathOf(id), nil)
}

// AllEndpointUses returns the uses of all volumes.
func (v View) AllEndpointUses() []EndpointUse {
	return list[EndpointUse](v, BucketEndpointUses, "", nil)
}

// EndpointUses returns how clients of CSI endpoints use a volume.
func (v View) EndpointUses(k VolumeKey) []EndpointUse {
	return list[EndpointUse](v, BucketEndpointUses, k.path(), nil)
}

// Deregistered returns the record of a volume that Holdfast created and no longer knows.
func (v View) Deregistered(k VolumeKey) (Deregistered, bool) {
	return one[Deregistered](v, k.DeregisteredRecord())
}

// AllDeregistered returns the records of volumes that Holdfast created and no longer knows.
func (v View) AllDeregistered() []Deregistered {
	return list[Deregistered](v, BucketDeregistered, "", nil)
}

func (v View) Operation(id OperationID) (Operation, bool) {
	return one[Operation](v, OperationRecord(id))
}

// OpenIntent returns the open call of a volume: that of its controller, or else that of this node.
func OpenIntent(v View, k VolumeKey) (Intent, bool) {
	if open, found := v.Intent(k); found {
		return open, true
	}
	return v.NodeIntent(k)
}
