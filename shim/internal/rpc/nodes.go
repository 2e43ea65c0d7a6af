package rpc

import (
	"cmp"
	"context"
	"time"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
	"holdfast/shim/internal/cluster"
)

type nodes struct {
	pb.UnimplementedNodesServer
	s *Server
}

// List does not wait for changes of claims and attachments, of which a cluster has many.
func (n *nodes) List(ctx context.Context, req *pb.ListNodesRequest) (*pb.ListNodesReply, error) {
	buckets := []registry.Bucket{
		registry.BucketNodes, registry.BucketNodeLeases, registry.BucketExecutors, registry.BucketInstances,
	}
	key := func(st registry.NodeStatus) string { return string(st.Name) }
	part, next, at, err := list(ctx, n.s, req, buckets, key, wire.NodeProto,
		func(ctx context.Context, a *Active) (all []registry.NodeStatus, at registry.Seq, err error) {
			if err := checkOptional(registry.NodeName(req.GetNode()), registry.ParseNodeName); err != nil {
				return nil, 0, err
			}
			err = a.State.View(ctx, func(v registry.View) error {
				all, at = n.statuses(v, a, registry.NodeName(req.GetNode())), v.Index()
				return nil
			})
			return all, at, err
		})
	return &pb.ListNodesReply{Answer: at, Nodes: part, NextToken: next}, err
}

// statuses returns the status of one node, or of all if only is empty. A node that is in no cluster is alive, and makes
// the calls of the controllers that it has.
func (n *nodes) statuses(v registry.View, a *Active, only registry.NodeName) (all []registry.NodeStatus) {
	records := v.Nodes()
	if a.Cluster == nil {
		records = []registry.Node{n.singleNode(v, a)}
	}
	if len(records) == 0 {
		records = []registry.Node{{Name: a.Node, State: registry.NodeUnjoined}}
	}
	claims, attachments := v.AllClaims(), v.AllAttachments()
	for _, r := range records {
		if only != "" && only != r.Name {
			continue
		}
		st := v.NodeStatus(r, claims, attachments)
		if a.Cluster == nil {
			st.Alive = true
			for i := range st.Plugins {
				st.Plugins[i].Executor = st.Plugins[i].Controller
			}
		} else {
			st.Stale = a.Cluster.State.Problem()
		}
		if st.State == registry.NodeUnjoined {
			st.Stale = cmp.Or(st.Stale, "this node has not joined its cluster yet")
			st.Reason = st.Stale
		}
		all = append(all, st)
	}
	return all
}

// singleNode returns the record of a node that is in no cluster. The record is stored only once the node was drained.
func (n *nodes) singleNode(v registry.View, a *Active) registry.Node {
	r, found := v.Node(a.Node)
	if !found {
		r = registry.Node{Name: a.Node, State: registry.NodeReady}
	}
	r.Version, r.Plugins = n.s.life.Status().Version, cluster.PluginsOf(a.Table.All().Instances)
	return r
}

func (n *nodes) Drain(ctx context.Context, req *pb.DrainNodeRequest) (*pb.NodeReply, error) {
	return n.declare(ctx, "Nodes.Drain", req, func(ctx context.Context, a *Active) (registry.Node, error) {
		deadline := time.Time{}
		if req.GetDeadline() != nil {
			deadline = req.GetDeadline().AsTime()
		}
		name, begin := registry.NodeName(req.GetNode()), !req.GetEnd()
		if a.Cluster != nil {
			return a.Cluster.Drain(ctx, name, begin, deadline, req.GetBy(), req.GetReason())
		}
		return n.drainAlone(ctx, a, registry.Node{Name: name, By: req.GetBy(), Reason: req.GetReason(),
			Deadline: deadline}, begin)
	})
}

// drainAlone begins the drain of a node that is in no cluster, or ends it if begin is false.
func (n *nodes) drainAlone(ctx context.Context, a *Active, want registry.Node, begin bool) (registry.Node, error) {
	if want.Name != a.Node {
		return want, registry.Errorf(registry.ErrNotFound,
			"there is no node %s; this is node %s, which is in no cluster", want.Name, a.Node)
	}
	want.State, want.Since = registry.NodeReady, time.Now()
	kind := registry.EventNodeReady
	if begin {
		want.State, kind = registry.NodeDraining, registry.EventNodeDraining
	}
	_, err := registry.Ensure(ctx, a.State, func(v registry.View) (registry.Change, error) {
		old, found := v.Node(a.Node)
		same := old.State == want.State && old.Deadline.Equal(want.Deadline)
		neverDrained := !found && !begin
		if same || neverDrained {
			want = old
			return registry.Change{}, nil
		}
		return registry.Change{Put: []registry.Record{want}, Events: []registry.Event{{
			Kind: kind, Node: want.Name, Detail: want.Declaration(), At: want.Since}}}, nil
	})
	return want, err
}

