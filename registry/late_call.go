package registry

import (
	"fmt"
	"iter"
	"slices"
)

// LateCall is a call that a former executor has begun and that may still run at its plugin, although the same call has
// ended at another node or was given up. Until the former executor reports that the call does not run any more, no
// other call is sent for the same volume or snapshot. The record counts only while Node is in Executor.Former, so a
// commit that removes Node from there ends all its late calls.
type LateCall struct {
	Plugin PluginID `json:"plugin"`
	For    string   `json:"for"` // the name of the volume or snapshot
	Node   NodeName `json:"node"`
	RPC    RPC      `json:"rpc"`
	Hash   string   `json:"hash,omitempty"` // of the request
	// Failed: the call has certainly failed at a later executor, or its record was deregistered. A deletion is not
	// repeated then.
	Failed bool `json:"failed,omitempty"`
	// The records as they were while the call was open, from which the former executor repeats it.
	Volume      *Volume         `json:"volume,omitempty"`
	Attachment  *Attachment     `json:"attachment,omitempty"`
	Snapshot    *VolumeSnapshot `json:"snapshot,omitempty"`
	CreateIndex Seq             `json:"create_index"`
	ModifyIndex Seq             `json:"modify_index"`
}

func (l LateCall) Key() Key {
	return Key{BucketLateCalls, pathOf(l.Plugin, l.For, string(l.Node), string(l.RPC), l.Hash)}
}

// lateNode returns the node in the path of a LateCall.
func lateNode(path string) NodeName {
	if parts := partsOf(path); len(parts) == 5 {
		return NodeName(parts[2])
	}
	return ""
}

// Same reports whether two nodes have begun the same call.
func (l LateCall) Same(o LateCall) bool {
	return l.Plugin == o.Plugin && l.For == o.For && l.RPC == o.RPC && l.Hash == o.Hash
}

// LateCallOf returns an open call with the records that a former executor needs to repeat it. Node is not set.
func (v View) LateCallOf(open Intent) LateCall {
	late := LateCall{Plugin: open.Volume.Plugin, For: open.Name.String(), RPC: open.RPC, Hash: open.Hash}
	if volume, found := v.Volume(open.Name); found {
		late.Volume = &volume
	}
	for _, at := range v.Attachments(open.Volume) {
		if at.NodeID == open.Node {
			late.Attachment = &at
		}
	}
	return late
}

// LateCalls lists the late calls that node n has begun at plugin p. It decodes no other records.
func (v View) LateCalls(p PluginID, n NodeName) []LateCall {
	return list[LateCall](v, BucketLateCalls, pathOf(p), func(path string) bool { return lateNode(path) == n })
}

// PastLateCalls lists the keys of late calls that do not count any more.
func (v View) PastLateCalls(e Executor) (keys []Key) {
	for path := range v.Paths(BucketLateCalls, pathOf(e.Plugin)) {
		if !slices.Contains(e.Former, lateNode(path)) {
			keys = append(keys, Key{BucketLateCalls, path})
		}
	}
	return keys
}

// Blocks returns an error if a controller call for a volume has to wait for a call of a former executor.
func (v View) Blocks(e Executor, next Intent) error {
	name := next.Name.String()
	for l := range v.activeLateCalls(e) {
		sameCall := l.RPC == next.RPC && l.Hash == next.Hash
		// A volume without an external ID has only a name. One that was registered again may have another name.
		sameVolume := l.For == name || l.Volume != nil && l.Volume.VolumeKey() == next.Volume
		if sameVolume && !sameCall || excludesSnapshot(next.RPC) && l.takesSnapshotOf(next.Volume) {
			return mayRunError(name, next.RPC, l.Node, l.RPC)
		}
	}
	if len(e.Former) == 0 || !excludesSnapshot(next.RPC) {
		return nil
	}
	// The call of a snapshot that is still being created has no LateCall. The snapshot itself lists its senders.
	for _, snap := range v.Aside().SnapshotRecords() {
		if snap.State == SnapshotCreating && slices.Contains(snap.VolumeKeys(), next.Volume) {
			if at, found := e.FormerAmong(snap.Senders); found {
				return mayRunError(name, next.RPC, at, CreateSnapshotRPC)
			}
		}
	}
	return nil
}

