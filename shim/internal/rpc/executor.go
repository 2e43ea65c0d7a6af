package rpc

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
	"holdfast/shim/internal/cluster"
	"holdfast/shim/internal/intent"
)

// service is a registered service.
type service struct {
	desc *grpc.ServiceDesc
	impl any
}

// recorder registers services at a gRPC server, and keeps them for Server.Serve, which finds them by name.
type recorder struct {
	grpc.ServiceRegistrar
	services map[string]service
}

func (r recorder) RegisterService(desc *grpc.ServiceDesc, impl any) {
	r.services[desc.ServiceName] = service{desc, impl}
	r.ServiceRegistrar.RegisterService(desc, impl)
}

// executorCall says why the executor of a plugin carries out a method. Zero: each node carries it out itself.
type executorCall int

const (
	changes executorCall = iota + 1 // it makes controller calls that change something
	removes                         // it only removes records; if the node of the volume is lost, this node does that
	reads                           // it asks the controller and changes nothing; any node with a controller does that
)

var executorCalls = map[string]executorCall{
	pb.Volumes_Create_FullMethodName:             changes,
	pb.Volumes_Register_FullMethodName:           changes,
	pb.Volumes_Delete_FullMethodName:             changes,
	pb.Volumes_Deregister_FullMethodName:         removes,
	pb.Volumes_Expand_FullMethodName:             changes,
	pb.Volumes_Detach_FullMethodName:             changes,
	pb.VolumeChanges_Modify_FullMethodName:       changes,
	pb.VolumeChanges_Update_FullMethodName:       changes,
	pb.VolumeChanges_Adopt_FullMethodName:        changes,
	pb.VolumeChanges_ListAtPlugin_FullMethodName: reads,
	pb.Plugins_Capacity_FullMethodName:           reads,
	pb.Snapshots_Create_FullMethodName:           changes,
	pb.Snapshots_Delete_FullMethodName:           changes,
	pb.Snapshots_Deregister_FullMethodName:       removes,
	pb.Snapshots_CreateGroup_FullMethodName:      changes,
	pb.Snapshots_DeleteGroup_FullMethodName:      changes,
	pb.Snapshots_DeregisterGroup_FullMethodName:  removes,
	pb.Snapshots_ListAtPlugin_FullMethodName:     reads,
	pb.Snapshots_Blocks_FullMethodName:           reads,
}

// PassToExecutor is an interceptor. If another node makes the plugin's controller calls, that node carries out the
// call. If this node fails to carry out the call, and another node has become the executor meanwhile, that node tries.
func (s *Server) PassToExecutor(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
) (any, error) {
	a := s.active.Load()
	call, is := req.(request)
	if a == nil || a.Cluster == nil || !is || executorCalls[info.FullMethod] == 0 {
		return handle(ctx, req)
	}
	if err := checkSecrets(call); err != nil {
		return nil, wire.Status(err)
	}
	ctx, end := withDeadline(ctx, callLimit)
	defer end()
	if err := a.Cluster.Ready(ctx); err != nil {
		return nil, a.status(ctx, err)
	}
	bound, cancel := a.whileActive(ctx)
	defer cancel()
	for {
		encoded, by, err := a.pass(bound, info.FullMethod, call)
		switch {
		case err == nil:
			return a.reply(ctx, info.FullMethod, encoded)
		case errors.Is(err, cluster.ErrHere):
		case a.Context.Err() != nil:
			return nil, errNotActive
		default:
			return nil, wire.Status(err)
		}
		term, _ := a.Cluster.Executors.Term(ctx, by)
		reply, err := handle(ctx, req)
		if err == nil || bound.Err() != nil || !a.executorMoved(ctx, info.FullMethod, call, term) {
			return reply, err
		}
	}
}

// executorMoved reports whether another node has become the executor of the call since a term. If so, the call may
// succeed there.
func (a *Active) executorMoved(ctx context.Context, method string, req request, since uint64) bool {
	c, elsewhere, err := a.remoteCall(ctx, method, req)
	return err == nil && elsewhere && a.Cluster.Executors.Moved(ctx, c.ExecutedBy(), since)
}

