package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// CreateSnapshot copies a volume. The copy is complete when it returns.
func (d *driver) CreateSnapshot(
	ctx context.Context, req *csi.CreateSnapshotRequest,
) (*csi.CreateSnapshotResponse, error) {
	_, badSource := parseID(volumeKind, req.GetSourceVolumeId())
	if err := cmp.Or(checkName(req.GetName()), noParameters(req.GetParameters()), badSource); err != nil {
		return nil, err
	}
	id, source := idFor(snapshotKind, req.GetName()), req.GetSourceVolumeId()
	same := func(have record) error {
		if have.Source != volumeID(source) {
			return status.Errorf(codes.AlreadyExists, "snapshot %q exists, of volume %s", req.GetName(), have.Source)
		}
		return nil
	}
	r, err := d.ensure(id, same, func() (r record, err error) {
		err = d.locked(volumeKind, source, func(s record) error {
			r = snapshotOf(s, id, time.Now().UTC())
			return d.makeCopy(ctx, s, r)
		})
		return r, err
	})
	return &csi.CreateSnapshotResponse{Snapshot: snapshot(r)}, err
}

func snapshot(r record) *csi.Snapshot {
	return &csi.Snapshot{
		SnapshotId: string(r.ID), SourceVolumeId: string(r.Source), SizeBytes: r.Bytes,
		CreationTime: timestamppb.New(r.Created), ReadyToUse: true, GroupSnapshotId: string(r.ID.group()),
	}
}

func (d *driver) DeleteSnapshot(
	ctx context.Context, req *csi.DeleteSnapshotRequest,
) (*csi.DeleteSnapshotResponse, error) {
	return &csi.DeleteSnapshotResponse{}, d.delete(ctx, snapshotKind, req.GetSnapshotId(), func(r record) error {
		if g := r.ID.group(); g != "" {
			return status.Errorf(codes.InvalidArgument, "snapshot %s is part of group snapshot %s: delete that", r.ID,
				g)
		}
		return nil
	})
}

// ListSnapshots lists snapshots, those of an ID or a source if one is given.
func (d *driver) ListSnapshots(
	_ context.Context, req *csi.ListSnapshotsRequest,
) (*csi.ListSnapshotsResponse, error) {
	all := slices.DeleteFunc(d.all(snapshotKind), func(r record) bool {
		id, source := req.GetSnapshotId(), req.GetSourceVolumeId()
		return id != "" && id != string(r.ID) || source != "" && source != string(r.Source)
	})
	all, next, err := page(all, idOf, snapshotKind, req.GetMaxEntries(), req.GetStartingToken())
	answer := &csi.ListSnapshotsResponse{NextToken: next}
	for _, r := range all {
		answer.Entries = append(answer.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: snapshot(r)})
	}
	return answer, err
}

func (d *driver) GetSnapshot(_ context.Context, req *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	r, err := d.get(snapshotKind, req.GetSnapshotId())
	return &csi.GetSnapshotResponse{Snapshot: snapshot(r)}, err
}

// readSource returns the ID of a content source, or an empty ID for none.
func readSource(s *csi.VolumeContentSource) (volumeID, error) {
	switch {
	case s == nil:
		return "", nil
	case s.GetSnapshot() != nil:
		return parseID(snapshotKind, s.GetSnapshot().GetSnapshotId())
	case s.GetVolume() != nil:
		return parseID(volumeKind, s.GetVolume().GetVolumeId())
	}
	return "", status.Error(codes.InvalidArgument, "the volume content source names neither a snapshot nor a volume")
}

func contentSource(id volumeID) *csi.VolumeContentSource {
	switch id.kind() {
	case snapshotKind:
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: string(id)},
		}}
	case volumeKind:
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: string(id)},
		}}
	}
	return nil
}

// The snapshots of a group are crash-consistent: all mounted volumes are frozen before the first is copied, and thawed
// after the last. A volume that is published for writing and cannot be frozen (a block device, a directory) is refused.

func (d *driver) GroupControllerGetCapabilities(
	context.Context, *csi.GroupControllerGetCapabilitiesRequest,
) (*csi.GroupControllerGetCapabilitiesResponse, error) {
	rpc := &csi.GroupControllerServiceCapability_RPC{
		Type: csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT,
	}
	return &csi.GroupControllerGetCapabilitiesResponse{Capabilities: []*csi.GroupControllerServiceCapability{
		{Type: &csi.GroupControllerServiceCapability_Rpc{Rpc: rpc}},
	}}, nil
}

func (d *driver) CreateVolumeGroupSnapshot(
	ctx context.Context, req *csi.CreateVolumeGroupSnapshotRequest,
) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	if err := cmp.Or(checkName(req.GetName()), noParameters(req.GetParameters())); err != nil {
		return nil, err
	}
	if len(req.GetSourceVolumeIds()) == 0 {
		return nil, status.Error(codes.InvalidArgument, "the source volume ids are missing")
	}
	g := record{ID: idFor(groupKind, req.GetName()), Created: time.Now().UTC()}
	sources := slices.Compact(slices.Sorted(slices.Values(req.GetSourceVolumeIds())))
	for _, source := range sources {
		g.Members = append(g.Members, memberID(g.ID, volumeID(source)))
	}
	same := func(have record) error {
		if !slices.Equal(have.Members, g.Members) {
			return status.Errorf(codes.AlreadyExists, "group snapshot %q exists, of other volumes", req.GetName())
		}
		return nil
	}
	r, err := d.ensure(g.ID, same, func() (record, error) { return g, d.snapshotGroup(ctx, g, sources) })
	if err != nil {
		return nil, err
	}
	answer, err := d.groupSnapshot(r)
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: answer}, err
}

