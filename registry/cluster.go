package registry

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Node is a node of a cluster, as it last described itself.
type Node struct {
	Name    NodeName  `json:"name"`
	Version string    `json:"version,omitempty"` // of its shim
	State   NodeState `json:"state"`
	Reason  string    `json:"reason,omitempty"` // of the state, for people
	By      string    `json:"by,omitempty"`     // the person or policy that set the state
	// Epoch counts how often the node was declared out of service or fenced. A node that finds a higher Epoch than it
	// has recorded has lost its claims. It unmounts their volumes before it does anything else.
	Epoch       uint64       `json:"epoch"`
	Fencing     Fencing      `json:"fencing,omitzero"`
	Deadline    time.Time    `json:"deadline,omitzero"` // of NodeDraining: tasks get no grace after it
	Drain       Drain        `json:"drain,omitzero"`    // continues once a lost node is back; zero: none
	Plugins     []NodePlugin `json:"plugins,omitempty"` // by name
	CreateIndex Seq          `json:"create_index"`
	ModifyIndex Seq          `json:"modify_index"`
	Since       time.Time    `json:"since,omitzero"` // of the state
}

func (n Node) Key() Key { return NodeRecord(n.Name) }

// Lost reports whether the node was declared out of service, fenced or forgotten, and is not back yet.
func (n Node) Lost() bool {
	return n.State == NodeOutOfService || n.State == NodeFenced || n.State == NodeForgotten
}

// String describes the state of the node for people.
func (n Node) String() string {
	s := fmt.Sprintf("node %s is %s", n.Name, n.State)
	if n.By != "" {
		s += " by " + n.By
	}
	if n.Reason != "" {
		s += ": " + n.Reason
	}
	return s
}

// Declaration says by whom the state was set, and why, for people.
func (n Node) Declaration() string {
	if n.By == "" {
		return n.Reason
	}
	return strings.TrimSuffix("by "+n.By+": "+n.Reason, ": ")
}

// Drain says by whom a node was drained before it was lost, why, and until when its tasks have grace.
type Drain struct {
	By       string    `json:"by"`
	Reason   string    `json:"reason,omitempty"`
	Deadline time.Time `json:"deadline,omitzero"`
}

// Drains returns the drain of the node, if there is one. The drain of a lost node continues when the node is back.
func (n Node) Drains() (Drain, bool) {
	if n.State == NodeDraining {
		return Drain{By: n.By, Reason: n.Reason, Deadline: n.Deadline}, true
	}
	return n.Drain, n.Drain.By != ""
}

// Fencing names the node that fences a lost node, and counts its failed tries. The zero value means that no node does.
type Fencing struct {
	By     NodeName  `json:"by"`
	Lease  int64     `json:"lease"`            // of By. Once it has ended, another node may fence
	Failed string    `json:"failed,omitempty"` // why the last try has failed
	Tries  uint64    `json:"tries,omitempty"`  // failed tries
	Tried  time.Time `json:"tried,omitzero"`   // the end of the last try
}

// NodeRecord returns the key of a node's record, LeaseRecord that of its lease.
func NodeRecord(n NodeName) Key  { return Key{BucketNodes, pathOf(n)} }
func LeaseRecord(n NodeName) Key { return Key{BucketNodeLeases, pathOf(n)} }

// NodeState says what may be done on behalf of a node. Whether the node is alive is not part of it: see NodeLease.
type NodeState string

const (
	NodeReady        NodeState = "ready"
	NodeDraining     NodeState = "draining"       // gets no new claims
	NodeOutOfService NodeState = "out-of-service" // an operator has declared that nothing runs there
	NodeFenced       NodeState = "fenced"         // the fence callback has succeeded
	// NodeForgotten is a node that an operator has removed. Its record stays: if the node comes back after all, it
	// first unmounts what it has. Lists of nodes omit it.
	NodeForgotten NodeState = "forgotten"
	// NodeUnjoined is this node while its cluster has not let it in. No record has this state.
	NodeUnjoined NodeState = "not-joined"
)

// NodePlugin is a CSI plugin on a node.
type NodePlugin struct {
	Plugin     PluginID `json:"plugin"`
	Node       bool     `json:"node,omitempty"`       // a healthy instance serves the node service
	Controller bool     `json:"controller,omitempty"` // a healthy instance serves the controller service
	Local      bool     `json:"local,omitempty"`      // controller_scope = "node"
	// NodeUnhealthy and ControllerUnhealthy: only unhealthy instances serve the service.
	NodeUnhealthy       bool `json:"node_unhealthy,omitempty"`
	ControllerUnhealthy bool `json:"controller_unhealthy,omitempty"`

	Capabilities []Capability `json:"capabilities,omitempty"` // sorted, of the node service and of the plugin
	NodeID       NodeID       `json:"node_id,omitempty"`      // from NodeGetInfo, as the fields below
	Topology     Topology     `json:"topology,omitempty"`
	MaxVolumes   int64        `json:"max_volumes,omitempty"` // 0: no limit
}

