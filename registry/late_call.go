package registry

import (
	"fmt"
	"slices"
)

// LateCall is a call that a node has begun as the executor and that may still run at its plugin, although it has ended
// at another node or was given up. The record counts while Node is in Executor.Former: until that node reports that the
// call does not run any more, no other call is sent for the same volume or snapshot. A commit that removes Node from
// there ends all its late calls. The late calls of the executor itself count once another node has taken over.
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
	return Key{BucketLateCalls, PathOf(l.Plugin, l.For, string(l.Node), string(l.RPC), l.Hash)}
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

// LateCalls lists the late calls of a plugin that a node has begun. It decodes no others.
func (v View) LateCalls(p PluginID, n NodeName) []LateCall {
	return list[LateCall](v, BucketLateCalls, PathOf(p), func(path string) bool { return lateNode(path) == n })
}

// PastLateCalls lists the keys of late calls that cannot count any more.
func (v View) PastLateCalls(e Executor) (keys []Key) {
	for path := range v.Paths(BucketLateCalls, PathOf(e.Plugin)) {
		if n := lateNode(path); n != e.Holder && !slices.Contains(e.Former, n) {
			keys = append(keys, Key{BucketLateCalls, path})
		}
	}
	return keys
}

// Blocks returns an error if a controller call for a volume has to wait for a call of a former executor.
func (v View) Blocks(e Executor, next Intent) error {
	what := next.Name.String()
	other := func(l LateCall) bool { return l.RPC != next.RPC || l.Hash != next.Hash }
	err := v.blockedBy(e, what, other, what, next.RPC)
	if err != nil || !excludesSnapshot(next.RPC) || len(e.Former) == 0 {
		return err
	}
	open, _ := v.Intent(next.Volume)
	if open.RPC == next.RPC && open.Hash == next.Hash && len(open.Senders) > 0 {
		return nil // a call that may run already can be repeated
	}
	// Read aside: calls of former executors began before this executor's term, so no new ones appear. One commit turns
	// such a call into a late call, so the view has it in one form or the other.
	aside := v.Aside()
	for path := range aside.Paths(BucketLateCalls, PathOf(e.Plugin)) {
		if p := partsOf(path); len(p) != 5 || RPC(p[3]) != CreateSnapshotRPC && RPC(p[3]) != CreateGroupSnapshotRPC {
			continue
		}
		late, _ := one[LateCall](aside, Key{BucketLateCalls, path})
		if late.Snapshot != nil && slices.Contains(late.Snapshot.VolumeKeys(), next.Volume) &&
			slices.Contains(e.Former, late.Node) {
			return mayRun(what, next.RPC, late.Node, late.RPC)
		}
	}
	for _, snap := range aside.SnapshotRecords() {
		if snap.State == SnapshotCreating && slices.Contains(snap.VolumeKeys(), next.Volume) {
			if i := slices.IndexFunc(snap.Senders, e.former); i >= 0 {
				return mayRun(what, next.RPC, snap.Senders[i], CreateSnapshotRPC)
			}
		}
	}
	return nil
}

// BlocksSnapshot is Blocks for a call for a snapshot. A call that takes the snapshot also waits for calls that change
// its volumes, unless it may run already.
func (v View) BlocksSnapshot(e Executor, what string, snap VolumeSnapshot, rpc RPC) error {
	err := v.blockedBy(e, what, func(l LateCall) bool { return l.RPC != rpc }, what, rpc)
	if err != nil || snap.State != SnapshotCreating || len(snap.Senders) > 0 || len(e.Former) == 0 {
		return err
	}
	for _, m := range snap.Each() {
		volume := VolumeName{snap.Namespace, m.Volume}.String()
		other := func(l LateCall) bool { return excludesSnapshot(l.RPC) }
		if err := v.blockedBy(e, volume, other, what, rpc); err != nil {
			return err
		}
		if open, _ := v.Intent(VolumeKey{snap.Plugin, m.Source}); excludesSnapshot(open.RPC) {
			if i := slices.IndexFunc(open.Senders, e.former); i >= 0 {
				return mayRun(what, rpc, open.Senders[i], open.RPC)
			}
		}
	}
	return nil
}

