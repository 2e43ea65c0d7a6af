package rpc

import (
	"context"
	"errors"
	"os"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"holdfast/config"
	"holdfast/hooks"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

type control struct {
	pb.UnimplementedControlServer
	s *Server
}

func (c *control) Hello(ctx context.Context, req *pb.HelloRequest) (*pb.HelloReply, error) {
	node, err := registry.ParseNodeName(req.GetNode())
	if err != nil {
		return nil, wire.Status(err)
	}
	h := Hello{
		Node: node, Blocks: req.GetBlocks(), StateDir: req.GetStateDir(), RunDir: req.GetRunDir(),
	}
	for _, op := range req.GetOperations() {
		h.Operations = append(h.Operations, hooks.Operation(op))
	}
	if text := req.GetCluster(); text != "" {
		parsed, diags := config.ParseCluster(config.Source{Name: "cluster", Text: []byte(text)}, config.Options{})
		if err := diags.Err(); err != nil {
			return nil, wire.Status(err)
		}
		h.Cluster = parsed
	}
	st, err := c.s.life.Hello(ctx, h)
	if err != nil {
		return nil, wire.Status(err)
	}
	c.s.hello.Store(&h)
	reply := &pb.HelloReply{
		Answer: statusAnswer(st), ShimVersion: st.Version,
		SchemaOldest: st.SchemaFrom, SchemaNewest: st.SchemaTo, LifecycleState: st.Lifecycle,
	}
	for _, op := range hooks.Operations {
		reply.Operations = append(reply.Operations, string(op))
	}
	return reply, nil
}

func (c *control) Status(context.Context, *pb.StatusRequest) (*pb.StatusReply, error) {
	st := c.s.life.Status()
	return &pb.StatusReply{
		Answer: statusAnswer(st), LifecycleState: st.Lifecycle, Version: st.Version, Pid: int64(st.PID),
		Schema:      st.Schema,
		OpenIntents: uint32(st.OpenIntents), Instances: uint32(st.Instances), Allocs: uint32(st.Allocs),
		ClusterProblem: st.ClusterProblem,
	}, nil
}

func (c *control) Metrics(context.Context, *pb.MetricsRequest) (*pb.MetricsReply, error) {
	reply := &pb.MetricsReply{Answer: statusAnswer(c.s.life.Status())}
	for _, m := range c.s.life.CallMetrics() {
		reply.Calls = append(reply.Calls, wire.CallMetricProto(m))
	}
	return reply, nil
}

func (c *control) Rehearse(ctx context.Context, req *pb.RehearseRequest) (*pb.RehearseReply, error) {
	r, err := c.s.life.Rehearse(ctx, req.GetCopy())
	if err != nil {
		return nil, wire.Status(err)
	}
	return &pb.RehearseReply{
		Answer: revisionAnswer(r.At), Schema: r.Schema, Readable: r.Readable, Instances: uint32(r.Instances),
		Warnings: r.Warnings,
	}, nil
}

func (c *control) Activate(ctx context.Context, req *pb.ActivateRequest) (*pb.ActivateReply, error) {
	h := Handover{
		ReleasedAt: registry.Revision{Generation: registry.Generation(req.GetGeneration()),
			Index: registry.Seq(req.GetIndex())},
		Resume: req.GetResume(),
	}
	if err := c.s.life.Activate(ctx, h); err != nil {
		return nil, wire.Status(err)
	}
	return &pb.ActivateReply{Answer: statusAnswer(c.s.life.Status())}, nil
}

func (c *control) Quiesce(ctx context.Context, _ *pb.QuiesceRequest) (*pb.QuiesceReply, error) {
	open, err := c.s.life.Quiesce(ctx)
	if err != nil {
		return nil, wire.Status(err)
	}
	return &pb.QuiesceReply{Answer: statusAnswer(c.s.life.Status()), OpenIntents: uint32(open)}, nil
}

func (c *control) Release(ctx context.Context, _ *pb.ReleaseRequest) (*pb.ReleaseReply, error) {
	last, err := c.s.life.Release(ctx)
	if err != nil {
		return nil, wire.Status(err)
	}
	return &pb.ReleaseReply{Answer: revisionAnswer(last)}, nil
}

func revisionAnswer(r registry.Revision) *pb.Answer {
	return &pb.Answer{Index: uint64(r.Index), Generation: uint64(r.Generation)}
}

func (c *control) Snapshot(req *pb.SnapshotRequest, stream grpc.ServerStreamingServer[pb.SnapshotChunk]) error {
	first := statusAnswer(c.s.life.Status())
	if path := req.GetFile(); path != "" {
		if err := c.copyTo(stream.Context(), path); err != nil {
			return wire.Status(err)
		}
		return stream.Send(&pb.SnapshotChunk{Answer: first})
	}
	_, err := c.s.life.Snapshot(stream.Context(), func(chunk []byte) error {
		err := stream.Send(&pb.SnapshotChunk{Answer: first, Data: chunk})
		first = nil
		return err
	})
	return wire.Status(err)
}

// copyTo writes a copy of the state to the file at path, which must exist.
func (c *control) copyTo(ctx context.Context, path string) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return registry.Invalid("cannot write a copy of the state: %w", err)
	}
	info, err := file.Stat()
	switch {
	case err != nil:
	case !info.Mode().IsRegular():
		err = registry.Invalid("cannot write a copy of the state: %s is not a regular file", path)
	default:
		_, err = c.s.life.Snapshot(ctx, func(chunk []byte) error {
			_, err := file.Write(chunk)
			return err
		})
	}
	if err = errors.Join(err, file.Close()); errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return registry.Errorf(registry.ErrExhausted, "%v: a swap needs room for a copy of the state; free some there",
			err)
	}
	return err
}

func statusAnswer(st Status) *pb.Answer {
	return &pb.Answer{Index: uint64(st.Index), Generation: uint64(st.Generation)}
}
