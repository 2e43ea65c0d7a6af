package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// detachRound bounds how long each call of a detach by force is tried.
const detachRound = 10 * time.Second

// AbandonSteps returns the steps that DetachOrAbandon would take.
func (m *Controller) AbandonSteps(ctx context.Context, k registry.AttachmentKey) ([]registry.ReleaseStep, error) {
	at, err := m.attachment(ctx, k.Volume, k.Node)
	if err != nil || at.State == registry.MarkNone {
		return nil, err
	}
	return []registry.ReleaseStep{m.detachStep(at, true)}, nil
}

// detachStep returns the step that detaches a volume. abandons means that a detach that fails is skipped.
func (m *Controller) detachStep(at registry.Attachment, abandons bool) registry.ReleaseStep {
	step := registry.ReleaseStep{Volume: at.Name, Action: registry.ReleaseSend, RPC: registry.ControllerUnpublishRPC,
		Target: "node " + string(at.NodeID)}
	if !abandons {
		return step
	}
	step.Detail = "skipped if it fails"
	if why := m.whyNoController(at.Volume.Plugin); why != "" {
		step.Action, step.Detail = registry.ReleaseSkip, why
	}
	return step
}

// whyNoController returns why the plugin has no healthy controller; empty: it has one.
func (m *Controller) whyNoController(id registry.PluginID) string {
	reasons := intent.FeasibleAt(m.Plugins, registry.RoleController, id, registry.Usage{})
	if len(reasons) == 0 {
		return ""
	}
	return reasons[0].Detail
}

// DetachOrAbandon detaches a volume that the node does not use any more. If its plugin has no healthy controller, or if
// the call fails, it deletes the records of the attachment and of the open call instead: a person has confirmed that.
// If the volume is mounted here, ErrConflict names the uses. The caller holds the volume's lock.
func (m *Controller) DetachOrAbandon(
	ctx context.Context, by intent.Caller, k registry.AttachmentKey, f registry.Forced,
) error {
	at, err := m.attachment(ctx, k.Volume, k.Node)
	if err != nil || at.State == registry.MarkNone {
		return err
	}
	if local, err := m.usesAt(ctx, at); err != nil || len(local) > 0 {
		return errors.Join(err, errInUse(at, local))
	}
	why := m.whyNoController(k.Volume.Plugin)
	if why == "" {
		by.RetryUntil = time.Now().Add(detachRound)
		err := m.settleOrLeaveAlteration(ctx, by, k.Volume)
		if err == nil {
			by.RetryUntil = time.Now().Add(detachRound)
			err = m.Detach(ctx, by, k.Volume, k.Node)
		}
		now, viewErr := m.attachment(ctx, k.Volume, k.Node)
		detached := err == nil && viewErr == nil && now.State == registry.MarkNone
		if detached || ctx.Err() != nil {
			return errors.Join(err, viewErr)
		}
		why = fmt.Sprint(err)
	}
	return m.Abandon(ctx, k, f, why)
}

// usesAt describes how this node uses the volume of an attachment. In a cluster it returns nothing for the attachment
// of another node, whose users are on that node only.
func (m *Controller) usesAt(ctx context.Context, at registry.Attachment) ([]string, error) {
	if m.clustered() && m.ofOtherNode(at) {
		return nil, nil
	}
	return m.node.Uses(ctx, at.Volume)
}

// settleOrLeaveAlteration settles an open expansion or modification, which must have an outcome before a detach. If
// that fails, it closes the call as one of unknown outcome, as a release does.
func (m *Controller) settleOrLeaveAlteration(ctx context.Context, by intent.Caller, key registry.VolumeKey) error {
	err := m.settleAlteration(ctx, by, key, intent.PolicyOf)
	if err != nil && ctx.Err() == nil {
		_, err = m.LeaveAlteration(ctx, key)
	}
	return err
}

