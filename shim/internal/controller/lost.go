package controller

import (
	"context"
	"fmt"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// lostRound bounds how long each call is tried in one try to release a volume of a lost node.
const lostRound = 30 * time.Second

// ReleaseLost releases the volume of a lost node: it detaches the volume, and then deletes the node's claims. The
// evidence that nothing is mounted there is that the node was declared out of service or fenced. If the node is not
// lost any more, or is alive again, ReleaseLost does nothing, because the node releases the volume itself. A volume
// that is stored on the lost node stays attached: only that node can detach it, and does so before it is ready again.
func (m *Controller) ReleaseLost(ctx context.Context, k registry.AttachmentKey) error {
	unlock, err := m.Locks.Lock(ctx, k.Volume, fmt.Sprintf("the release of lost node %s", k.Node))
	if err != nil {
		return err
	}
	defer unlock()
	var node registry.Node
	var lost, stored bool
	err = m.State.View(ctx, func(view registry.View) error {
		node, lost = isLost(view, k.Node)
		stored = view.StoredOn(k.Volume, k.Node)
		return nil
	})
	if err != nil || !lost {
		return err
	}
	by := intent.Caller{RetryUntil: time.Now().Add(lostRound)}
	at, err := m.attachment(ctx, k.Volume, k.Node)
	if err == nil && at.State != registry.MarkNone && !stored {
		err = m.settleOrLeaveAlteration(ctx, by, k.Volume)
		if err == nil {
			err = m.Detach(ctx, by, k.Volume, k.Node)
		}
	}
	if err != nil {
		return err
	}
	return registry.EnsureAll(ctx, m.State, func(view registry.View) (registry.Change, error) {
		return m.unclaimLost(view, k, node.Epoch)
	})
}

// unclaimLost returns the change that releases claims of the node for the volume, up to one batch, if the node is still
// lost.
func (m *Controller) unclaimLost(
	view registry.View, k registry.AttachmentKey, epoch uint64,
) (change registry.Change, err error) {
	now, lost := isLost(view, k.Node)
	if !lost || now.Epoch != epoch {
		return change, nil
	}
	if at, attached := view.Attachment(k); attached && !view.StoredOn(k.Volume, k.Node) {
		return change, registry.Errorf(registry.ErrConflict, "volume %s is attached to node %s again", at.Name, k.Node)
	}
	for _, c := range view.Claims(k.Volume) {
		if c.Node != k.Node || len(change.Delete) == registry.Batch {
			continue
		}
		released := m.Claims.event(registry.EventReleased, c)
		released.Node, released.Detail = k.Node, fmt.Sprintf("%s: %s", released.Detail, now)
		change.Delete = append(change.Delete, c.Key())
		change.Events = append(change.Events, released)
	}
	return change, nil
}

// lostAttachment returns the attachment of the volume to the node that stores it if that node is lost, else nothing.
func lostAttachment(view registry.View, v registry.Volume) (list []registry.Attachment) {
	at, found := view.Attachment(registry.AttachmentKey{Volume: v.VolumeKey(), Node: v.Node})
	if _, lost := isLost(view, v.Node); lost && found {
		list = append(list, at)
	}
	return list
}

// isLost returns the record of a node, and whether it was declared lost and is not alive again.
func isLost(view registry.View, name registry.NodeName) (registry.Node, bool) {
	node, _ := view.Node(name)
	_, alive := view.NodeLease(name)
	return node, node.Lost() && !alive
}
