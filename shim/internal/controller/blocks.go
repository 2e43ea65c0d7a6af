package controller

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// maxRanges bounds the ranges in one part of a list of blocks, so that a whole list is never in memory.
const maxRanges = 1000

// blocksLimit bounds one call for blocks. If a call made progress before it was cut off, another call continues the
// list.
const blocksLimit = 5 * time.Minute

// blocksIdle bounds the time without a block. It ends the list of a plugin that hangs or keeps failing.
const blocksIdle = 10 * time.Minute

var errBlocksIdle = registry.Errorf(registry.ErrUnavailable, "the plugin has sent no block for %v", blocksIdle)

// Blocks calls receive with the allocated blocks of a snapshot, in order. With a base, it calls receive only with the
// blocks that differ from the base. If a call to the plugin is cut off, another one continues after the last range.
// Blocks gives up after blocksIdle without a block. An error of receive ends the list and is returned.
func (s *Snapshots) Blocks(ctx context.Context, q registry.BlockQuery, receive func(registry.Blocks) error) error {
	snap, base, err := s.comparedSnapshots(ctx, q)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	idle := time.AfterFunc(blocksIdle, func() { cancel(errBlocksIdle) })
	defer idle.Stop()
	list := blockList{next: q.Offset, each: func(page registry.Blocks) error {
		idle.Stop()
		defer idle.Reset(blocksIdle)
		return receive(page)
	}}
	for try := uint64(1); ; try++ {
		start := list.next
		err := s.readBlocks(ctx, snap, base, &list)
		progress := list.next > start
		if progress {
			try = 1
		}
		failure, is := errors.AsType[*registry.CallError](err)
		if list.failed != nil || err == nil || !is || !continues(failure.Code, progress) {
			return err
		}
		if !intent.Sleep(ctx, readyBackoff.Delay(try, rand.Float64())) {
			return fmt.Errorf("%w (given up: %w)", err, context.Cause(ctx))
		}
	}
}

// continues reports whether another call continues the list after a call that ended with the code. A lost connection
// ends a call with UNAVAILABLE or, if this side closes the connection first, with CANCELLED.
func continues(code string, progress bool) bool {
	return slices.Contains([]string{"UNAVAILABLE", "ABORTED", "CANCELLED"}, code) || progress && !intent.Answers(code)
}

// comparedSnapshots returns the snapshots that the query names, after checking that their blocks can be compared.
func (s *Snapshots) comparedSnapshots(
	ctx context.Context, q registry.BlockQuery,
) (snap, base registry.VolumeSnapshot, err error) {
	if q.Offset < 0 {
		return snap, base, registry.Invalid("the offset is %d; it cannot be negative", q.Offset)
	}
	if snap, err = s.readySnapshot(ctx, q.Snapshot); err != nil || q.Base == "" {
		return snap, base, err
	}
	name := registry.SnapshotName{Namespace: q.Snapshot.Namespace, ID: q.Base}
	if base, err = s.readySnapshot(ctx, name); err != nil {
		return snap, base, err
	}
	switch {
	case base.Plugin != snap.Plugin || base.Source != snap.Source:
		err = registry.Invalid("snapshot %s is of volume %s, and %s of volume %s; only snapshots of one volume can be "+
			"compared", base.ID, base.Volume, snap.ID, snap.Volume)
	case base.Taken.After(snap.Taken) && !snap.Taken.IsZero():
		err = registry.Invalid("snapshot %s was taken after %s; give the earlier one first", base.ID, snap.ID)
	}
	return snap, base, err
}

func (s *Snapshots) readySnapshot(ctx context.Context, name registry.SnapshotName) (registry.VolumeSnapshot, error) {
	return s.confirmedSnapshot(ctx, snapshotName{name, false}, func(snap registry.VolumeSnapshot) error {
		if snap.State != registry.SnapshotReady {
			return registry.Errorf(registry.ErrConflict, "snapshot %s is %s; its blocks are known once it is %s",
				name, snap.State, registry.SnapshotReady)
		}
		return nil
	})
}