// NodeLease exists while the lease of a node in etcd is valid, because the node's shim keeps renewing it. A node
// without a NodeLease is suspect, and keeps its claims.
type NodeLease struct {
	Node        NodeName  `json:"node"`
	Lease       int64     `json:"lease"` // the ID of the lease in etcd; a new one after the node was suspect
	CreateIndex Seq       `json:"create_index"`
	ModifyIndex Seq       `json:"modify_index"`
	Since       time.Time `json:"since,omitzero"`
}

func (l NodeLease) Key() Key { return LeaseRecord(l.Node) }

// Executor names the node that makes the controller calls of a plugin.
type Executor struct {
	Plugin PluginID `json:"plugin"`
	Holder NodeName `json:"holder,omitempty"` // empty: none
	Lease  int64    `json:"lease,omitempty"`  // of the holder
	Term   uint64   `json:"term"`             // counts the holders
	// Former lists nodes that were the holder and have not reported yet that all their calls of that time have ended.
	// The present holder may be one of them. A call that one of them has begun may only be repeated. LateCalls of nodes
	// that are not in Former do not count.
	Former      []NodeName `json:"former,omitempty"`
	CreateIndex Seq        `json:"create_index"`
	ModifyIndex Seq        `json:"modify_index"`
	Since       time.Time  `json:"since,omitzero"`
}

// ExecutorKey says which node makes controller calls: Node, if the plugin has controller_scope = "node", else the
// plugin's Executor.
type ExecutorKey struct {
	Plugin PluginID
	Node   NodeName
}

// ExecutedBy returns which node makes the controller calls for the volume.
func (v Volume) ExecutedBy() ExecutorKey { return ExecutorKey{v.Plugin, v.Node} }

// ExecutedBy returns which node makes the controller calls for the snapshot.
func (s VolumeSnapshot) ExecutedBy() ExecutorKey { return ExecutorKey{s.Plugin, s.Node} }

// StoredOn reports whether the volume is stored on the node: only that node can attach, use and detach it.
func (v View) StoredOn(key VolumeKey, node NodeName) bool {
	volume, _ := v.VolumeByKey(key)
	return node != "" && volume.Node == node
}

// Executed reports whether one node at a time makes the plugin's controller calls. That is so once the plugin has had a
// controller on a node, unless it has controller_scope = "node".
func (v View) Executed(plugin PluginID) bool {
	if _, found := v.Executor(plugin); found || plugin == "" {
		return found
	}
	for _, node := range v.Nodes() {
		for _, p := range node.Plugins {
			if p.Plugin == plugin && p.Controller && !p.Local {
				return true
			}
		}
	}
	return false
}

// Formation says whether the nodes of a cluster have formed it. No claim is granted before that.
type Formation struct {
	Cluster     string    `json:"cluster"`
	Expect      int       `json:"expect"` // the number of nodes that form it; never changes
	Formed      bool      `json:"formed"` // so many nodes have registered; stays true
	CreateIndex Seq       `json:"create_index"`
	ModifyIndex Seq       `json:"modify_index"`
	Since       time.Time `json:"since,omitzero"` // of Formed
}

// Check returns an error if a node that is configured with expect cannot be a member. An expect of 0 is unknown and
// passes.
func (f Formation) Check(expect int) error {
	if f.Expect == expect || f.Expect == 0 || expect == 0 {
		return nil
	}
	return Invalid("cluster %q was created with expect = %d, which cannot be changed, "+
		"and this node is configured with expect = %d: write %d in its cluster block, and restart its agent",
		f.Cluster, f.Expect, expect, f.Expect)
}

func (f Formation) Key() Key { return Key{BucketFormations, pathOf(f.Cluster)} }

// Formation returns the formation of the node's cluster, or the zero value if it is not known yet.
func (v View) Formation() Formation {
	for _, f := range list[Formation](v, BucketFormations, "", nil) {
		return f
	}
	return Formation{}
}

// Unformed says how many of the expected nodes have registered; empty: all have.
func (v View) Unformed() string {
	f := v.Formation()
	if f.Formed {
		return ""
	}
	return fmt.Sprintf("%d of %d nodes of the cluster have registered; volumes can be used once all have",
		len(v.Nodes()), f.Expect)
}

