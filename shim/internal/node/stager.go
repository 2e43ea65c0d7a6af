package node

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Options of a Stager.
type Options struct {
	Layout hooks.Layout
	Node   registry.NodeName // this node
	// Check has the mount table asked whether calls did what they answered. Without it the plugin's word is all there
	// is: for plugins that share no mounts with us.
	Check bool
	// Inspect says what is at each path, within a limited time. nil: paths are not inspected.
	Inspect func(ctx context.Context, paths ...string) (map[string]mount.Info, error)
	// Parts mounts parts of what is published. nil: nobody can.
	Parts Parts
	// Suspended are the optional calls during which plugins died. nil: none is recorded.
	Suspended *csi.Suspensions
}

// Stager stages and publishes volumes.
type Stager struct {
	intent.Calls
	driver Driver
	kernel Kernel
	Options
}

// NewStager returns a stager that calls node plugins through driver.
func NewStager(calls intent.Calls, driver Driver, kernel Kernel, o Options) *Stager {
	return &Stager{calls, driver, kernel, o}
}

// state is all that is recorded of one volume.
type state struct {
	volume     registry.Volume     // zero: it is not known any more
	attachment registry.Attachment // to this node
	staging    registry.Staging
	refs       []registry.Ref
	claims     []registry.Claim // of this node
}

func (s *Stager) stateOf(view registry.View, key registry.VolumeKey) state {
	st := state{refs: view.Refs(key)}
	st.claims = slices.DeleteFunc(view.Claims(key), func(c registry.Claim) bool { return c.Node != s.Node })
	st.volume, _ = view.VolumeByKey(key)
	st.staging, _ = view.Staging(key)
	st.attachment, _ = view.Attachment(registry.AttachmentKey{Volume: key, Node: s.Node})
	return st
}

func (s *Stager) state(ctx context.Context, key registry.VolumeKey) (st state, err error) {
	err = s.State.View(ctx, func(view registry.View) error {
		st = s.stateOf(view, key)
		return nil
	})
	return st, err
}

func (st state) ref(key registry.ClaimKey) (registry.Ref, bool) {
	for _, r := range st.refs {
		if r.ClaimKey() == key {
			return r, true
		}
	}
	return registry.Ref{}, false
}

func (st state) claimed(key registry.ClaimKey) bool {
	for _, c := range st.claims {
		if c.ClaimKey() == key {
			return true
		}
	}
	return false
}

// users names the refs, for people.
func (st state) users() string {
	var users []string
	for _, r := range st.refs {
		users = append(users, fmt.Sprintf("alloc %s as %q (%s)", r.Alloc, r.Request, r.Usage))
	}
	return strings.Join(users, ", ")
}

// pathAt is the path by which the instance knows a tree that was recorded below the staging root: another instance than
// the one of that time may know the root by another name.
func pathAt(inst registry.Instance, t registry.Tree) string {
	rel, err := filepath.Rel(inst.Volumes.Host, t.Host)
	if err != nil || rel == ".." || strings.HasPrefix(rel, "../") || inst.Volumes.Task == "" {
		return t.Task
	}
	return filepath.Join(inst.Volumes.Task, rel)
}

// askLimit is how long the host may take to tell secrets that are needed only to keep them out of a text.
const askLimit = time.Second

// private is what a plugin knows of the volume and its errors must not tell. To take a volume down nobody has to
// answer.
func (s *Stager) private(ctx context.Context, key registry.VolumeKey) csi.Private {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askLimit)
	defer cancel()
	var v registry.Volume
	var st state
	known := false
	err := s.State.View(ctx, func(view registry.View) error {
		v, known = view.VolumeByKey(key)
		st = s.stateOf(view, key)
		return nil
	})
	p := csi.Private{Contexts: []map[string]string{v.Context, st.attachment.PublishContext}}
	flags := append(v.MountFlags.List(), st.staging.Usage.MountFlags.List()...)
	for _, r := range st.refs {
		flags = append(flags, r.Usage.MountFlags.List()...)
	}
	p.MountFlags = registry.FlagsOf(flags)
	if err == nil && known {
		p.Secrets, err = s.Resolve(ctx, v.VolumeSpec)
	}
	p.Unknown = err != nil || !known
	return p
}

// mounted asks the mount table; without Check it says what is expected.
func (s *Stager) mounted(path string, expected bool) (bool, error) {
	if !s.Check {
		return expected, nil
	}
	return s.kernel.Mounted(path)
}