// readBlocks makes one call for blocks.
func (s *Snapshots) readBlocks(ctx context.Context, snap, base registry.VolumeSnapshot, list *blockList) error {
	inst, err := s.volumes.capableController(ctx, snap.Plugin, false, registry.SnapshotMetadata,
		"plugin %s cannot list the blocks of snapshots (it lacks %s)")
	if err != nil {
		return err
	}
	secrets, err := s.secrets(ctx, snap)
	if err != nil {
		return err
	}
	r := csi.BlocksRequest{
		Snapshot: snap.External, Base: base.External, Offset: list.next, Max: maxRanges, Secrets: secrets,
		Private: csi.Private{Contexts: []map[string]string{snap.Parameters, base.Parameters}},
	}
	list.end = 0
	return s.volumes.Once(ctx, registry.ExecutorKey{}, blocksLimit, func(ctx context.Context) error {
		return s.driver.SnapshotBlocks(ctx, inst.InstanceKey, r, func(page registry.Blocks) error {
			list.failed = list.add(page)
			if list.failed != nil && list.invalid {
				list.failed = badResponse(r.RPC(), inst.InstanceKey, registry.ErrInternal,
					"the plugin's answer cannot be used: %v", list.failed)
			}
			return list.failed
		})
	})
}

// blockList checks the parts of a list of blocks and passes them on.
type blockList struct {
	each    func(registry.Blocks) error
	next    int64           // the end of the blocks that were passed on
	end     int64           // the end of the last range of this call
	size    int64           // the size of a block of fixed length; 0: no block has come yet
	first   registry.Blocks // type and capacity of the first part
	failed  error
	invalid bool // failed is an error in the plugin's answer
}

// add passes on a part. The first range of a call may begin before next; add passes on only the rest of such a range.
func (l *blockList) add(page registry.Blocks) error {
	if err := l.check(page); err != nil {
		l.invalid = true
		return err
	}
	ranges := page.Ranges[:0]
	for _, r := range page.Ranges {
		if r.Offset < l.next {
			r.Offset, r.Size = l.next, r.End()-l.next
		}
		ranges, l.next = append(ranges, r), r.End()
	}
	page.Ranges = ranges
	return l.each(page)
}

// check returns an error if CSI does not allow the page after the earlier ones (GetMetadataAllocatedResponse). It keeps
// what later pages are compared with: first, size and end.
func (l *blockList) check(page registry.Blocks) error {
	if l.first.Capacity == 0 {
		l.first = registry.Blocks{Type: page.Type, Capacity: page.Capacity}
	}
	switch {
	case page.Type == "" || page.Capacity <= 0:
		return registry.Invalid("it does not say the type of the blocks and the capacity of the volume")
	case page.Type != l.first.Type || page.Capacity != l.first.Capacity:
		return registry.Invalid("it said %s blocks of %d bytes first, and then %s blocks of %d bytes", l.first.Type,
			l.first.Capacity, page.Type, page.Capacity)
	case len(page.Ranges) > maxRanges:
		return registry.Invalid("a message has %d ranges; it was asked for at most %d", len(page.Ranges), maxRanges)
	}
	for _, r := range page.Ranges {
		switch {
		case r.Size <= 0 || r.Offset < 0 || r.Offset > page.Capacity-r.Size:
			return registry.Invalid("the range of %d bytes at %d is not in the volume of %d bytes", r.Size, r.Offset,
				page.Capacity)
		case r.Offset < l.end:
			return registry.Invalid("the range at %d begins before %d, the end of the one before", r.Offset, l.end)
		case r.End() <= l.next:
			return registry.Invalid("the range of %d bytes at %d ends before the offset %d", r.Size, r.Offset, l.next)
		}
		if page.Type == registry.FixedLength {
			if l.size == 0 {
				l.size = r.Size
			}
			if r.Size != l.size {
				return registry.Invalid("a block has %d bytes, and the first one %d", r.Size, l.size)
			}
		}
		l.end = r.End()
	}
	return nil
}
