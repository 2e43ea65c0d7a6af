package registry

import (
	"fmt"
	"slices"
)

// LateCall is a call that a former executor has begun, that has ended at another node, and that may still run at the
// plugin of the former one. Until that node has said that it does not, no other call is sent for the same volume or
// snapshot. The record counts while its node is in Executor.Former, so that one commit ends any number of them.
type LateCall struct {
	Plugin PluginID `json:"plugin"`
	For    string   `json:"for"` // the name of the volume or snapshot
	Node   NodeName `json:"node"`
	RPC    RPC      `json:"rpc"`
	Hash   string   `json:"hash,omitempty"`   // of the request
	Failed bool     `json:"failed,omitempty"` // the call has certainly failed at a later executor
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

// LateCallOf returns an open call as a former executor can repeat it.
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

// PastLateCalls lists the keys of late calls that do not count any more.
func (v View) PastLateCalls(e Executor) (keys []Key) {
	for path := range v.Paths(BucketLateCalls, PathOf(e.Plugin)) {
		if !slices.Contains(e.Former, lateNode(path)) {
			keys = append(keys, Key{BucketLateCalls, path})
		}
	}
	return keys
}

// Blocks returns the error of a call for a volume or snapshot that has to wait for a former executor, nil if it need not.
func (v View) Blocks(e Executor, what string, rpc RPC, hash string) error {
	if len(e.Former) == 0 {
		return nil
	}
	for _, late := range list[LateCall](v, BucketLateCalls, PathOf(e.Plugin, what), nil) {
		if slices.Contains(e.Former, late.Node) && (late.RPC != rpc || late.Hash != hash) {
			return Errorf(ErrUnavailable, "%s of %s cannot be sent now: %s", rpc, what, MayRunAt(late.Node, late.RPC))
		}
	}
	return nil
}

// MayRunAt describes a call that may still run at a former executor. Other calls for the same volume or snapshot wait
// for its end.
func MayRunAt(n NodeName, rpc RPC) string {
	return fmt.Sprintf("node %s has begun %s, which may still run at its plugin; wait until the plugin there has answered the "+
		"same call once more, or stop the plugin's controller on node %s, or declare the node out of service", n, rpc, n)
}

// Ended returns the change that keeps at which former executors a call may still run, once it has ended elsewhere.
// senders are the nodes that have begun it. It has ended at the holder, whose plugin has answered it.
func (v View) Ended(call LateCall, senders []NodeName) (change Change) {
	if len(senders) == 0 {
		return change
	}
	e, _ := v.Executor(call.Plugin)
	for _, n := range senders {
		if call.Node = n; n != e.Holder && slices.Contains(e.Former, n) && v.Get(call.Key()) == nil {
			change.Put = append(change.Put, call)
		}
	}
	return change
}