// excludesSnapshot reports whether a call must not run while a snapshot of its volume is taken. Attaching and detaching
// may run meanwhile: snapshots are taken of volumes in use.
func excludesSnapshot(rpc RPC) bool { return rpc.Alters() || rpc == DeleteVolumeRPC }

// former reports whether n is a former holder, not the current one. Calls that it has begun may still run.
func (e Executor) former(n NodeName) bool { return n != e.Holder && slices.Contains(e.Former, n) }

// blockedBy returns an error if a late call for the volume or snapshot named late excludes the call rpc. The error
// names the call's own volume or snapshot, what.
func (v View) blockedBy(e Executor, late string, excludes func(LateCall) bool, what string, rpc RPC) error {
	if len(e.Former) == 0 {
		return nil
	}
	for _, l := range list[LateCall](v, BucketLateCalls, PathOf(e.Plugin, late), nil) {
		if slices.Contains(e.Former, l.Node) && excludes(l) {
			return mayRun(what, rpc, l.Node, l.RPC)
		}
	}
	return nil
}

func mayRun(what string, rpc RPC, at NodeName, begun RPC) error {
	return Errorf(ErrUnavailable, "%s of %s cannot be sent now: %s", rpc, what, MayRunAt(at, begun))
}

// MayRunAt describes a call that may still run at a former executor. Other calls for the same volume or snapshot wait
// for its end.
func MayRunAt(n NodeName, rpc RPC) string {
	return fmt.Sprintf("node %s has begun %s, which may still run at its plugin; "+
		"wait until the plugin there has answered the same call once more, "+
		"or stop the plugin's controller on node %s, or declare the node out of service", n, rpc, n)
}

// Ended returns the change to make when the holder's plugin has answered a call. It adds a LateCall for each former
// executor among the call's senders. If the same call has ended before with another outcome, the change corrects its
// LateCalls. The holder's own LateCalls for the volume do not matter any more.
func (v View) Ended(call LateCall, senders []NodeName) Change {
	e, _ := v.Executor(call.Plugin)
	if len(senders) == 0 {
		return Change{}
	}
	change := v.late(e, call, slices.DeleteFunc(slices.Clone(senders), func(n NodeName) bool { return !e.former(n) }))
	if e.Holder == "" || slices.Contains(e.Former, e.Holder) {
		return change
	}
	aside := v.Aside() // only this node, the holder, makes its calls
	for path := range aside.Paths(BucketLateCalls, PathOf(call.Plugin)) {
		if lateNode(path) != e.Holder {
			continue
		}
		if own, _ := one[LateCall](aside, Key{BucketLateCalls, path}); own.For == call.For || own.isOf(call.Volume) {
			change.Delete = append(change.Delete, own.Key())
		}
	}
	return change
}

// GivenUp returns the change to make when an open call is given up that may still run at the plugins of its senders. It
// adds a LateCall for each former executor and for the holder.
func (v View) GivenUp(call LateCall, senders []NodeName) Change {
	e, _ := v.Executor(call.Plugin)
	return v.late(e, call, slices.DeleteFunc(slices.Clone(senders), func(n NodeName) bool {
		return n != e.Holder && !e.former(n)
	}))
}

// late returns the change that adds a LateCall for each of the nodes, and corrects Failed of the existing ones.
func (v View) late(e Executor, call LateCall, at []NodeName) (change Change) {
	if len(e.Former)+len(at) == 0 {
		return change
	}
	for _, late := range list[LateCall](v, BucketLateCalls, PathOf(call.Plugin, call.For), nil) {
		if late.Same(call) && late.Failed != call.Failed { // such as a refused deletion that has succeeded since
			late.Failed = call.Failed
			change.Put = append(change.Put, late)
		}
	}
	for _, n := range at {
		if call.Node = n; v.Get(call.Key()) == nil {
			change.Put = append(change.Put, call)
		}
	}
	return change
}

// isOf reports whether the call takes a snapshot of the volume.
func (l LateCall) isOf(volume *Volume) bool {
	return volume != nil && l.Snapshot != nil && slices.Contains(l.Snapshot.VolumeKeys(), volume.VolumeKey())
}