// gone judges the answer of a call that takes a mount away, by whether the mount goes away.
func (s *Stager) gone(ctx context.Context, rpc registry.RPC, at registry.InstanceKey, path string, answer error) error {
	if answer != nil && !isNotFound(answer) {
		return answer
	}
	gone, err := soon(ctx, func() (bool, error) {
		still, err := s.mounted(path, false)
		return !still, err
	})
	switch {
	case err != nil:
		return err
	case gone:
		return nil
	case answer != nil:
		return stillMounted(answer, path)
	}
	return lied(rpc, at, "the plugin answered OK, but %s is still mounted %v later; its log may say why", path,
		mountWait)
}

// stillMounted is the plugin's answer that it does not know the volume, with the mount that stays. The path comes
// first: what a plugin says may hold an id of 4 KiB.
func stillMounted(answer error, path string) error {
	call, ok := errors.AsType[*registry.CallError](answer)
	if !ok {
		return fmt.Errorf("%s is still mounted: %w", path, answer)
	}
	told := *call
	told.Detail = fmt.Sprintf("%s is still mounted, and the plugin says: %s", path, call.Detail)
	return &told
}

// mountWait bounds the wait for a mount to appear or disappear after its plugin has answered OK: some plugins have
// another process mount, and answer before it has done so.
const mountWait = time.Second

// soon polls until holds is true, for mountWait at most. It fails if ctx ends first: what became of the call is then
// not known.
func soon(ctx context.Context, holds func() (bool, error)) (bool, error) {
	const first, most = 10 * time.Millisecond, 100 * time.Millisecond
	end := time.Now().Add(mountWait)
	for pause := first; ; pause = min(2*pause, most) {
		if ok, err := holds(); ok || err != nil || !time.Now().Before(end) {
			return ok, err
		}
		select {
		case <-time.After(min(pause, time.Until(end))):
		case <-ctx.Done():
			return false, context.Cause(ctx)
		}
	}
}

func isNotFound(err error) bool {
	call, ok := errors.AsType[*registry.CallError](err)
	return ok && call.Code == "NOT_FOUND"
}

// lied is the error of a call that the plugin answered OK, while the mount table disagrees.
func lied(rpc registry.RPC, at registry.InstanceKey, format string, args ...any) error {
	return &registry.CallError{
		RPC: rpc, Instance: at, Code: "OK", Outcome: registry.OutcomeFailed, Kind: registry.ErrInternal,
		Detail: fmt.Sprintf(format, args...),
	}
}

func conflict(format string, args ...any) error {
	return registry.Errorf(registry.ErrConflict, format, args...)
}

// told is the event of a call that is done.
func (s *Stager) event(kind registry.EventKind, i registry.Intent, detail string) registry.Event {
	e := intent.Event(kind, i, s.Now())
	e.Detail = detail
	return e
}

// Settle has an open call of a node come to a certain end: by the same call again, which has the same arguments as it
// is made of what was recorded; a publish whose secrets cannot be had any more, or whose stage is gone, is undone
// instead, which needs neither. nil says that it has an end, whichever. Whoever calls it holds the volume's lane.
func (s *Stager) Settle(ctx context.Context, by intent.Caller, open registry.Intent) error {
	return intent.Settled(s.again(ctx, by, open))
}

// again makes the open call once more.
func (s *Stager) again(ctx context.Context, by intent.Caller, open registry.Intent) error {
	st, err := s.state(ctx, open.Volume)
	if err != nil {
		return err
	}
	if open.RPC == registry.NodeExpandRPC {
		_, err := s.Grow(ctx, by, open.Volume, false)
		return err
	}
	inst, err := s.Await(ctx, by, registry.RoleNode, open.Volume.Plugin)
	if err != nil {
		return err
	}
	switch open.RPC {
	case registry.NodeStageRPC:
		return s.stage(ctx, by, st.volume, st.staging.Usage, st, inst)
	case registry.NodeUnstageRPC:
		return s.unstage(ctx, by, st.staging)
	case registry.NodePublishRPC, registry.NodeUnpublishRPC:
		r, found := st.ref(registry.ClaimKey{Volume: open.Volume, Alloc: open.Alloc, Request: open.Request})
		if !found {
			return registry.Errorf(registry.ErrDamaged, "%s, and no record says what was published",
				intent.Describe(open))
		}
		return s.publishAgain(ctx, by, open, st, r, inst)
	}
	return registry.Errorf(registry.ErrInternal, "%s is not a node call", open.RPC)
}

func (s *Stager) publishAgain(
	ctx context.Context, by intent.Caller, open registry.Intent, st state, r registry.Ref, inst registry.Instance,
) error {
	stands, err := s.stands(st)
	if err != nil {
		return err
	}
	if open.RPC == registry.NodePublishRPC && (stands || st.staging.State == registry.MarkNone) {
		_, err := s.publish(ctx, by, st.volume, r, st, inst)
		if _, sent := errors.AsType[*registry.CallError](err); err == nil || sent || ctx.Err() != nil {
			return err
		}
	}
	return s.unpublish(ctx, by, r, open.Name)
}