// Abandon deletes the records of an attachment whose plugin does not detach, and of the open call for it. If that call
// may still run at a former executor, another call for the volume waits until it has ended. why is the reason, for the
// event.
func (m *Controller) Abandon(ctx context.Context, k registry.AttachmentKey, f registry.Forced, why string) error {
	_, err := registry.Ensure(ctx, m.State, func(view registry.View) (change registry.Change, err error) {
		at, found := view.Attachment(k)
		if !found {
			return change, nil
		}
		change.Delete = append(change.Delete, at.Key())
		open, found := view.Intent(k.Volume)
		if found && open.Node != "" && open.Node == at.NodeID {
			change.Delete = append(change.Delete, open.Key())
			late := view.LateCallOf(open)
			if open.RPC == registry.ControllerPublishRPC {
				late.Attachment = nil // if repeated, the call would make an attachment without a record
			}
			change = change.And(view.GivenUp(late, open.Senders, m.Node))
		}
		change.Events = []registry.Event{m.abandoned(at, fmt.Sprintf("by %s: %s", f.By, why))}
		return change, nil
	})
	return err
}

// abandoned returns the event of an attachment whose record is deleted without a detach. why is the reason.
func (m *Controller) abandoned(at registry.Attachment, why string) registry.Event {
	return registry.Event{
		Kind: registry.EventAbandoned, Role: registry.RoleController, Plugin: at.Volume.Plugin, Volume: at.Name,
		External: at.Volume.External, At: m.Now(),
		Detail: fmt.Sprintf("without %s from node %s, %s", registry.ControllerUnpublishRPC, at.NodeID, why),
	}
}

// DetachVolume takes down the attachment of an unused volume to one node, or all its attachments if node is empty.
// For another node, this node has no evidence that the volume is unmounted there. So the host has to fence that node
// first (Fence), or f.Confirm has to be the ID of the volume. With the confirmation, a detach that fails is skipped.
// ErrNotFound: there is no such attachment. ErrConflict names the users. ErrDenied says what may be lost without a
// fence or a confirmation.
//
// Either all attachments are refused, or all are recorded as Detaching, in batches. From then on Run continues if an
// outcome is uncertain or the caller is gone. Before each try Run fences another node again, because the node may have
// come back.
func (m *Controller) DetachVolume(
	ctx context.Context, call registry.Call, name registry.VolumeName, node registry.NodeName, f registry.Force,
) (steps []registry.ReleaseStep, err error) {
	if f.By == "" && !f.DryRun {
		return nil, registry.Invalid("a detach must name its operator (By)")
	}
	list, err := m.AttachmentsOf(ctx, name, node)
	if err != nil {
		return nil, err
	}
	confirmed := f.Confirm == string(name.ID)
	if !confirmed && !f.DryRun {
		if err := m.awaitDetacher(ctx, call, list); err != nil {
			return nil, err
		}
	}
	for _, at := range list {
		if _, err := m.checkDetachable(ctx, at); err != nil {
			return nil, err
		}
		if m.ofOtherNode(at) {
			steps = append(steps, registry.ReleaseStep{
				Volume: at.Name, Action: registry.ReleaseFence, Target: string(at.Node),
				Detail: "a host that cannot fence needs a confirmation",
			})
		}
		steps = append(steps, m.detachStep(at, confirmed))
	}
	if f.DryRun {
		return steps, nil
	}
	for _, at := range list { // fence no node for a detach that is refused
		if err := m.fence(ctx, at, confirmed); err != nil {
			return nil, err
		}
	}
	want := registry.Detaching{Forced: registry.Forced{By: f.By, Since: m.Now()}, Confirmed: confirmed}
	if err := m.wantDetached(ctx, list, want); err != nil {
		return nil, err
	}
	for _, at := range list {
		if err := m.takeDown(ctx, intent.Caller{Call: call}, at.AttachmentKey(), true); err != nil {
			m.Wake()
			return nil, err
		}
	}
	return steps, nil
}

// wantDetached records that the attachments are to be taken down. If an earlier call has recorded the same, nothing
// changes.
func (m *Controller) wantDetached(ctx context.Context, list []registry.Attachment, want registry.Detaching) error {
	return registry.EnsureAll(ctx, m.State, func(view registry.View) (change registry.Change, err error) {
		for _, at := range list {
			at, found := view.Attachment(at.AttachmentKey())
			if !found || at.Detaching.By == want.By && at.Detaching.Confirmed == want.Confirmed {
				continue
			}
			if len(change.Put) == registry.Batch {
				break
			}
			at.Detaching = want
			change.Put = append(change.Put, at)
			change.Events = append(change.Events, registry.Event{
				Kind: registry.EventForced, Plugin: at.Volume.Plugin, Volume: at.Name, External: at.Volume.External,
				Detail: fmt.Sprintf("detach from node %s, by %s", at.NodeID, want.By), At: m.Now(),
			})
		}
		return change, nil
	})
}

