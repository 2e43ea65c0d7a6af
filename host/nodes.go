package host

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
)

// NodeQuery selects nodes. The zero value selects all.
type NodeQuery struct {
	Blocking
	Node NodeName
}

// Nodes lists the nodes of the cluster, with their plugins, topology, limits and use, and the index for which the list
// is true. Without a cluster, the list is this node alone. A Blocking query does not wait for changes of the numbers of
// claims and attachments.
func (h *Host) Nodes(ctx context.Context, q NodeQuery) ([]NodeStatus, Seq, error) {
	return pages(q.Blocking, func(p *pb.Page) ([]NodeStatus, *pb.Answer, string, error) {
		reply, err := call(ctx, h, reads, pb.NewNodesClient, pb.NodesClient.List,
			&pb.ListNodesRequest{Call: &pb.Call{}, Page: p, Node: string(q.Node)})
		return convert(reply.GetNodes(), wire.Node), reply.GetAnswer(), reply.GetNextToken(), err
	})
}

// DrainOptions say who drains a node, and how.
type DrainOptions struct {
	By, Reason string    // for people; By is required
	End        bool      // of the drain: the node is ready again
	Deadline   time.Time // after it, the host of the node gives tasks no grace; zero: none
}

// DrainNode begins or ends the drain of a node, and returns the node's status. The node takes no new claims during the
// drain. The host of the node learns of the drain from Nodes, and stops what runs there, users of volumes first and
// plugins last. ErrNotFound: there is no such node. ErrConflict: the node is out of service or fenced.
func (h *Host) DrainNode(ctx context.Context, node NodeName, o DrainOptions) (NodeStatus, error) {
	req := &pb.DrainNodeRequest{Call: mutating(), Node: string(node), End: o.End, By: o.By, Reason: o.Reason}
	if !o.Deadline.IsZero() {
		req.Deadline = timestamppb.New(o.Deadline)
	}
	reply, err := call(ctx, h, writes, pb.NewNodesClient, pb.NodesClient.Drain, req)
	return wire.Node(reply.GetNode()), err
}

// OutOfServiceOptions say who declares a node out of service, and why.
type OutOfServiceOptions struct {
	By, Reason string // for people; By is required
	// Confirm repeats the name of the node. By it the caller states that nothing runs on the node and nothing can start
	// there: two nodes that write to a volume destroy its data.
	Confirm NodeName
}

// NodeOutOfService declares that nothing runs on a node any more, because an operator has made sure of that. The claims
// of the node are released without the node. If the node comes back, it unmounts their volumes before it does anything
// else. ErrNotFound: there is no such node. ErrConflict: the node is alive. ErrDenied: o.Confirm is not the node's
// name. ErrUnsupported: this node is in no cluster.
func (h *Host) NodeOutOfService(ctx context.Context, node NodeName, o OutOfServiceOptions) (NodeStatus, error) {
	reply, err := call(ctx, h, writes, pb.NewNodesClient, pb.NodesClient.OutOfService,
		&pb.OutOfServiceRequest{Call: mutating(), Node: string(node), By: o.By, Reason: o.Reason,
			Confirm: string(o.Confirm)})
	return wire.Node(reply.GetNode()), err
}

// ForgetOptions say who forgets a node, and why.
type ForgetOptions struct{ By, Reason string } // for people; By is required

// ForgetNode removes from Nodes a node that will never come back, and ends its drain. If it comes back after all, it
// unmounts its volumes first, and is listed again. ErrNotFound: there was never such a node. ErrConflict: the node is
// alive, or claims, attachments, volumes or calls depend on it; the error names them. ErrUnsupported: this node is in
// no cluster.
func (h *Host) ForgetNode(ctx context.Context, node NodeName, o ForgetOptions) error {
	_, err := call(ctx, h, writes, pb.NewNodesClient, pb.NodesClient.Forget,
		&pb.ForgetNodeRequest{Call: mutating(), Node: string(node), By: o.By, Reason: o.Reason})
	return err
}

// FeasibleNodes is Feasible for each node of the cluster, from what the nodes have published about themselves. A node
// without reasons can take the alloc. Without a cluster, the list is this node alone.
func (h *Host) FeasibleNodes(ctx context.Context, g AllocGroup) ([]NodeFeasible, Seq, error) {
	reply, err := call(ctx, h, reads, pb.NewNodesClient, pb.NodesClient.Feasible,
		&pb.FeasibleNodesRequest{Call: &pb.Call{}, Alloc: wire.AllocGroupProto(g)})
	return convert(reply.GetNodes(), wire.NodeFeasible), Seq(reply.GetIndex()), err
}
