package csifake

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"holdfast/internal/csifake/journal"
)

// Expect builds a rule: first its conditions, then one action, which installs the rule.
//
//	fake.On("NodeStageVolume").Times(1).After().Code(codes.Internal, "stuck")
type Expect struct {
	plugin *Plugin
	rule   Rule
}

// On begins a rule for an RPC; "" means every RPC.
func (p *Plugin) On(rpc string) Expect { return Expect{plugin: p, rule: Rule{RPC: rpc}} }

func (e Expect) Volume(id string) Expect        { e.rule.Volume = id; return e }
func (e Expect) Nth(n int) Expect               { e.rule.Nth = n; return e }
func (e Expect) Times(n int) Expect             { e.rule.Times = n; return e }
func (e Expect) After() Expect                  { e.rule.When = After; return e }
func (e Expect) Middle() Expect                 { e.rule.When = Middle; return e }
func (e Expect) Delayed(d time.Duration) Expect { e.rule.Delay = Duration(d); return e }

// Code makes the call fail with a code. With After and codes.OK, the answer stays OK.
func (e Expect) Code(c codes.Code, message string) {
	e.rule.Code, e.rule.Message = journal.CodeName(uint32(c)), message
	e.install()
}

// Drop cuts the connection of the caller.
func (e Expect) Drop() { e.rule.Drop = true; e.install() }

// Rule installs any rule, for the chosen calls.
func (e Expect) Rule(r Rule) {
	r.RPC, r.Volume, r.Nth, r.Times, r.When = e.rule.RPC, e.rule.Volume, e.rule.Nth, e.rule.Times, e.rule.When
	e.rule = r
	e.install()
}

// IgnoreSource makes CreateVolume ignore the source of the volume.
func (e Expect) IgnoreSource() { e.rule.IgnoreSource = true; e.install() }

// BadUTF8 makes the strings of the answer invalid UTF-8.
func (e Expect) BadUTF8() { e.rule.BadUTF8 = true; e.install() }

// Delay delays the call and changes nothing else.
func (e Expect) Delay(d time.Duration) { e.Delayed(d).install() }

// Hang makes the call hang until its caller gives up.
func (e Expect) Hang() { e.rule.Hang = UntilCancelled; e.install() }

// HangForEver makes the call hang until the plugin ends.
func (e Expect) HangForEver() { e.rule.Hang = ForEver; e.install() }

// Crash kills the plugin.
func (e Expect) Crash() { e.rule.Crash = true; e.install() }

// NotReady makes Probe answer that the plugin is still starting.
func (e Expect) NotReady() { e.rule.NotReady = true; e.install() }

// Answer rewrites the answer.
func (e Expect) Answer(f Answer) { e.rule.Answer = f; e.install() }

// Reply answers with the given reply or error, whatever the plugin has done.
func (e Expect) Reply(reply proto.Message, err error) {
	e.Answer(func(context.Context, proto.Message, proto.Message, error) (proto.Message, error) { return reply, err })
}

// Hold stops calls at the gate until it is opened. If a caller goes away, its call still waits, so the effect may come
// late.
func (e Expect) Hold() *Gate {
	e.rule.gate = &Gate{arrived: make(chan struct{}), open: make(chan struct{})}
	e.install()
	return e.rule.gate
}

// install installs the rule. It panics if the rule is invalid, because that is a mistake in the test.
func (e Expect) install() {
	if err := e.rule.check(); err != nil {
		panic(err)
	}
	e.plugin.script.add(e.rule)
}

// Gate stops calls until it is opened.
type Gate struct {
	first, once   sync.Once
	arrived, open chan struct{}
}

// Arrived returns a channel that is closed when the first call waits at the gate.
func (g *Gate) Arrived() <-chan struct{} { return g.arrived }

// Open lets all calls at the gate continue, and all later ones.
func (g *Gate) Open() { g.once.Do(func() { close(g.open) }) }

func (g *Gate) wait(gone <-chan struct{}) {
	g.first.Do(func() { close(g.arrived) })
	select {
	case <-g.open:
	case <-gone:
	}
}

// hang waits until the plugin ends. If the rule says UntilCancelled, it also ends with the context.
func (r *Rule) hang(ctx context.Context, gone <-chan struct{}) error {
	var cancelled <-chan struct{}
	if r.Hang == UntilCancelled {
		cancelled = ctx.Done()
	}
	select {
	case <-cancelled:
		return context.Cause(ctx)
	case <-gone:
		return errGone
	}
}
