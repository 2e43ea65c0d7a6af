package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Options of a Stager.
type Options struct {
	Layout hooks.Layout
	Node   registry.NodeName // this node
	// Admitted returns why nothing may be staged or published on this node now. nil: it always may.
	Admitted func(registry.View) error
	// Suspended are the optional calls during which plugins died. nil: none is recorded.
	Suspended *csi.Suspensions
	Logger    hclog.Logger
}

// Stager stages and publishes volumes. The caller of a method that sends calls for a volume holds the volume's lock.
// Stats and WatchHealth take it themselves.
type Stager struct {
	intent.Calls
	fleet   *csi.Fleet
	machine Machine
	Options
	failures csi.Failures // of calls that ask about health
}

// NewStager returns a stager that calls node plugins through fleet.
func NewStager(calls intent.Calls, fleet *csi.Fleet, m Machine, o Options) *Stager {
	if o.Admitted == nil {
		o.Admitted = func(registry.View) error { return nil }
	}
	return &Stager{Calls: calls, fleet: fleet, machine: m, Options: o}
}

// Name returns the name of this node.
func (s *Stager) Name() registry.NodeName { return s.Node }

// state holds the records of one volume.
type state struct {
	volume     registry.Volume     // zero: the volume has no record any more
	attachment registry.Attachment // to this node
	staging    registry.Staging
	refs       []registry.Ref
	claims     []registry.Claim // of this node
	open       registry.Intent  // the open call on this node; zero: none
}

// stateOf returns the records of a volume in a view.
func (s *Stager) stateOf(view registry.View, key registry.VolumeKey) state {
	st := state{refs: view.Refs(key)}
	st.claims = slices.DeleteFunc(view.Claims(key), func(c registry.Claim) bool { return c.Node != s.Node })
	st.volume, _ = view.VolumeByKey(key)
	st.staging, _ = view.Staging(key)
	st.volume.Expansion = st.expansion(st.volume)
	st.open, _ = view.NodeIntent(key)
	st.attachment, _ = view.Attachment(registry.AttachmentKey{Volume: key, Node: s.Node})
	return st
}

// state returns the last committed records of a volume.
func (s *Stager) state(ctx context.Context, key registry.VolumeKey) (st state, err error) {
	err = s.State.View(ctx, func(view registry.View) error {
		st = s.stateOf(view, key)
		return nil
	})
	return st, err
}

// ref returns the ref of a claim, and whether there is one.
func (st state) ref(key registry.ClaimKey) (r registry.Ref, found bool) {
	i := slices.IndexFunc(st.refs, func(r registry.Ref) bool { return r.ClaimKey() == key })
	if i >= 0 {
		r = st.refs[i]
	}
	return r, i >= 0
}

// hasClaim reports whether this node has the claim.
func (st state) hasClaim(key registry.ClaimKey) bool {
	return slices.ContainsFunc(st.claims, func(c registry.Claim) bool { return c.ClaimKey() == key })
}

// users lists the refs for people.
func (st state) users() string {
	var users []string
	for _, r := range st.refs {
		users = append(users, fmt.Sprintf("alloc %s as %q (%s)", r.Alloc, r.Request, r.Usage))
	}
	return strings.Join(users, ", ")
}

// secretsWait bounds the wait for secrets that are needed only for redaction.
const secretsWait = time.Second

// private returns a function for the values that have to be redacted from errors of the volume's plugin. The secrets
// serve only that here: if they are not available, the function sets Unknown.
func (s *Stager) private(key registry.VolumeKey) csi.PrivateFunc {
	return func(ctx context.Context) csi.Private {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), secretsWait)
		defer cancel()
		st, err := s.state(ctx, key)
		v := st.volume
		p := csi.Private{Contexts: []map[string]string{v.Context, st.attachment.PublishContext}}
		flags := append(v.MountFlags.List(), st.staging.Usage.MountFlags.List()...)
		for _, r := range st.refs {
			flags = append(flags, r.Usage.MountFlags.List()...)
		}
		p.MountFlags = registry.FlagsOf(flags)
		if err == nil && v.ID != "" {
			p.Secrets, err = s.Resolve(ctx, v.VolumeSpec)
		}
		p.Unknown = err != nil || v.ID == ""
		return p
	}
}

// server returns the instance's task if the mount at path needs a process that serves it (FUSE, nbd, ublk), else the
// zero value.
func (s *Stager) server(inst registry.Instance, path string) registry.TaskKey {
	if s.machine.Served(path) {
		return inst.TaskKey()
	}
	return registry.TaskKey{}
}

