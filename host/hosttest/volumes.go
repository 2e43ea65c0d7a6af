package hosttest

import (
	"context"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"time"

	"holdfast/config"
	"holdfast/hooks"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

type jobs struct {
	pb.UnimplementedJobsServer
	p *process
}

// parseRequest is a request to parse a job or a volume file.
type parseRequest interface {
	GetSource() *pb.Source
	GetVariables() map[string]string
	GetVariableFiles() []*pb.Source
	GetValidate() bool
}

func (p *process) parse(req parseRequest) (config.Source, config.Options) {
	source := func(m *pb.Source) config.Source { return config.Source{Name: m.GetName(), Text: m.GetText()} }
	opts := config.Options{Variables: req.GetVariables(), UnsetUnknown: req.GetValidate()}
	for _, f := range req.GetVariableFiles() {
		opts.VariableFiles = append(opts.VariableFiles, source(f))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	opts.Blocks = p.hello.GetBlocks()
	for _, op := range p.hello.GetOperations() {
		opts.Operations = append(opts.Operations, hooks.Operation(op))
	}
	return source(req.GetSource()), opts
}

func (j *jobs) Parse(_ context.Context, req *pb.ParseRequest) (*pb.ParseReply, error) {
	job, diags := config.ParseJob(j.p.parse(req))
	reply := &pb.ParseReply{Answer: j.p.answer(), Diagnostics: wire.DiagnosticsProto(diags)}
	if diags.Err() == nil {
		reply.Job = wire.JobProto(job)
	}
	return reply, nil
}

type volumes struct {
	pb.UnimplementedVolumesServer
	p *process
}

func (l *volumes) Parse(_ context.Context, req *pb.ParseVolumeRequest) (*pb.ParseVolumeReply, error) {
	spec, diags := config.ParseVolume(l.p.parse(req))
	reply := &pb.ParseVolumeReply{Answer: l.p.answer(), Diagnostics: wire.DiagnosticsProto(diags)}
	if diags.Err() == nil && spec != nil {
		reply.Spec = wire.VolumeSpecProto(*spec)
	}
	return reply, nil
}

// Create waits for a healthy controller of the plugin.
func (l *volumes) Create(ctx context.Context, req *pb.CreateVolumeRequest) (*pb.CreateVolumeReply, error) {
	spec := wire.VolumeSpec(req.GetSpec())
	if _, err := l.p.table.Await(ctx, registry.RoleController, spec.Plugin); err != nil {
		return nil, err
	}
	spec.External = registry.ExternalID("vol-" + string(spec.Namespace) + "-" + string(spec.ID))
	volume, err := l.p.addSpec(ctx, registry.Volume{VolumeSpec: spec, Created: true}, registry.EventVolumeCreated)
	return &pb.CreateVolumeReply{Answer: l.p.answer(), Volume: volumeProto(volume)}, err
}

func (l *volumes) Register(ctx context.Context, req *pb.RegisterVolumeRequest) (*pb.RegisterVolumeReply, error) {
	volume, err := l.p.addSpec(ctx, registry.Volume{VolumeSpec: wire.VolumeSpec(req.GetSpec())},
		registry.EventVolumeRegistered)
	return &pb.RegisterVolumeReply{Answer: l.p.answer(), Volume: volumeProto(volume)}, err
}

func volumeProto(v registry.Volume) *pb.Volume {
	return wire.VolumeProto(registry.VolumeStatus{Volume: v})
}

// addSpec is addVolume for a volume file. ErrExists: the volume exists and has another spec.
func (p *process) addSpec(
	ctx context.Context, want registry.Volume, kind registry.EventKind,
) (registry.Volume, error) {
	volume, err := p.addVolume(ctx, want, kind)
	if err == nil && (volume.Created != want.Created || !reflect.DeepEqual(volume.VolumeSpec, want.VolumeSpec)) {
		err = registry.Errorf(registry.ErrExists, "another volume %s exists already; choose another id, or delete or "+
			"deregister that volume first", want.VolumeName())
	}
	return volume, err
}

// addVolume makes the directory of a new volume, and its record. A volume that exists stays as it is.
func (p *process) addVolume(
	ctx context.Context, volume registry.Volume, kind registry.EventKind,
) (registry.Volume, error) {
	volume.State, volume.Capacity, volume.Since = registry.VolumeReady, volume.CapacityMin, time.Now()
	if err := os.MkdirAll(p.volumeDir(volume.VolumeName()), 0o700); err != nil {
		return volume, err
	}
	_, err := p.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		if existing, known := v.Volume(volume.VolumeName()); known {
			volume = existing
			return registry.Change{}, nil
		}
		return registry.Change{Put: []registry.Record{volume}, Events: []registry.Event{volumeEvent(kind, volume)}}, nil
	})
	return volume, err
}

