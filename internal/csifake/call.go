package csifake

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"holdfast/internal/csifake/journal"
)

// farewell is how long a call waits to hear that the caller of another call for the same volume has gone: a lost
// connection is noticed by another goroutine. A caller that is still there then has two calls in flight.
const farewell = 50 * time.Millisecond

// poll is how often a rule looks for the file that it waits for.
const poll = 2 * time.Millisecond

// call is one call that runs.
type call struct {
	ctx    context.Context
	req    proto.Message
	line   journal.Line // its begin
	effect bool
	gone   bool          // the journal says that the caller has gone
	done   chan struct{} // closed as it ends
	unhook func() bool
}

type effect func(context.Context) (proto.Message, error)

// roles of the services of CSI, by the name of the service.
var roles = map[string]string{"csi.v1.Identity": "identity", "csi.v1.Controller": "controller",
	"csi.v1.GroupController": "group", "csi.v1.SnapshotMetadata": "metadata", "csi.v1.Node": "node"}

func (p *Plugin) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (
	any, error,
) {
	message, ok := req.(proto.Message)
	if !ok {
		return nil, status.Error(codes.Internal, "csifake: not a proto message")
	}
	return p.handle(ctx, info.FullMethod, message, func(ctx context.Context) (proto.Message, error) {
		reply, err := next(ctx, req)
		if err != nil {
			return nil, err
		}
		return reply.(proto.Message), nil
	})
}

// unknown answers calls to services that this plugin does not serve: they are in the journal too.
func (p *Plugin) unknown(_ any, s grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(s)
	_, err := p.handle(s.Context(), method, &csi.ProbeRequest{}, func(context.Context) (proto.Message, error) {
		return nil, status.Errorf(codes.Unimplemented, "csifake: %s is not served", method)
	})
	return err
}