// pass sends the call to the node that makes the plugin's controller calls, and returns that node's reply. by is the
// executor of the call. If an earlier call with the same ID has a stored reply, pass returns the stored one. ErrHere
// means that this node has to carry out the call.
func (a *Active) pass(
	ctx context.Context, method string, req request,
) (reply []byte, by registry.ExecutorKey, err error) {
	c, elsewhere, err := a.remoteCall(ctx, method, req)
	if err != nil {
		return nil, c.ExecutedBy(), err
	}
	repetition := cluster.UntilDone
	if executorCalls[method] != reads {
		repetition = cluster.UntilAnswered
		if reply, found, err := a.Cluster.Remote.Replay(ctx, c); found || err != nil {
			return reply, c.ExecutedBy(), err
		}
	}
	if !elsewhere {
		return nil, c.ExecutedBy(), cluster.ErrHere
	}
	reply, err = a.Cluster.Remote.Call(ctx, c, repetition)
	return reply, c.ExecutedBy(), err
}

// checkSecrets returns an ErrInvalid if the request has a secret's value, because nodes must not share secrets.
func checkSecrets(req request) error {
	var secrets map[string]*pb.Secret
	switch r := req.(type) {
	case interface{ GetSpec() *pb.VolumeSpec }:
		secrets = r.GetSpec().GetSecrets()
	case interface{ GetSpec() *pb.SnapshotSpec }:
		secrets = r.GetSpec().GetSecrets()
	}
	for name, secret := range secrets {
		if secret.GetLiteral() != "" {
			return registry.Invalid("secret %q is given as a value, and nodes of a cluster share what is recorded of "+
				"a volume; give a reference that each node can resolve: { file = PATH }, { env = NAME } or "+
				"{ callback = NAME }", name)
		}
	}
	return nil
}

// remoteCall returns the call for the node that makes the plugin's controller calls. elsewhere is false if this node
// carries out the call itself: no node executes the plugin's calls, this node can ask the plugin itself, the call
// removes a record of a lost node, or no record names the executor, which the call's own handler reports. If the
// request has no operation ID, the call gets a new one.
func (a *Active) remoteCall(
	ctx context.Context, method string, req request,
) (c registry.RemoteCall, elsewhere bool, err error) {
	c.Method, c.ID = method, registry.OperationID(req.GetCall().GetOperationId())
	if c.ID == "" {
		c.ID = registry.OperationID(rand.Text())
	}
	copied := proto.Clone(req).(request)
	if call := copied.GetCall(); call != nil {
		call.Node = ""
	}
	if c.Request, err = (proto.MarshalOptions{Deterministic: true}).Marshal(copied); err != nil {
		return c, false, err
	}
	here, unknown := false, false
	err = registry.Confirm(ctx, a.State, func(v registry.View) error {
		by := executorOf(v, method, req)
		if earlier, found := v.RemoteCall(c.ID); found { // the call may already have deleted its volume
			by = earlier.ExecutedBy()
		}
		if unknown = by == (registry.ExecutorKey{}); unknown {
			// because of the error, Confirm reads again what other nodes have written
			return registry.Errorf(registry.ErrNotFound, "no record names the executor")
		}
		c.Plugin, c.To = by.Plugin, by.Node
		node, known := v.Node(by.Node)
		if by.Node != "" && by.Node != a.Node && !known {
			return registry.Invalid("no node %s has registered in the cluster", by.Node)
		}
		_, alive := v.NodeLease(by.Node)
		here = executorCalls[method] == removes && node.Lost() && !alive
		elsewhere = by.Node != "" || v.Executed(by.Plugin)
		return nil
	})
	if unknown && errors.Is(err, registry.ErrNotFound) {
		return c, false, nil
	}
	if here || err != nil {
		return c, false, err
	}
	if instance, found := a.Table.Find(registry.RoleController, c.Plugin); found {
		healthy := instance.Health.State == registry.Healthy
		local := c.To == "" && instance.Local()
		switch {
		case local || healthy && executorCalls[method] == reads:
			elsewhere = false
		case healthy: // Remote.Call finds the executor, and may return ErrHere
			elsewhere = true
		}
	}
	return c, elsewhere, nil
}

