package rpc

import (
	"context"
	"errors"
	"slices"

	"holdfast/config"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

type volumes struct {
	pb.UnimplementedVolumesServer
	s *Server
}

func (v *volumes) Parse(ctx context.Context, req *pb.ParseVolumeRequest) (*pb.ParseVolumeReply, error) {
	opts := v.s.options(ctx, req)
	spec, diags := config.ParseVolume(source(req.GetSource()), opts)
	reply := &pb.ParseVolumeReply{Answer: v.s.latest(ctx), Diagnostics: wire.DiagnosticsProto(diags)}
	if diags.Err() == nil && spec != nil {
		reply.Spec = wire.VolumeSpecProto(*spec)
	}
	return reply, nil
}

func (v *volumes) Create(ctx context.Context, req *pb.CreateVolumeRequest) (*pb.CreateVolumeReply, error) {
	volume, at, err := change(ctx, v.s, "Volumes.Create", req, withStoredAnswer(forSpec(req,
		func(ctx context.Context, a *Active, call registry.Call, spec registry.VolumeSpec) (registry.Volume, error) {
			return a.Volumes.Create(ctx, call, spec)
		})))
	return &pb.CreateVolumeReply{Answer: at, Volume: volumeProto(volume)}, err
}

func (v *volumes) Register(ctx context.Context, req *pb.RegisterVolumeRequest) (*pb.RegisterVolumeReply, error) {
	volume, at, err := change(ctx, v.s, "Volumes.Register", req, withStoredAnswer(forSpec(req,
		func(ctx context.Context, a *Active, _ registry.Call, spec registry.VolumeSpec) (registry.Volume, error) {
			return a.Volumes.Register(ctx, spec)
		})))
	return &pb.RegisterVolumeReply{Answer: at, Volume: volumeProto(volume)}, err
}

// forSpec returns run for the volume that a request describes. While run runs, the literal secrets are in files.
func forSpec[T any](
	req interface{ GetSpec() *pb.VolumeSpec },
	run func(context.Context, *Active, registry.Call, registry.VolumeSpec) (T, error),
) func(context.Context, *Active, registry.Call) (T, error) {
	return func(ctx context.Context, a *Active, call registry.Call) (none T, err error) {
		spec, err := checkSpec(wire.VolumeSpec(req.GetSpec()))
		if err != nil {
			return none, err
		}
		spec, release, err := a.Literals.moveToFiles(spec)
		if err != nil {
			return none, err
		}
		defer release()
		return run(ctx, a, call, spec)
	}
}

func (v *volumes) Expand(ctx context.Context, req *pb.ExpandVolumeRequest) (*pb.ExpandVolumeReply, error) {
	volume, at, err := change(ctx, v.s, "Volumes.Expand", req, withStoredAnswer(
		func(ctx context.Context, a *Active, call registry.Call) (registry.Volume, error) {
			name, err := volumeName(req.GetName())
			if err != nil {
				return registry.Volume{}, err
			}
			want := registry.CapacityRange{Required: req.GetRequiredBytes(), Limit: req.GetLimitBytes()}
			return a.Volumes.Expand(ctx, call, name, want)
		}))
	return &pb.ExpandVolumeReply{Answer: at, Volume: volumeProto(volume)}, err
}

func volumeProto(v registry.Volume) *pb.Volume {
	return wire.VolumeProto(registry.VolumeStatus{Volume: v})
}

func (v *volumes) Delete(ctx context.Context, req *pb.DeleteVolumeRequest) (*pb.DeleteVolumeReply, error) {
	at, err := v.remove(ctx, "Volumes.Delete", req, func(
		ctx context.Context, a *Active, call registry.Call, name registry.VolumeName,
	) error {
		return a.Volumes.Delete(ctx, call, name)
	})
	return &pb.DeleteVolumeReply{Answer: at}, err
}

func (v *volumes) Deregister(ctx context.Context, req *pb.DeregisterVolumeRequest) (*pb.DeregisterVolumeReply, error) {
	at, err := v.remove(ctx, "Volumes.Deregister", req, func(
		ctx context.Context, a *Active, _ registry.Call, name registry.VolumeName,
	) error {
		return a.Volumes.Deregister(ctx, name)
	})
	return &pb.DeregisterVolumeReply{Answer: at}, err
}

// remove runs an operation that removes the record of a volume.
func (v *volumes) remove(
	ctx context.Context, method string, req interface {
		request
		GetName() *pb.VolumeName
	}, run func(context.Context, *Active, registry.Call, registry.VolumeName) error,
) (*pb.Answer, error) {
	return do(ctx, v.s, method, req, func(ctx context.Context, a *Active, call registry.Call) error {
		name, err := volumeName(req.GetName())
		if err != nil {
			return err
		}
		return runRemoval(ctx, a, call, volumeIndex(name), func() error { return run(ctx, a, call, name) })
	})
}

// withStoredAnswer returns run, extended to store its answer. run commits records that nodes share, and the answer is a
// record of this node. If a shim dies between the two, a replay finds the volume as requested and gets the same answer.
func withStoredAnswer[T any](
	run func(context.Context, *Active, registry.Call) (T, error),
) func(context.Context, *Active, registry.Call) (T, error) {
	return func(ctx context.Context, a *Active, call registry.Call) (T, error) {
		answer, err := run(ctx, a, call)
		if err == nil {
			err = a.store(ctx, call.Answered(answer))
		}
		return answer, err
	}
}

// createIndexFunc returns the CreateIndex of the record that an operation removes; 0: there is none. If the operation
// removes several records, it returns that of the last one.
type createIndexFunc func(registry.View) registry.Seq

func volumeIndex(name registry.VolumeName) createIndexFunc {
	return func(v registry.View) registry.Seq {
		volume, _ := v.Volume(name)
		return volume.CreateIndex
	}
}

// runRemoval runs an operation that removes a record, and then stores the answer. Before that, it stores the
// CreateIndex of the record. If the shim dies after the removal, a replay does not find that record and succeeds.
// Without the stored index, the replay would fail like a call for an unknown volume.
func runRemoval(ctx context.Context, a *Active, call registry.Call, indexOf createIndexFunc, run func() error) error {
	var stored registry.Operation
	var replay bool
	var created registry.Seq
	err := a.State.View(ctx, func(v registry.View) error {
		created = indexOf(v)
		stored, replay = v.Operation(call.ID)
		return nil
	})
	if err == nil && !replay && created > 0 {
		stored = registry.Operation{ID: call.ID, Method: call.Method, Digest: call.Digest, Removes: created}
		err = a.store(ctx, []registry.Record{stored})
	}
	if err != nil {
		return err
	}
	if removed := replay && created != stored.Removes; !removed { // by an earlier run of this call
		err = run()
	}
	if created > 0 && errors.Is(err, registry.ErrNotFound) && a.gone(ctx, indexOf, created) {
		err = nil // the record was removed in the background while this call waited
	}
	if err == nil {
		err = a.store(ctx, call.Answered(struct{}{}))
	}
	return err
}

// gone reports whether indexOf does not return created any more: the record with that CreateIndex is gone.
func (a *Active) gone(ctx context.Context, indexOf createIndexFunc, created registry.Seq) (gone bool) {
	err := a.State.View(ctx, func(v registry.View) error {
		gone = indexOf(v) != created
		return nil
	})
	return err == nil && gone
}

// store commits records of this node.
func (a *Active) store(ctx context.Context, records []registry.Record) error {
	if len(records) == 0 {
		return nil
	}
	_, err := a.State.Commit(ctx, func(registry.View) (registry.Change, error) {
		return registry.Change{Put: records}, nil
	})
	return err
}

func (v *volumes) List(ctx context.Context, req *pb.ListVolumesRequest) (*pb.ListVolumesReply, error) {
	key := func(s registry.VolumeStatus) string { return s.Volume.Key().Path }
	part, next, at, err := list(ctx, v.s, req, useBuckets, key, wire.VolumeProto,
		func(ctx context.Context, a *Active) ([]registry.VolumeStatus, registry.Seq, error) {
			if err := checkFilters(req.GetNamespace(), req.GetId(), "", req.GetPlugin()); err != nil {
				return nil, 0, err
			}
			var only registry.VolumeName
			if req.GetNamespace() != "" && req.GetId() != "" {
				only = wire.VolumeName(&pb.VolumeName{Namespace: req.GetNamespace(), Id: req.GetId()})
			}
			all, at, err := a.Allocs.Volumes(ctx, only)
			return slices.DeleteFunc(all, func(s registry.VolumeStatus) bool {
				return !(passes(req.GetNamespace(), s.Namespace) && passes(req.GetId(), s.ID) &&
					passes(req.GetPlugin(), s.Plugin))
			}), at, err
		})
	return &pb.ListVolumesReply{Answer: at, Volumes: part, NextToken: next}, err
}

// Stats asks a plugin. It changes nothing, and its answer is true only at that moment.
func (v *volumes) Stats(ctx context.Context, req *pb.VolumeStatsRequest) (*pb.VolumeStatsReply, error) {
	usage, at, err := query(ctx, v.s, req, func(ctx context.Context, a *Active) ([]registry.VolumeUsage, error) {
		name, err := volumeName(req.GetName())
		if err != nil {
			return nil, err
		}
		return a.Meter.Stats(ctx, name)
	})
	reply := &pb.VolumeStatsReply{Answer: at}
	for _, u := range usage {
		reply.Usage = append(reply.Usage, wire.VolumeUsageProto(u))
	}
	return reply, err
}

type claims struct {
	pb.UnimplementedClaimsServer
	s *Server
}

func (c *claims) List(ctx context.Context, req *pb.ListClaimsRequest) (*pb.ListClaimsReply, error) {
	key := func(cl registry.Claim) string { return cl.Key().Path }
	part, next, at, err := list(ctx, c.s, req, []registry.Bucket{registry.BucketClaims}, key, wire.ClaimProto,
		func(ctx context.Context, a *Active) ([]registry.Claim, registry.Seq, error) {
			var only registry.VolumeName
			if req.GetVolume() != nil {
				var err error
				if only, err = volumeName(req.GetVolume()); err != nil {
					return nil, 0, err
				}
			}
			all, at, err := a.Allocs.Claims(ctx)
			return slices.DeleteFunc(all, func(cl registry.Claim) bool {
				return req.GetVolume() != nil && cl.Name != only || !passes(req.GetAlloc(), cl.Alloc)
			}), at, err
		})
	return &pb.ListClaimsReply{Answer: at, Claims: part, NextToken: next}, err
}
