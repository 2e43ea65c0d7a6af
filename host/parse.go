package host

import (
	"cmp"
	"context"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
)

// Source is a text, with the name by which diagnostics call it.
type Source struct {
	Name string
	Text []byte
}

// ParseOptions say how to read a text, such as the values of its variables.
type ParseOptions struct {
	Variables     map[string]string // by name, as text
	VariableFiles []Source
	Validate      bool   // variables without a value are unknown instead of an error
	Dir           string // directory of relative paths in file(); empty: they are passed to Config.File as they are
}

// Parse reads a job. If the text is wrong, the error is an ErrInvalid that lists all findings, one per line, and the
// diagnostics have the same as data. Diagnostics without an error are warnings.
func (h *Host) Parse(ctx context.Context, src Source, o ParseOptions) (*Job, Diagnostics, error) {
	reply, err := call(ctx, h, reads, pb.NewJobsClient, pb.JobsClient.Parse, &pb.ParseRequest{
		Call: &pb.Call{}, Source: sourceProto(src), Dir: o.Dir,
		Variables: o.Variables, VariableFiles: convert(o.VariableFiles, sourceProto), Validate: o.Validate,
	})
	diags := wire.Diagnostics(reply.GetDiagnostics())
	return wire.Job(reply.GetJob()), diags, cmp.Or(err, diags.Err())
}

// ParseVolume reads a volume specification file. Errors are as with Parse.
func (h *Host) ParseVolume(ctx context.Context, src Source, o ParseOptions) (VolumeSpec, Diagnostics, error) {
	reply, err := call(ctx, h, reads, pb.NewVolumesClient, pb.VolumesClient.Parse, &pb.ParseVolumeRequest{
		Call: &pb.Call{}, Source: sourceProto(src), Dir: o.Dir,
		Variables: o.Variables, VariableFiles: convert(o.VariableFiles, sourceProto), Validate: o.Validate,
	})
	diags := wire.Diagnostics(reply.GetDiagnostics())
	return wire.VolumeSpec(reply.GetSpec()), diags, cmp.Or(err, diags.Err())
}

func sourceProto(s Source) *pb.Source { return &pb.Source{Name: s.Name, Text: s.Text} }