// executorOf returns the executor for the volume, snapshot or plugin of the request; zero: it is not known. A new
// volume is made where its source is. Invalid names are left to the call's own handler.
func executorOf(v registry.View, method string, req request) registry.ExecutorKey {
	ofVolume := func(m *pb.VolumeName) registry.ExecutorKey {
		name, _ := volumeName(m)
		volume, _ := v.Volume(name)
		return volume.ExecutedBy()
	}
	ofSnapshot := func(m *pb.SnapshotName, find func(registry.SnapshotName) (registry.VolumeSnapshot, bool),
	) registry.ExecutorKey {
		name, _ := snapshotName(m)
		snap, _ := find(name)
		return snap.ExecutedBy()
	}
	switch r := req.(type) {
	case interface{ GetSpec() *pb.VolumeSpec }:
		s := r.GetSpec()
		by := ofVolume(&pb.VolumeName{Namespace: s.GetNamespace(), Id: s.GetId()})
		if by.Plugin == "" {
			by = registry.ExecutorKey{Plugin: registry.PluginID(s.GetPluginId()), Node: registry.NodeName(s.GetNode())}
		}
		if by.Node == "" {
			by.Node = cmp.Or(ofVolume(&pb.VolumeName{Namespace: s.GetNamespace(), Id: s.GetCloneId()}).Node,
				ofSnapshot(&pb.SnapshotName{Namespace: s.GetNamespace(), Id: s.GetSnapshotId()}, v.Snapshot).Node)
		}
		return by
	case interface{ GetName() *pb.VolumeName }:
		return ofVolume(r.GetName())
	case *pb.CreateSnapshotRequest:
		spec := r.GetSpec()
		for _, id := range append(spec.GetVolumeIds(), spec.GetVolumeId()) {
			by := ofVolume(&pb.VolumeName{Namespace: spec.GetName().GetNamespace(), Id: id})
			if by.Plugin != "" {
				return by
			}
		}
	case interface{ GetName() *pb.SnapshotName }:
		if method == pb.Snapshots_DeleteGroup_FullMethodName || method == pb.Snapshots_DeregisterGroup_FullMethodName {
			return ofSnapshot(r.GetName(), v.GroupSnapshot)
		}
		return ofSnapshot(r.GetName(), v.Snapshot)
	case *pb.SnapshotBlocksRequest:
		return ofSnapshot(r.GetSnapshot(), v.Snapshot)
	case interface{ GetPlugin() string }:
		return registry.ExecutorKey{Plugin: registry.PluginID(r.GetPlugin())}
	}
	return registry.ExecutorKey{}
}

// reply decodes the reply of another node. It sets the index of this node, whose copy has the records by now.
func (a *Active) reply(ctx context.Context, method string, encoded []byte) (proto.Message, error) {
	d, err := methodOf(method)
	if err != nil {
		return nil, wire.Status(err)
	}
	kind, err := protoregistry.GlobalTypes.FindMessageByName(d.Output().FullName())
	if err != nil {
		return nil, wire.Status(registry.Errorf(registry.ErrInternal, "reply of %s: %w", method, err))
	}
	reply := kind.New()
	if err := proto.Unmarshal(encoded, reply.Interface()); err != nil {
		return nil, wire.Status(registry.Errorf(registry.ErrInternal, "reply of %s: %w", method, err))
	}
	if answer := d.Output().Fields().ByName("answer"); answer != nil {
		reply.Set(answer, protoreflect.ValueOfMessage(a.latest(ctx).ProtoReflect()))
	}
	return reply.Interface(), nil
}

