package csifake

import (
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
)

func snapshotID(name string) string { return fmt.Sprintf("snap-%x", sha256.Sum256([]byte(name)))[:20] }

func (x *snapshot) message() *csi.Snapshot {
	return &csi.Snapshot{SnapshotId: x.ID, SourceVolumeId: x.Source, SizeBytes: x.Size, ReadyToUse: true,
		CreationTime: &timestamppb.Timestamp{Seconds: x.Made}, GroupSnapshotId: x.Group}
}

// snap makes a snapshot, or returns the existing one with that name.
func (p *Plugin) snap(c *contents, name, source, group string) (*snapshot, error) {
	v, err := p.find(c, source)
	if err != nil {
		return nil, err
	}
	if x := c.Snapshots[snapshotID(name)]; x != nil {
		if x.Source != source {
			return nil, status.Errorf(codes.AlreadyExists, "snapshot %q is of another volume", name)
		}
		return x, nil
	}
	x := &snapshot{ID: snapshotID(name), Name: name, Source: source, Size: v.Capacity, Made: time.Now().Unix(),
		Group: group, Blocks: maps.Clone(v.Blocks)}
	c.Snapshots[x.ID] = x
	return x, nil
}

func (s controller) CreateSnapshot(
	_ context.Context, r *csi.CreateSnapshotRequest,
) (*csi.CreateSnapshotResponse, error) {
	if r.GetName() == "" {
		return nil, invalid("name is missing")
	}
	reply := &csi.CreateSnapshotResponse{}
	return reply, s.p.cfg.Backend.change(func(c *contents) error {
		x, err := s.p.snap(c, r.GetName(), r.GetSourceVolumeId(), "")
		if err == nil {
			reply.Snapshot = x.message()
		}
		return err
	})
}

func (s controller) DeleteSnapshot(
	_ context.Context, r *csi.DeleteSnapshotRequest,
) (*csi.DeleteSnapshotResponse, error) {
	if r.GetSnapshotId() == "" {
		return nil, invalid("snapshot_id is missing")
	}
	return &csi.DeleteSnapshotResponse{}, s.p.cfg.Backend.change(func(c *contents) error {
		if x := c.Snapshots[r.GetSnapshotId()]; x != nil && x.Group != "" {
			return invalid("snapshot %q belongs to group snapshot %q", x.ID, x.Group)
		}
		delete(c.Snapshots, r.GetSnapshotId())
		return nil
	})
}

func (s controller) ListSnapshots(_ context.Context, r *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	reply := &csi.ListSnapshotsResponse{}
	return reply, s.p.cfg.Backend.change(func(c *contents) error {
		ids := slices.DeleteFunc(slices.Sorted(maps.Keys(c.Snapshots)), func(id string) bool {
			return r.GetSnapshotId() != "" && r.GetSnapshotId() != id ||
				r.GetSourceVolumeId() != "" && r.GetSourceVolumeId() != c.Snapshots[id].Source
		})
		ids, next, err := s.p.page(ids, r.GetMaxEntries(), r.GetStartingToken())
		for _, id := range ids {
			reply.Entries = append(reply.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: c.Snapshots[id].message()})
		}
		reply.NextToken = next
		return err
	})
}

func (s controller) GetSnapshot(_ context.Context, r *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	reply := &csi.GetSnapshotResponse{}
	return reply, s.p.cfg.Backend.change(func(c *contents) error {
		x := c.Snapshots[r.GetSnapshotId()]
		if x == nil {
			return status.Errorf(codes.NotFound, "snapshot %q does not exist", r.GetSnapshotId())
		}
		reply.Snapshot = x.message()
		return nil
	})
}
