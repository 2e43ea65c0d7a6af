package rpc

import (
	"context"
	"path/filepath"

	"holdfast/config"
	"holdfast/hooks"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
)

type jobs struct {
	pb.UnimplementedJobsServer
	s *Server
}

// Parse needs no state, so a candidate serves it too.
func (j *jobs) Parse(ctx context.Context, req *pb.ParseRequest) (*pb.ParseReply, error) {
	opts := j.s.options(ctx, req)
	for _, op := range req.GetOperations() {
		opts.Operations = append(opts.Operations, hooks.Operation(op))
	}
	job, diags := config.ParseJob(source(req.GetSource()), opts)
	reply := &pb.ParseReply{Answer: j.s.latest(ctx), Diagnostics: wire.DiagnosticsProto(diags)}
	if diags.Err() == nil {
		reply.Job = wire.JobProto(job)
	}
	return reply, nil
}

func source(m *pb.Source) config.Source { return config.Source{Name: m.GetName(), Text: m.GetText()} }

// parseRequest is a request to parse a job or a volume.
type parseRequest interface {
	GetVariables() map[string]string
	GetVariableFiles() []*pb.Source
	GetValidate() bool
	GetDir() string
}

// options returns the host's variables, blocks and files for one parse.
func (s *Server) options(ctx context.Context, req parseRequest) config.Options {
	opts := config.Options{Variables: req.GetVariables(), UnsetUnknown: req.GetValidate()}
	for _, f := range req.GetVariableFiles() {
		opts.VariableFiles = append(opts.VariableFiles, source(f))
	}
	opts.ReadFile = func(path string) ([]byte, error) {
		if dir := req.GetDir(); dir != "" && !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		return s.callbacks.File(ctx, path)
	}
	if h := s.hello.Load(); h != nil {
		opts.Blocks, opts.Operations = h.Blocks, h.Operations
	}
	return opts
}
