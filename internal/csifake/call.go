package csifake

import (
	"context"
	"errors"
	"os"
	"path"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"holdfast/internal/csifake/journal"
)

// lostCallerWait bounds how long a call waits to learn that the caller of another call for the same volume is gone. A
// lost connection is noticed by another goroutine, and late on a busy machine. After this wait, the two calls count as
// in flight together.
const lostCallerWait = 2 * time.Second

// call is a running call.
type call struct {
	ctx    context.Context
	req    proto.Message
	line   journal.Line // the line of its begin
	acts   acts
	cut    func() // cuts the connection over which it came
	effect bool
	gone   bool          // the journal has the line that the caller is gone
	done   chan struct{} // closed when the call ends
	unhook func() bool
}

type effect func(context.Context) (proto.Message, error)

type callKey struct{}

// callOf returns the call to which a context belongs.
func callOf(ctx context.Context) *call {
	if c, ok := ctx.Value(callKey{}).(*call); ok {
		return c
	}
	return &call{}
}

// ignoresSource reports whether a rule makes CreateVolume ignore the source of the volume.
func (c *call) ignoresSource() bool { return c.acts[Before] != nil && c.acts[Before].IgnoreSource }

func (p *Plugin) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (
	any, error,
) {
	message, ok := req.(proto.Message)
	if !ok {
		return nil, status.Error(codes.Internal, "csifake: not a proto message")
	}
	return p.handle(ctx, info.FullMethod, message, func(ctx context.Context) (proto.Message, error) {
		reply, err := next(ctx, p.version.requestFor(message))
		if err != nil {
			return nil, err
		}
		return p.version.reply(reply.(proto.Message)), nil
	})
}

// unknown answers calls of methods that this plugin does not serve or that CSI does not have. A plugin of a future
// version returns the request as its answer.
func (p *Plugin) unknown(_ any, s grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(s)
	if !p.version.future() { // the journal must have calls of services that are not served, too
		_, err := p.handle(s.Context(), method, &csi.ProbeRequest{}, func(context.Context) (proto.Message, error) {
			return nil, status.Errorf(codes.Unimplemented, "csifake: %s is not served", method)
		})
		return err
	}
	var request emptypb.Empty // keeps fields of any type
	if err := s.RecvMsg(&request); err != nil {
		return err
	}
	reply, err := p.handle(s.Context(), method, &request, func(context.Context) (proto.Message, error) {
		return &request, nil
	})
	if err != nil {
		return err
	}
	return s.SendMsg(reply)
}

// handle serves one call: journal, script, capabilities, effect, script, answer, journal.
func (p *Plugin) handle(ctx context.Context, method string, req proto.Message, do effect) (proto.Message, error) {
	c := &call{ctx: ctx, req: req, done: make(chan struct{})}
	c.line = journal.Line{Kind: journal.Begin, RPC: path.Base(method), Role: roles[path.Base(path.Dir(method))]}
	fields(&c.line, req)
	if c.line.Role == "node" {
		c.line.Node = p.cfg.NodeID
	}
	if from, ok := peer.FromContext(ctx); ok {
		if addr, ok := from.Addr.(peerAddr); ok {
			c.line.Peer, c.line.Conn, c.cut = addr.pid, addr.conn, addr.cut
		}
	}
	if !p.cfg.Blind {
		c.line.Look = look(c.line)
	}
	if !p.recordBegin(c) {
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	reply, err := p.runCall(c, do)
	return p.recordEnd(c, reply, err)
}

// recordBegin writes the begin of a call, after it has noted which other callers are gone. It returns false if the
// caller of c is gone already. A later call of that caller may then have overtaken c, so c must not take effect after
// it.
func (p *Plugin) recordBegin(c *call) bool {
	beside := p.overlapping(c)
	deadline := time.NewTimer(lostCallerWait)
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
		p.noteLostCaller(other)
	}
	if c.ctx.Err() != nil {
		return false
	}
	for _, other := range beside {
		if !other.gone && !other.callerDied() {
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
		p.noteLostCaller(c)
	})
	return true
}

// overlapping returns the running calls for the same volume.
func (p *Plugin) overlapping(c *call) []*call {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []*call
	for other := range p.open {
		same := slices.ContainsFunc(c.line.AllVolumes(),
			func(id string) bool { return slices.Contains(other.line.AllVolumes(), id) }) ||
			c.line.RPC == "CreateVolume" && other.line.RPC == "CreateVolume" && other.line.Name == c.line.Name
		if same && other.ctx.Err() == nil {
			all = append(all, other)
		}
	}
	return all
}

// noteLostCaller writes once that the caller of a running call is gone, if it is. p.mu has to be held.
func (p *Plugin) noteLostCaller(c *call) {
	if p.open[c] && (c.ctx.Err() != nil || c.callerDied()) {
		p.noteAbandoned(c)
	}
}

// callerDied reports whether the caller is another process that is dead. gRPC may notice the end of its connection only
// later.
func (c *call) callerDied() bool {
	return c.line.Peer > 0 && c.line.Peer != os.Getpid() && errors.Is(unix.Kill(c.line.Peer, 0), unix.ESRCH)
}

// noteAbandoned writes once that the caller of a call is gone. p.mu has to be held.
func (p *Plugin) noteAbandoned(c *call) {
	if c.gone {
		return
	}
	c.gone = true
	p.note(journal.Line{Kind: journal.Abandoned, Call: c.line.Call, RPC: c.line.RPC, Volume: c.line.Volume})
}

// note writes a line, unless the plugin was killed.
func (p *Plugin) note(l journal.Line) {
	p.effects.RLock()
	defer p.effects.RUnlock()
	if !p.dead {
		p.write(l)
	}
}

// recordEnd writes the end of a call and returns the answer to send.
func (p *Plugin) recordEnd(c *call, reply proto.Message, err error) (proto.Message, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.noteLostCaller(c)
	c.unhook()
	delete(p.open, c)
	close(c.done)
	end := journal.Line{Kind: journal.End, Call: c.line.Call, RPC: c.line.RPC, Role: c.line.Role, Volume: c.line.Volume,
		Code: journal.CodeName(uint32(status.Code(err))), Effect: c.effect}
	if err == nil {
		end.Lost = unreadable(reply)
	}
	if err == nil && !end.Lost {
		end.Answer = answered(c.req, reply)
	}
	p.note(end)
	if p.killed.Load() {
		return nil, errGone // a killed plugin sends no answer
	}
	return reply, err
}
