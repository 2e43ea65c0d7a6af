package csifake

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"holdfast/internal/csifake/journal"
)

// poll is the interval at which a rule checks for the file that it waits for.
const poll = 2 * time.Millisecond

// errCut ends a call whose connection the plugin has cut. Its caller gets UNAVAILABLE too.
var errCut = status.Error(codes.Unavailable, "csifake: the connection was cut")

// runCall handles a call between its begin and its end.
func (p *Plugin) runCall(c *call, do effect) (proto.Message, error) {
	release, err := p.reserve(c)
	if err != nil {
		return nil, err
	}
	if c.acts, err = p.script.match(c.line.RPC, c.line.Volume); err != nil {
		release()
		return nil, status.Error(codes.Internal, err.Error())
	}
	defer release()
	reply, err := proto.Message(nil), p.runRule(c, c.acts[Before])
	if err == nil {
		if reply, err = p.applyEffect(c, do); err == nil {
			err = p.runRule(c, c.acts[After])
		}
	}
	if err != nil {
		reply = nil
	}
	return p.rewrite(c, reply, err)
}

// reserve refuses a call that would change a volume or snapshot while another call changes it.
func (p *Plugin) reserve(c *call) (release func(), err error) {
	var held []func()
	release = func() {
		for _, one := range held {
			one()
		}
	}
	if !journal.Mutates(c.line.RPC) {
		return release, nil
	}
	ids := slices.Concat(c.line.AllVolumes(), c.line.Snapshots)
	if c.line.Snapshot != "" {
		ids = append(ids, c.line.Snapshot)
	}
	for _, id := range ids {
		one, free := p.cfg.Backend.reserve(id, p)
		if !free {
			release()
			return nil, status.Errorf(codes.Aborted, "an operation for %q is running", id)
		}
		held = append(held, one)
	}
	return release, nil
}

// applyEffect lets the call take effect, unless the plugin is dead or lacks the required capability.
func (p *Plugin) applyEffect(c *call, do effect) (proto.Message, error) {
	if needs := journal.Needs(c.line.RPC); needs != "" && needs != "service/CONTROLLER_SERVICE" && !p.caps.has(needs) {
		return nil, status.Errorf(codes.Unimplemented, "%s is not implemented", c.line.RPC)
	}
	p.effects.RLock()
	defer p.effects.RUnlock()
	if p.dead {
		return nil, errGone
	}
	reply, err := do(context.WithValue(context.WithoutCancel(c.ctx), callKey{}, c))
	c.effect = err == nil
	return reply, err
}

// runMiddleRule runs the rule for the moment after the first of two steps. It releases p.effects meanwhile, because
// Kill must not wait for the rule.
func (p *Plugin) runMiddleRule(c *call) error {
	if c.acts[Middle] == nil {
		return nil
	}
	p.effects.RUnlock()
	err := p.runRule(c, c.acts[Middle])
	p.effects.RLock()
	if err == nil && p.dead {
		err = errGone
	}
	return err
}

// runRule runs the actions of a rule.
func (p *Plugin) runRule(c *call, r *Rule) error {
	if r == nil {
		return nil
	}
	if err := p.runDelays(c.ctx, r); err != nil {
		return err
	}
	if r.Drop {
		return p.drop(c)
	}
	if r.Crash {
		p.crash()
		return errGone
	}
	return r.failure()
}

// runDelays runs the actions that take time.
func (p *Plugin) runDelays(ctx context.Context, r *Rule) error {
	if r.gate != nil {
		r.gate.wait(p.ended)
	}
	if r.Delay > 0 {
		p.pause(time.Duration(r.Delay))
	}
	for r.Until != "" && !exists(r.Until) && p.pause(poll) {
	}
	if r.Hang == "" {
		return nil
	}
	if err := r.hang(ctx, p.ended); errors.Is(err, errGone) {
		return err
	}
	return status.FromContextError(ctx.Err()).Err()
}

// drop cuts the connection of a call. From then on all callers of this connection count as gone, even if their calls
// notice it later.
func (p *Plugin) drop(c *call) error {
	if c.cut == nil {
		return errCut
	}
	p.mu.Lock()
	for other := range p.open {
		if other.line.Conn == c.line.Conn {
			p.noteAbandoned(other)
		}
	}
	c.cut()
	p.mu.Unlock()
	select {
	case <-c.ctx.Done():
	case <-p.ended:
	}
	return errCut
}

// failure returns the status that a rule demands, or nil.
func (r *Rule) failure() error {
	code, ok := journal.CodeNumber(r.Code)
	if !ok || code == 0 {
		return nil
	}
	return status.Error(codes.Code(code), r.Message)
}

func (p *Plugin) crash() {
	if p.cfg.Die != nil {
		p.cfg.Die()
	}
	p.Kill()
}

// pause waits, and then reports whether the plugin still runs.
func (p *Plugin) pause(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-p.ended:
		return false
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func invalid(format string, args ...any) error {
	return status.Error(codes.InvalidArgument, fmt.Sprintf(format, args...))
}

// rewrite changes the true answer as the rules demand.
func (p *Plugin) rewrite(c *call, reply proto.Message, err error) (proto.Message, error) {
	for _, r := range []*Rule{c.acts[Before], c.acts[After]} {
		if r == nil {
			continue
		}
		if err == nil && r.NotReady {
			reply = notReady(reply)
		}
		if err == nil && r.Unconfirmed {
			reply = &csi.ValidateVolumeCapabilitiesResponse{Message: "the volume cannot be used like this"}
		}
		if err == nil && r.BadUTF8 {
			reply = garble(reply)
		}
		if r.Answer != nil {
			reply, err = r.Answer(c.ctx, c.req, reply, err)
		}
	}
	return reply, err
}

func notReady(reply proto.Message) proto.Message {
	switch r := reply.(type) {
	case *csi.ProbeResponse:
		return &csi.ProbeResponse{Ready: wrapperspb.Bool(false)}
	case *csi.CreateSnapshotResponse:
		r.Snapshot.ReadyToUse = false
	case *csi.CreateVolumeGroupSnapshotResponse:
		r.GroupSnapshot.ReadyToUse = false
	case *csi.GetVolumeGroupSnapshotResponse:
		r.GroupSnapshot.ReadyToUse = false
	}
	return reply
}