// handle is the whole of one call: journal, script, capabilities, effect, script, answer, journal.
func (p *Plugin) handle(ctx context.Context, method string, req proto.Message, do effect) (proto.Message, error) {
	c := &call{ctx: ctx, req: req, done: make(chan struct{})}
	c.line = journal.Line{Kind: journal.Begin, RPC: path.Base(method), Role: roles[path.Base(path.Dir(method))]}
	fields(&c.line, req)
	if c.line.Role == "node" {
		c.line.Node = p.cfg.NodeID
	}
	if from, ok := peer.FromContext(ctx); ok {
		if addr, ok := from.Addr.(peerAddr); ok {
			c.line.Peer, c.line.Conn = addr.pid, addr.conn
		}
	}
	if !p.cfg.Blind {
		c.line.Look = look(c.line)
	}
	if !p.arrive(c) {
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	reply, err := p.play(c, do)
	return p.leave(c, reply, err)
}

// arrive writes the begin of a call, after the farewells of the calls whose callers have gone. It is false for a call whose own caller has
// gone before its turn came: a later call of that caller may have overtaken it, and it must not take effect after that one.
func (p *Plugin) arrive(c *call) bool {
	beside := p.companions(c)
	deadline := time.NewTimer(farewell)
	defer deadline.Stop()
	for _, other := range beside {
		select {
		case <-other.done:
		case <-other.ctx.Done():
		case <-deadline.C:
			deadline.Reset(0)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for other := range p.open {
		p.farewell(other)
	}
	if c.ctx.Err() != nil {
		return false
	}
	for _, other := range beside {
		if !other.gone {
			c.line.Beside = append(c.line.Beside, other.line.Call)
		}
	}
	p.numbers++
	p.open[c] = true
	c.line.Call, c.line.Flight = p.numbers, len(p.open)
	p.note(c.line)
	c.unhook = context.AfterFunc(c.ctx, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.farewell(c)
	})
	return true
}

// companions are the running calls for the same volume.
func (p *Plugin) companions(c *call) []*call {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []*call
	for other := range p.open {
		same := c.line.Volume != "" && other.line.Volume == c.line.Volume ||
			c.line.RPC == "CreateVolume" && other.line.RPC == "CreateVolume" && other.line.Name == c.line.Name
		if same && other.ctx.Err() == nil {
			all = append(all, other)
		}
	}
	return all
}

// farewell writes that the caller of a running call has gone, once. p.mu is held.
func (p *Plugin) farewell(c *call) {
	if c.gone || !p.open[c] || c.ctx.Err() == nil {
		return
	}
	c.gone = true
	p.note(journal.Line{Kind: journal.Abandoned, Call: c.line.Call, RPC: c.line.RPC, Volume: c.line.Volume})
}

// note writes a line, unless the plugin was killed.
func (p *Plugin) note(l journal.Line) {
	p.alive.RLock()
	defer p.alive.RUnlock()
	if !p.dead {
		p.write(l)
	}
}

// leave writes the end of a call and lets the answer go.
func (p *Plugin) leave(c *call, reply proto.Message, err error) (proto.Message, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.farewell(c)
	c.unhook()
	delete(p.open, c)
	close(c.done)
	end := journal.Line{Kind: journal.End, Call: c.line.Call, RPC: c.line.RPC, Role: c.line.Role, Volume: c.line.Volume,
		Code: journal.CodeName(uint32(status.Code(err))), Effect: c.effect}
	if err == nil {
		end.Answer = p.answered(c.line.RPC, reply)
	}
	p.note(end)
	return reply, err
}

// play is what happens between begin and end.
func (p *Plugin) play(c *call, do effect) (proto.Message, error) {
	if release, err := p.reserve(c); err != nil {
		return nil, err
	} else {
		defer release()
	}
	before, after, err := p.script.match(c.line.RPC, c.line.Volume)
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	reply, err := proto.Message(nil), p.act(c, before)
	if err == nil {
		if reply, err = p.take(c, do); err == nil {
			err = p.act(c, after)
		}
	}
	if err != nil {
		reply = nil
	}
	if before != nil && before.NotReady && c.line.RPC == "Probe" && err == nil {
		reply = &csi.ProbeResponse{Ready: wrapperspb.Bool(false)}
	}
	for _, r := range []*Rule{before, after} {
		if r != nil && r.Answer != nil {
			reply, err = r.Answer(c.ctx, c.req, reply, err)
		}
	}
	return reply, err
}

// reserve turns a call away that would change a volume while another call does.
func (p *Plugin) reserve(c *call) (release func(), err error) {
	if c.line.Volume == "" || !journal.Mutates(c.line.RPC) {
		return func() {}, nil
	}
	release, free := p.cfg.Backend.reserve(c.line.Volume)
	if !free {
		return nil, status.Errorf(codes.Aborted, "an operation for volume %q is running", c.line.Volume)
	}
	return release, nil
}

// take lets the call take effect, if the plugin lives and has what the call needs.
func (p *Plugin) take(c *call, do effect) (proto.Message, error) {
	if needs := journal.Needs(c.line.RPC); needs != "" && needs != "service/CONTROLLER_SERVICE" && !p.caps.has(needs) {
		return nil, status.Errorf(codes.Unimplemented, "%s is not implemented", c.line.RPC)
	}
	p.alive.RLock()
	defer p.alive.RUnlock()
	if p.dead {
		return nil, errGone
	}
	reply, err := do(context.WithoutCancel(c.ctx))
	c.effect = err == nil
	return reply, err
}

// act does what a rule says.
func (p *Plugin) act(c *call, r *Rule) error {
	if r == nil {
		return nil
	}
	if r.gate != nil {
		r.gate.wait(p.ended)
	}
	if r.Delay > 0 {
		p.pause(time.Duration(r.Delay))
	}
	for r.Until != "" && !exists(r.Until) && p.pause(poll) {
	}
	if r.Hang != "" {
		if err := r.hang(c.ctx, p.ended); errors.Is(err, errGone) {
			return err
		} else if err != nil {
			return status.FromContextError(c.ctx.Err()).Err()
		}
	}
	if r.Crash {
		p.crash()
		return errGone
	}
	if code, ok := journal.CodeNumber(r.Code); ok && code != 0 {
		return status.Error(codes.Code(code), r.Message)
	}
	return nil
}

func (p *Plugin) crash() {
	if p.cfg.Die != nil {
		p.cfg.Die()
	}
	p.Kill()
}

// pause waits, and says whether the plugin still goes on.
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