// awaitDetacher waits for the controller without the volume's lock, because other calls may need the lock meanwhile.
func (m *Controller) awaitDetacher(ctx context.Context, call registry.Call, list []registry.Attachment) error {
	for _, at := range list {
		if _, err := m.checkDetachable(ctx, at); err != nil {
			return err
		}
		err := m.AwaitDetach(ctx, intent.Caller{Call: call}, at.Volume, at.Node, func(string) {})
		if err != nil {
			return fmt.Errorf("%w; if the plugin is gone for good, add --force --confirm %s: its backend may keep the "+
				"volume attached", err, at.Name.ID)
		}
	}
	return nil
}

// AttachmentsOf returns the attachments of a volume in the order in which DetachVolume takes them down. They may
// include those of an earlier volume with the same name, which was deregistered.
func (m *Controller) AttachmentsOf(
	ctx context.Context, name registry.VolumeName, node registry.NodeName,
) (list []registry.Attachment, err error) {
	where := ""
	if node != "" {
		where = fmt.Sprintf(" to node %s", node)
	}
	err = registry.Confirm(ctx, m.State, func(view registry.View) error {
		list = slices.DeleteFunc(view.AllAttachments(), func(at registry.Attachment) bool {
			return at.Name != name || node != "" && at.Node != node
		})
		if len(list) == 0 {
			return registry.Errorf(registry.ErrNotFound, "volume %s is not attached%s", name, where)
		}
		return nil
	})
	return list, err
}

// checkDetachable returns an ErrConflict if the volume has users on the node of the attachment (used), or if a call
// for another node is open. The error names them.
func (m *Controller) checkDetachable(ctx context.Context, at registry.Attachment) (used bool, err error) {
	local, err := m.usesAt(ctx, at)
	if err != nil {
		return false, err
	}
	err = registry.Confirm(ctx, m.State, func(view registry.View) error {
		users := slices.Clone(local)
		for _, c := range view.Claims(at.Volume) {
			if c.Node == at.Node {
				users = append(users, fmt.Sprintf("claimed by alloc %s", c.Alloc))
			}
		}
		used = len(users) > 0
		if open, found := view.Intent(at.Volume); found && open.Node != "" && open.Node != at.NodeID {
			users = append(users, "busy: "+intent.Describe(open))
		}
		return errInUse(at, users)
	})
	return used && errors.Is(err, registry.ErrConflict), err
}

// errInUse returns an ErrConflict if there are users.
func errInUse(at registry.Attachment, users []string) error {
	if len(users) == 0 {
		return nil
	}
	return registry.Errorf(registry.ErrConflict, "volume %s cannot be detached from node %s: it is %s",
		at.Name, at.Node, strings.Join(users, ", "))
}

func (m *Controller) ofOtherNode(at registry.Attachment) bool { return at.Node != m.node.Name() }

// takeDown takes down an attachment whose record says Detaching. If the detach has certainly failed, if the record is
// damaged, or if the volume is in use again, takeDown clears Detaching. If Detaching was cleared before, it returns an
// ErrConflict. fenced: the caller has just fenced the node.
func (m *Controller) takeDown(
	ctx context.Context, by intent.Caller, k registry.AttachmentKey, fenced bool,
) error {
	unlock, err := m.Locks.Lock(ctx, k.Volume, "a detach")
	if err != nil {
		return err
	}
	defer unlock()
	at, err := m.attachment(ctx, k.Volume, k.Node)
	switch {
	case err != nil || at.State == registry.MarkNone:
		return err
	case at.Detaching.By == "":
		return registry.Errorf(registry.ErrConflict, "volume %s stays attached to node %s: "+
			"meanwhile it was used again, or another detach failed (see holdfast events)", at.Name, at.Node)
	}
	used, err := m.checkDetachable(ctx, at)
	if used {
		return errors.Join(err, m.keepAttached(ctx, k))
	}
	if err == nil && !fenced {
		err = m.fence(ctx, at, at.Detaching.Confirmed)
	}
	if err != nil {
		return err
	}
	if at.Detaching.Confirmed {
		return m.DetachOrAbandon(ctx, by, k, at.Detaching.Forced)
	}
	if err = m.settleAlteration(ctx, by, k.Volume, intent.PolicyOf); err == nil {
		err = m.Detach(ctx, by, k.Volume, k.Node)
	}
	if err != nil && (intent.Unsettled(err) == nil || errors.Is(err, registry.ErrDamaged)) {
		return errors.Join(err, m.keepAttached(ctx, k))
	}
	if err != nil {
		err = fmt.Errorf("%w; Holdfast retries the detach", err)
	}
	return err
}