func (d *driver) groupSnapshot(r record) (*csi.VolumeGroupSnapshot, error) {
	answer := &csi.VolumeGroupSnapshot{
		GroupSnapshotId: string(r.ID), CreationTime: timestamppb.New(r.Created), ReadyToUse: true,
	}
	for _, id := range r.Members {
		m, err := d.load(id)
		if err != nil {
			return nil, err
		}
		answer.Snapshots = append(answer.Snapshots, snapshot(m))
	}
	return answer, nil
}

// checkMembers returns INVALID_ARGUMENT if the given snapshot ids, which may be missing, are not those of the group.
func checkMembers(r record, given []string) error {
	equal := func(id string, member volumeID) bool { return id == string(member) }
	if len(given) > 0 && !slices.EqualFunc(slices.Sorted(slices.Values(given)), r.Members, equal) {
		return status.Errorf(codes.InvalidArgument, "the snapshot ids are not those of group snapshot %s", r.ID)
	}
	return nil
}

func (d *driver) GetVolumeGroupSnapshot(
	_ context.Context, req *csi.GetVolumeGroupSnapshotRequest,
) (*csi.GetVolumeGroupSnapshotResponse, error) {
	r, err := d.get(groupKind, req.GetGroupSnapshotId())
	if err == nil {
		err = checkMembers(r, req.GetSnapshotIds())
	}
	if err != nil {
		return nil, err
	}
	answer, err := d.groupSnapshot(r)
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: answer}, err
}

func (d *driver) DeleteVolumeGroupSnapshot(
	ctx context.Context, req *csi.DeleteVolumeGroupSnapshotRequest,
) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
	err := d.delete(ctx, groupKind, req.GetGroupSnapshotId(), func(r record) error {
		return checkMembers(r, req.GetSnapshotIds())
	})
	return &csi.DeleteVolumeGroupSnapshotResponse{}, err
}

// A copy is of one moment, and independent of its source. A mounted file system is frozen (FIFREEZE, as fsfreeze does)
// during the copy: an instant with reflinks (xfs, btrfs), else as long as the copy of its data takes. A block device or
// a directory cannot be frozen. While it is published for writing, it is not copied.

func snapshotOf(s record, id volumeID, created time.Time) record {
	return record{ID: id, Backend: s.Backend, Bytes: s.Bytes, Usage: s.Usage, Source: s.ID, Created: created}
}

// createFrom makes a volume that begins as a copy of a volume or snapshot, in the backend of that.
func (d *driver) createFrom(ctx context.Context, r record, size *csi.CapacityRange) (record, error) {
	err := d.locked(r.Source.kind(), string(r.Source), func(s record) error {
		r.Backend = s.Backend
		if err := d.size(&r, size, s.Bytes); err != nil {
			return err
		}
		if s.Usage.Block && !r.Usage.Block {
			return status.Errorf(codes.InvalidArgument, "%s is a block device, and so must be its copy", s.ID)
		}
		return d.makeCopy(ctx, s, r)
	})
	return r, err
}

func (d *driver) makeCopy(ctx context.Context, s, r record) error {
	return d.make(r.ID, func(dir string) error {
		return d.atOneMoment([]record{s}, func() error { return d.copy(ctx, dir, s, r) })
	})
}

// copy writes a record and a copy of the bytes of s.
func (d *driver) copy(ctx context.Context, dir string, s, r record) error {
	return d.write(dir, r, func(b backend) error { return b.copyFrom(ctx, d.bytesOf(s)) })
}

// snapshotGroup copies volumes at one moment.
func (d *driver) snapshotGroup(ctx context.Context, g record, sources []string) error {
	var volumes []record
	for _, source := range sources {
		s, unlock, err := d.acquire(volumeKind, source)
		if err != nil {
			return err
		}
		defer unlock()
		volumes = append(volumes, s)
	}
	return d.make(g.ID, func(dir string) error {
		if err := writeRecord(dir, g); err != nil {
			return err
		}
		return d.atOneMoment(volumes, func() error {
			for i, s := range volumes {
				member := filepath.Join(dir, string(g.Members[i]))
				err := os.Mkdir(member, 0o700)
				if err == nil {
					err = d.copy(ctx, member, s, snapshotOf(s, g.Members[i], g.Created))
				}
				if err != nil {
					return fmt.Errorf("copy %s: %w", s.ID, err)
				}
			}
			return syncDir(dir)
		})
	})
}

// atOneMoment calls do while locked volumes do not change: it first freezes each that is mounted for writing.
func (d *driver) atOneMoment(volumes []record, do func() error) (failed error) {
	for _, r := range volumes {
		staged, err := d.staged(r)
		if err != nil {
			return err
		}
		b := d.bytesOf(r)
		l, isLoop := b.(loop)
		user, err := b.heldBy()
		switch {
		case err != nil:
			return err
		case !staged && user != "":
			return status.Errorf(codes.FailedPrecondition, "volume %s is not at its staging path, but %s still uses it",
				r.ID, user)
		case !staged || r.stagedReadOnly():
		case isLoop && !r.Usage.Block:
			defer func() { failed = errors.Join(failed, l.thaw()) }()
			if err := l.freeze(); err != nil {
				return fmt.Errorf("freeze volume %s: %w", r.ID, err)
			}
		default:
			if err := d.checkUnwritten(r); err != nil {
				return err
			}
		}
	}
	return do()
}

// checkUnwritten refuses a volume that is published for writing.
func (d *driver) checkUnwritten(r record) error {
	targets, err := d.published(r)
	for _, target := range targets {
		if !r.Stage.Published[target] {
			return status.Errorf(codes.FailedPrecondition, "volume %s is published for writing at %s and cannot be "+
				"frozen, so a copy would not be of one moment; unpublish it first", r.ID, target)
		}
	}
	return err
}
