package host

import (
	"context"

	"google.golang.org/grpc"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
)

// Source is a text with the name that messages call it by.
type Source struct {
	Name string
	Text []byte
}

// ParseOptions are the values of a text's variables.
type ParseOptions struct {
	Variables     map[string]string // by name, as text
	VariableFiles []Source
	Validate      bool // variables without a value are unknown instead of an error
}

// Parse reads a job. The error is an ErrInvalid that lists all that is wrong, a line each, if the text is; then the diagnostics say it in
// data. Diagnostics without an error are warnings.
func (h *Host) Parse(ctx context.Context, src Source, o ParseOptions) (*Job, Diagnostics, error) {
	var reply *pb.ParseReply
	err := h.read(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		reply, err = pb.NewJobsClient(conn).Parse(ctx, &pb.ParseRequest{
			Call: &pb.Call{}, Source: sourceProto(src), Variables: o.Variables, VariableFiles: sourcesProto(o.VariableFiles), Validate: o.Validate,
		})
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	diags := wire.Diagnostics(reply.GetDiagnostics())
	return wire.Job(reply.GetJob()), diags, diags.Err()
}

// ParseVolume reads a volume specification file. Errors are as with Parse.
func (h *Host) ParseVolume(ctx context.Context, src Source, o ParseOptions) (VolumeSpec, Diagnostics, error) {
	var reply *pb.ParseVolumeReply
	err := h.read(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		reply, err = pb.NewVolumesClient(conn).Parse(ctx, &pb.ParseVolumeRequest{
			Call: &pb.Call{}, Source: sourceProto(src), Variables: o.Variables, VariableFiles: sourcesProto(o.VariableFiles), Validate: o.Validate,
		})
		return err
	})
	if err != nil {
		return VolumeSpec{}, nil, err
	}
	diags := wire.Diagnostics(reply.GetDiagnostics())
	return wire.VolumeSpec(reply.GetSpec()), diags, diags.Err()
}

func sourceProto(s Source) *pb.Source { return &pb.Source{Name: s.Name, Text: s.Text} }

func sourcesProto(list []Source) (out []*pb.Source) {
	for _, s := range list {
		out = append(out, sourceProto(s))
	}
	return out
}