func methodOf(full string) (protoreflect.MethodDescriptor, error) {
	name := protoreflect.FullName(strings.ReplaceAll(strings.TrimPrefix(full, "/"), "/", "."))
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
	if m, is := d.(protoreflect.MethodDescriptor); is && err == nil {
		return m, nil
	}
	return nil, registry.Errorf(registry.ErrUnsupported, "unknown method %s", full)
}

// Serve carries out a call of another node. intent.ErrReleased means that this shim does not answer: it is being
// replaced.
func (s *Server) Serve(ctx context.Context, method string, request []byte) ([]byte, error) {
	reply, err := s.serve(ctx, method, request)
	if errors.Is(err, errNotActive) {
		err = intent.ErrReleased
	}
	return reply, err
}

func (s *Server) serve(ctx context.Context, method string, request []byte) ([]byte, error) {
	if method == pb.Snapshots_Blocks_FullMethodName {
		return s.someBlocks(ctx, request)
	}
	name, call, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	service := s.services[name]
	if service.desc == nil {
		return nil, wire.Status(registry.Errorf(registry.ErrUnsupported, "unknown method %s", method))
	}
	for _, m := range service.desc.Methods {
		if m.MethodName != call {
			continue
		}
		reply, err := m.Handler(service.impl, ctx, func(into any) error {
			return proto.Unmarshal(request, into.(proto.Message))
		}, nil)
		if err != nil {
			return nil, err
		}
		return proto.Marshal(reply.(proto.Message))
	}
	return nil, wire.Status(registry.Errorf(registry.ErrUnsupported, "unknown method %s", method))
}

// Limits of one answer for another node. That node waits for an answer for callLimit at most.
const (
	maxRanges = 20_000
	partTime  = time.Minute // an answer with a block is not continued after that
)

// someBlocks returns the beginning of a list of blocks. If no block follows, NextOffset is the offset of the request.
func (s *Server) someBlocks(ctx context.Context, encoded []byte) ([]byte, error) {
	var req pb.SnapshotBlocksRequest
	if err := proto.Unmarshal(encoded, &req); err != nil {
		return nil, wire.Status(registry.Invalid("request for blocks: %w", err))
	}
	var all *pb.SnapshotBlocksReply
	full, began := false, time.Now()
	err := (&snapshots{s: s}).blocks(ctx, &req, func(part *pb.SnapshotBlocksReply) error {
		if all == nil {
			all = part
		} else {
			all.Ranges, all.NextOffset = append(all.Ranges, part.GetRanges()...), part.GetNextOffset()
		}
		if full = len(all.GetRanges()) >= maxRanges || time.Since(began) > partTime; full {
			return errors.New("the answer is full") // ends the list
		}
		return nil
	})
	if err != nil && !full {
		return nil, err
	}
	if all == nil {
		all = &pb.SnapshotBlocksReply{NextOffset: req.GetStartingOffset()}
	}
	return proto.Marshal(all)
}

// passBlocks sends the blocks that another node lists. ask gets the next part of the list from that node, within
// callLimit if ctx has no deadline. If ask returns ErrHere, this node has to list the blocks from the starting offset
// of rest.
func passBlocks(
	ctx context.Context, req *pb.SnapshotBlocksRequest,
	ask func(context.Context, *pb.SnapshotBlocksRequest) ([]byte, error), send func(*pb.SnapshotBlocksReply) error,
) (rest *pb.SnapshotBlocksRequest, err error) {
	rest = proto.CloneOf(req)
	for {
		limited, end := withDeadline(ctx, callLimit)
		encoded, err := ask(limited, rest)
		end()
		if err != nil {
			return rest, err
		}
		var part pb.SnapshotBlocksReply
		if err := proto.Unmarshal(encoded, &part); err != nil {
			return rest, registry.Errorf(registry.ErrInternal, "list of blocks: %w", err)
		}
		if part.GetNextOffset() == rest.GetStartingOffset() {
			return rest, nil
		}
		rest.StartingOffset = part.GetNextOffset()
		if err := send(&part); err != nil {
			return rest, err
		}
	}
}