// awaitUnmounted waits until the mount at path is gone, after a call that should have removed it. answer is the error
// of that call; if it is not NOT_FOUND, awaitUnmounted returns it at once. If the mount remains for mountWait,
// awaitUnmounted returns an error.
func (s *Stager) awaitUnmounted(
	ctx context.Context, rpc registry.RPC, at registry.InstanceKey, path string, answer error,
) error {
	failed, _ := errors.AsType[*registry.CallError](answer)
	if answer != nil && (failed == nil || failed.Code != "NOT_FOUND") {
		return answer
	}
	gone, err := pollMounts(ctx, func() (bool, error) {
		mounted, err := s.machine.Mounted(path)
		return !mounted, err
	})
	switch {
	case err != nil || gone:
		return err
	case answer != nil:
		out := *failed
		// the path comes first, because the plugin's message may have an ID of 4 KiB
		out.Detail = fmt.Sprintf("%s is still mounted, and the plugin says: %s", path, failed.Detail)
		return &out
	}
	return csi.AnswerError(rpc, at, "the plugin answered OK, but %s is still mounted %v later; its log may say why",
		path, mountWait)
}

// mountWait bounds the wait for a mount to appear or disappear after its plugin has answered OK. In some plugins,
// another process does the mount, and may finish after the answer.
const mountWait = time.Second

// pollMounts polls condition until it returns true, for mountWait at most, and returns the last result. It fails if ctx
// ends first, because then the outcome of the call is unknown.
func pollMounts(ctx context.Context, condition func() (bool, error)) (bool, error) {
	const first, most = 10 * time.Millisecond, 100 * time.Millisecond
	end := time.Now().Add(mountWait)
	for pause := first; ; pause = min(2*pause, most) {
		if ok, err := condition(); ok || err != nil || !time.Now().Before(end) {
			return ok, err
		}
		select {
		case <-time.After(min(pause, time.Until(end))):
		case <-ctx.Done():
			return false, context.Cause(ctx)
		}
	}
}

func conflict(format string, args ...any) error {
	return registry.Errorf(registry.ErrConflict, format, args...)
}

// event returns the event of a completed call.
func (s *Stager) event(kind registry.EventKind, i registry.Intent, detail string) registry.Event {
	e := intent.Event(kind, i, s.Now())
	e.Detail = detail
	return e
}

// Settle brings an open node call to a certain outcome, success or failure, and then returns nil. It sends the call
// again, with the recorded arguments. It undoes a publish instead if the publish cannot be sent, as when its secrets
// are unavailable, or if its stage is gone. The caller holds the volume's lock.
func (s *Stager) Settle(ctx context.Context, by intent.Caller, open registry.Intent) error {
	return intent.Unsettled(s.sendAgain(ctx, by, open))
}

// sendAgain sends the open call again.
func (s *Stager) sendAgain(ctx context.Context, by intent.Caller, open registry.Intent) error {
	st, err := s.state(ctx, open.Volume)
	if err != nil {
		return err
	}
	if open.RPC == registry.NodeExpandRPC {
		_, err := s.Grow(ctx, by, open.Volume, false)
		return err
	}
	inst, err := s.AwaitFor(ctx, by, registry.RoleNode, open.Volume)
	if err != nil {
		return err
	}
	switch open.RPC {
	case registry.NodeStageRPC:
		call, err := s.stageCall(ctx, by, st.volume, st.staging.Usage, st)
		if err != nil {
			return err
		}
		return s.mount(ctx, call)
	case registry.NodeUnstageRPC:
		return s.Sender.Send(ctx, s.unstageCall(ctx, by, st.staging))
	case registry.NodePublishRPC, registry.NodeUnpublishRPC:
		r, found := st.ref(registry.ClaimKey{Volume: open.Volume, Alloc: open.Alloc, Request: open.Request})
		if !found {
			return registry.Errorf(registry.ErrDamaged, "%s, but the record of the publish is missing",
				intent.Describe(open))
		}
		return s.publishAgain(ctx, by, open, st, r, inst)
	}
	return registry.Errorf(registry.ErrInternal, "%s is not a node call", open.RPC)
}

// publishAgain sends an open publish or unpublish again. It unpublishes the volume if the publish cannot be sent: see
// Settle.
func (s *Stager) publishAgain(
	ctx context.Context, by intent.Caller, open registry.Intent, st state, r registry.Ref, inst registry.Instance,
) error {
	staged, err := s.stillStaged(st)
	if err != nil {
		return err
	}
	if open.RPC == registry.NodePublishRPC && (staged || st.staging.State == registry.MarkNone) {
		call, err := s.publishCall(ctx, by, st.volume, r, st, inst, new(hooks.Published))
		if err == nil {
			err = s.mount(ctx, call)
		}
		if _, sent := errors.AsType[*registry.CallError](err); err == nil || sent || ctx.Err() != nil {
			return err
		}
	}
	return s.unpublish(ctx, by, r, open.Name)
}