// RemoteCall is a call that one node asks the executor of a plugin to carry out.
type RemoteCall struct {
	ID          OperationID `json:"id"`
	Plugin      PluginID    `json:"plugin"`
	To          NodeName    `json:"to,omitempty"` // node that carries it out; empty: the plugin's executor
	From        NodeName    `json:"from"`
	Method      string      `json:"method"`
	Request     []byte      `json:"request,omitempty"`
	Done        bool        `json:"done,omitempty"` // Reply or Status is the answer
	Reply       []byte      `json:"reply,omitempty"`
	Status      []byte      `json:"status,omitempty"` // of an error: a google.rpc.Status
	CreateIndex Seq         `json:"create_index"`
	ModifyIndex Seq         `json:"modify_index"`
	Since       time.Time   `json:"since,omitzero"`
}

// ExecutedBy returns which node carries out the call.
func (c RemoteCall) ExecutedBy() ExecutorKey { return ExecutorKey{c.Plugin, c.To} }

// RemoteCallRecord returns the key of a RemoteCall.
func RemoteCallRecord(id OperationID) Key { return Key{BucketRemoteCalls, pathOf(id)} }

func (c RemoteCall) Key() Key { return RemoteCallRecord(c.ID) }

func (v View) RemoteCalls() []RemoteCall { return list[RemoteCall](v, BucketRemoteCalls, "", nil) }
func (v View) RemoteCall(id OperationID) (RemoteCall, bool) {
	return one[RemoteCall](v, RemoteCallRecord(id))
}

// ExecutorRecord returns the key of a plugin's executor.
func ExecutorRecord(p PluginID) Key { return Key{BucketExecutors, pathOf(p)} }

func (e Executor) Key() Key { return ExecutorRecord(e.Plugin) }

// Held reports whether the holder still has the lease with which it became the executor.
func (v View) Held(e Executor) bool {
	lease, alive := one[NodeLease](v, LeaseRecord(e.Holder))
	return e.Holder != "" && alive && lease.Lease == e.Lease
}

func (v View) Node(n NodeName) (Node, bool)           { return one[Node](v, NodeRecord(n)) }
func (v View) NodeLease(n NodeName) (NodeLease, bool) { return one[NodeLease](v, LeaseRecord(n)) }
func (v View) Executor(p PluginID) (Executor, bool)   { return one[Executor](v, ExecutorRecord(p)) }
func (v View) Executors() []Executor                  { return list[Executor](v, BucketExecutors, "", nil) }

// Nodes lists the nodes of the cluster by name, without those that were forgotten.
func (v View) Nodes() []Node {
	return slices.DeleteFunc(list[Node](v, BucketNodes, "", nil), func(n Node) bool { return n.State == NodeForgotten })
}

// Taken returns the record with the node by as the holder. The previous holder becomes a former one.
func (e Executor) Taken(by NodeName, lease int64, at time.Time) Executor {
	if e.Holder != by {
		e = e.withHolderAsFormer()
	}
	e.Holder, e.Lease, e.Term, e.Since = by, lease, e.Term+1, at
	return e
}

// Dropped returns the record after the holder has become a former one, because it cannot send at the moment.
func (e Executor) Dropped(at time.Time) Executor {
	e = e.withHolderAsFormer()
	e.Holder, e.Lease, e.Since = "", 0, at
	return e
}

// withHolderAsFormer returns the record with the holder, if there is one, among the former ones. It stays the holder.
func (e Executor) withHolderAsFormer() Executor {
	if e.Holder != "" && !slices.Contains(e.Former, e.Holder) {
		e.Former = append(slices.Clone(e.Former), e.Holder)
	}
	return e
}

// Left returns the record after node n has stopped being the executor and all its calls have ended.
func (e Executor) Left(n NodeName, at time.Time) Executor {
	if e.Holder == n {
		e.Holder, e.Lease, e.Since = "", 0, at
	}
	return e.Settled(n)
}

// Settled returns the record after the former holder n has reported that all its earlier calls have ended.
func (e Executor) Settled(n NodeName) Executor {
	e.Former = slices.DeleteFunc(slices.Clone(e.Former), func(f NodeName) bool { return f == n })
	return e
}

func (e Executor) String() string {
	if e.Holder == "" {
		return fmt.Sprintf("plugin %s has no executor", e.Plugin)
	}
	return fmt.Sprintf("node %s is the executor of plugin %s (since %s)", e.Holder, e.Plugin,
		e.Since.UTC().Format(time.RFC3339))
}