// keepAttached records that an attachment is not to be taken down any more.
func (m *Controller) keepAttached(ctx context.Context, k registry.AttachmentKey) error {
	_, err := registry.Ensure(context.WithoutCancel(ctx), m.State,
		func(view registry.View) (change registry.Change, err error) {
			if at, found := view.Attachment(k); found && at.Detaching.By != "" {
				at.Detaching = registry.Detaching{}
				change.Put = []registry.Record{at}
			}
			return change, nil
		})
	return err
}

// resumeDetach takes down the attachments of a volume whose records say Detaching, in the order of DetachVolume. over:
// none is left.
func (m *Controller) resumeDetach(ctx context.Context, name registry.VolumeName) (over bool, err error) {
	list, err := m.detaching(ctx, name)
	for _, at := range list {
		if err = m.tryDetach(ctx, at); err != nil {
			break
		}
	}
	left, viewErr := m.detaching(ctx, name)
	return viewErr == nil && len(left) == 0, err
}

// tryDetach tries once to take down an attachment whose record says Detaching.
func (m *Controller) tryDetach(ctx context.Context, at registry.Attachment) error {
	if !at.Detaching.Confirmed {
		limited, cancel := context.WithTimeout(ctx, resumeBackoff.Max)
		defer cancel()
		if err := m.AwaitDetach(limited, intent.Caller{}, at.Volume, at.Node, func(string) {}); err != nil {
			return err
		}
	}
	by := intent.Caller{RetryUntil: time.Now().Add(resumeBackoff.First)}
	return m.takeDown(ctx, by, at.AttachmentKey(), false)
}

// detaching returns the attachments of a volume that this node is to take down; if name is zero, those of all volumes.
func (m *Controller) detaching(
	ctx context.Context, name registry.VolumeName,
) (list []registry.Attachment, err error) {
	err = m.State.View(ctx, func(view registry.View) error {
		list = slices.DeleteFunc(view.AllAttachments(), func(at registry.Attachment) bool {
			v, _ := view.VolumeByKey(at.Volume)
			by := registry.ExecutorKey{Plugin: at.Volume.Plugin, Node: v.Node}
			return at.Detaching.By == "" || name.ID != "" && at.Name != name || m.Executes(view, by) != nil
		})
		return nil
	})
	return list, err
}

// fence makes sure that the node of an attachment, if it is another node, does not use the volume any more. If the host
// cannot fence, a confirmation is enough. No record says that the node was fenced, because it may come back.
func (m *Controller) fence(ctx context.Context, at registry.Attachment, confirmed bool) error {
	if !m.ofOtherNode(at) {
		return nil
	}
	err := registry.Errorf(registry.ErrUnsupported, "no fence")
	if m.Fence != nil {
		err = m.Fence(ctx, at.Node)
	}
	switch {
	case err == nil, confirmed && errors.Is(err, registry.ErrUnsupported):
		return nil
	case errors.Is(err, registry.ErrUnsupported):
		return registry.Errorf(registry.ErrDenied, "volume %s is attached to node %s, and nothing shows that it is "+
			"unmounted there: a detach may lose data that the node has not written; "+
			"make sure that the node is down or gone, and add --force --confirm %s", at.Name, at.Node, at.Name.ID)
	}
	return fmt.Errorf("fence node %s before volume %s is detached from it: %w", at.Node, at.Name, err)
}