func volumeEvent(kind registry.EventKind, v registry.Volume) registry.Event {
	return registry.Event{
		Kind: kind, Role: registry.RoleController, Plugin: v.Plugin, Volume: v.VolumeName(), External: v.External,
	}
}

// volumeDir returns the directory with the content of a volume.
func (p *process) volumeDir(n registry.VolumeName) string {
	return filepath.Join(p.dir, "volumes", url.PathEscape(string(n.Namespace)), url.PathEscape(string(n.ID)))
}

func (l *volumes) Delete(ctx context.Context, req *pb.DeleteVolumeRequest) (*pb.DeleteVolumeReply, error) {
	err := l.p.deleteVolume(ctx, wire.VolumeName(req.GetName()))
	return &pb.DeleteVolumeReply{Answer: l.p.answer()}, err
}

// deleteVolume removes the record of a volume, and its content.
func (p *process) deleteVolume(ctx context.Context, name registry.VolumeName) error {
	if err := p.removeVolume(ctx, name, registry.EventVolumeDeleted); err != nil {
		return err
	}
	return os.RemoveAll(p.volumeDir(name))
}

func (l *volumes) Deregister(ctx context.Context, req *pb.DeregisterVolumeRequest) (*pb.DeregisterVolumeReply, error) {
	err := l.p.removeVolume(ctx, wire.VolumeName(req.GetName()), registry.EventVolumeDeregistered)
	return &pb.DeregisterVolumeReply{Answer: l.p.answer()}, err
}

// removeVolume removes the record of a volume that no alloc uses.
func (p *process) removeVolume(ctx context.Context, name registry.VolumeName, kind registry.EventKind) error {
	_, err := p.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		volume, known := v.Volume(name)
		if !known {
			return registry.Change{}, registry.Errorf(registry.ErrNotFound, "volume %s not found", name)
		}
		if users := v.Claims(volume.VolumeKey()); len(users) > 0 {
			return registry.Change{}, registry.Errorf(registry.ErrConflict, "volume %s is in use by alloc %s", name,
				users[0].Alloc)
		}
		return registry.Change{Delete: []registry.Key{volume.Key()},
			Events: []registry.Event{volumeEvent(kind, volume)}}, nil
	})
	return err
}

func (l *volumes) List(_ context.Context, req *pb.ListVolumesRequest) (*pb.ListVolumesReply, error) {
	v, reply := l.p.view(), &pb.ListVolumesReply{Answer: l.p.answer()}
	for _, volume := range v.Volumes() {
		if selects(req.GetNamespace(), volume.Namespace) && selects(req.GetId(), volume.ID) &&
			selects(req.GetPlugin(), volume.Plugin) {
			status := registry.VolumeStatus{Volume: volume}
			for _, c := range v.Claims(volume.VolumeKey()) {
				status.Holders = append(status.Holders, registry.Holder{Claim: c, Publish: registry.MarkDone})
			}
			reply.Volumes = append(reply.Volumes, wire.VolumeProto(status))
		}
	}
	return reply, nil
}

type claims struct {
	pb.UnimplementedClaimsServer
	p *process
}

func (l *claims) List(_ context.Context, req *pb.ListClaimsRequest) (*pb.ListClaimsReply, error) {
	reply := &pb.ListClaimsReply{Answer: l.p.answer()}
	for _, c := range l.p.view().AllClaims() {
		if selects(req.GetAlloc(), c.Alloc) && (req.GetVolume() == nil || wire.VolumeName(req.GetVolume()) == c.Name) {
			reply.Claims = append(reply.Claims, wire.ClaimProto(c))
		}
	}
	return reply, nil
}