func (n *nodes) OutOfService(ctx context.Context, req *pb.OutOfServiceRequest) (*pb.NodeReply, error) {
	return n.declare(ctx, "Nodes.OutOfService", req, func(ctx context.Context, a *Active) (registry.Node, error) {
		if a.Cluster == nil {
			return registry.Node{}, registry.Errorf(registry.ErrUnsupported,
				"this node is in no cluster, so no node can release volumes for another")
		}
		if req.GetConfirm() != req.GetNode() {
			if err := a.Cluster.CheckOutOfService(ctx, registry.NodeName(req.GetNode())); err != nil {
				return registry.Node{}, err
			}
			return registry.Node{}, registry.Errorf(registry.ErrDenied, "node %s is not declared out of service "+
				"without a confirmation: if it still runs, two nodes write to the same volumes; make sure that the "+
				"machine is off, and add --confirm %s", req.GetNode(), req.GetNode())
		}
		return a.Cluster.OutOfService(ctx, registry.NodeName(req.GetNode()), req.GetBy(), req.GetReason())
	})
}

func (n *nodes) Forget(ctx context.Context, req *pb.ForgetNodeRequest) (*pb.ForgetNodeReply, error) {
	reply, err := n.declare(ctx, "Nodes.Forget", req, func(ctx context.Context, a *Active) (registry.Node, error) {
		name := registry.NodeName(req.GetNode())
		if a.Cluster == nil {
			return registry.Node{}, registry.Errorf(registry.ErrUnsupported,
				"this node is in no cluster, so it has no other node")
		}
		return registry.Node{Name: name}, a.Cluster.Forget(ctx, name, req.GetBy(), req.GetReason())
	})
	return &pb.ForgetNodeReply{Answer: reply.GetAnswer()}, err
}

// maxReason bounds the reason for the state of a node, in bytes.
const maxReason = 1024

// declare checks the request of an operator, runs it as a mutating call, and returns the status of the node that run
// returns.
func (n *nodes) declare(ctx context.Context, method string, req interface {
	request
	GetNode() string
	GetBy() string
	GetReason() string
}, run func(context.Context, *Active) (registry.Node, error),
) (*pb.NodeReply, error) {
	_, err := registry.ParseNodeName(req.GetNode())
	if err = cmp.Or(err, checkOperator(req.GetBy())); err == nil && len(req.GetReason()) > maxReason {
		err = registry.Invalid("the reason has %d bytes; %d are allowed", len(req.GetReason()), maxReason)
	}
	if err != nil {
		return nil, wire.Status(err)
	}
	var reply pb.NodeReply
	reply.Answer, err = do(ctx, n.s, method, req, func(ctx context.Context, a *Active, _ registry.Call) error {
		record, err := run(ctx, a)
		if err != nil {
			return err
		}
		return a.State.View(ctx, func(v registry.View) error {
			for _, st := range n.statuses(v, a, record.Name) {
				reply.Node = wire.NodeProto(st)
			}
			return nil
		})
	})
	return &reply, err
}

func (n *nodes) Feasible(ctx context.Context, req *pb.FeasibleNodesRequest) (*pb.FeasibleNodesReply, error) {
	reply := &pb.FeasibleNodesReply{}
	list, answer, err := query(ctx, n.s, req, func(ctx context.Context, a *Active) ([]registry.NodeFeasible, error) {
		g, err := wire.AllocGroup(req.GetAlloc())
		if err != nil {
			return nil, err
		}
		list, at, err := a.Allocs.FeasibleNodes(ctx, g)
		reply.Index = uint64(at)
		return list, err
	})
	if err != nil {
		return nil, err
	}
	reply.Answer = answer
	for _, f := range list {
		reply.Nodes = append(reply.Nodes, wire.NodeFeasibleProto(f))
	}
	return reply, nil
}