// BlocksSnapshot is Blocks for a call for a snapshot. A call that takes the snapshot also waits for calls that change
// its volumes.
func (v View) BlocksSnapshot(e Executor, next LateCall) error {
	volumes := next.Snapshot.VolumeKeys()
	takes := next.Snapshot.State == SnapshotCreating
	for l := range v.activeLateCalls(e) {
		changesVolume := takes && excludesSnapshot(l.RPC) && l.Volume != nil &&
			slices.Contains(volumes, l.Volume.VolumeKey())
		if changesVolume || l.For == next.For && !l.Same(next) {
			return mayRunError(next.For, next.RPC, l.Node, l.RPC)
		}
	}
	if len(e.Former) == 0 || !takes {
		return nil
	}
	for _, key := range volumes {
		if open, _ := v.Intent(key); excludesSnapshot(open.RPC) {
			if at, found := e.FormerAmong(open.Senders); found {
				return mayRunError(next.For, next.RPC, at, open.RPC)
			}
		}
	}
	return nil
}

// excludesSnapshot reports whether a call must not run while a snapshot of its volume is taken. Attaching and detaching
// may run meanwhile: snapshots are taken of volumes in use.
func excludesSnapshot(rpc RPC) bool { return rpc.Alters() || rpc == DeleteVolumeRPC }

func (l LateCall) takesSnapshotOf(volume VolumeKey) bool {
	return (l.RPC == CreateSnapshotRPC || l.RPC == CreateGroupSnapshotRPC) && l.Snapshot != nil &&
		slices.Contains(l.Snapshot.VolumeKeys(), volume)
}

// FormerAmong returns a former executor among the senders of a call, where it may still run.
func (e Executor) FormerAmong(senders []NodeName) (n NodeName, found bool) {
	for _, n := range senders {
		if n != e.Holder && slices.Contains(e.Former, n) {
			return n, true
		}
	}
	return "", false
}

// activeLateCalls returns the plugin's late calls of nodes in e.Former. It may read them aside (View.Aside): a commit
// that adds a late call of a volume also deletes the open call, and may change the Executor. The decision reads both.
func (v View) activeLateCalls(e Executor) iter.Seq[LateCall] {
	return func(yield func(LateCall) bool) {
		if len(e.Former) == 0 {
			return
		}
		aside := v.Aside()
		for path := range aside.Paths(BucketLateCalls, pathOf(e.Plugin)) {
			if !slices.Contains(e.Former, lateNode(path)) {
				continue
			}
			if l, _ := one[LateCall](aside, Key{BucketLateCalls, path}); !yield(l) {
				return
			}
		}
	}
}

func mayRunError(what string, rpc RPC, at NodeName, begun RPC) error {
	return Errorf(ErrUnavailable, "%s of %s cannot be sent now: %s", rpc, what, MayRunAt(at, begun))
}

// MayRunAt describes a call that may still run at a former executor. Other calls for the same volume or snapshot wait
// for its end.
func MayRunAt(n NodeName, rpc RPC) string {
	return fmt.Sprintf("node %s has begun %s, which may still run at its plugin; "+
		"wait until the plugin there has answered the same call once more, "+
		"or stop the plugin's controller on node %s, or declare the node out of service", n, rpc, n)
}

// Ended returns the change to make when the holder's plugin has answered a call. senders are the nodes where the call
// may run. The change adds a LateCall for each former executor among them.
func (v View) Ended(call LateCall, senders []NodeName) Change {
	e, _ := v.Executor(call.Plugin)
	return v.lateChange(e, call, senders, e.Holder)
}

// GivenUp is Ended for an open call that node by gives up without an answer. If by is not the holder, and the call may
// run at the holder, the holder is added to Former, and stays the holder.
func (v View) GivenUp(call LateCall, senders []NodeName, by NodeName) Change {
	e, _ := v.Executor(call.Plugin)
	if by == e.Holder {
		return v.lateChange(e, call, senders, by)
	}
	var change Change
	if slices.Contains(senders, e.Holder) && !slices.Contains(e.Former, e.Holder) {
		e = e.withHolderAsFormer()
		change.Put = []Record{e}
	}
	return change.And(v.lateChange(e, call, senders, ""))
}

// lateChange returns the change that adds a LateCall for each former executor among senders, except for one node. If
// the same call has ended before with another outcome, the change corrects its LateCalls.
func (v View) lateChange(e Executor, call LateCall, senders []NodeName, except NodeName) (change Change) {
	if len(e.Former) == 0 || len(senders) == 0 {
		return change
	}
	for _, late := range list[LateCall](v, BucketLateCalls, pathOf(call.Plugin, call.For), nil) {
		if late.Same(call) && late.Failed != call.Failed { // such as a refused deletion that has succeeded since
			late.Failed = call.Failed
			change.Put = append(change.Put, late)
		}
	}
	for _, n := range senders {
		if n == except || !slices.Contains(e.Former, n) {
			continue
		}
		call.Node = n
		if n == e.Holder || v.Get(call.Key()) == nil { // the holder may have sent it again since
			change.Put = append(change.Put, call)
		}
	}
	return change
}
