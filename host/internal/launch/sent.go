package launch

import (
	"context"

	"google.golang.org/grpc/stats"
)

// onSentKey is the context's key of what is to be done once a call is on its way, a func().
type onSentKey struct{}

// OnSent is ctx for a call after whose way onto the connection f is called: what is sent after that is behind it there. f may be called more
// than once, and from any goroutine; it is not called for a call that was never sent.
func OnSent(ctx context.Context, f func()) context.Context {
	return context.WithValue(ctx, onSentKey{}, f)
}

// sentTeller calls what OnSent has put into a call's context.
type sentTeller struct{}

var _ stats.Handler = sentTeller{}

func (sentTeller) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if _, sent := s.(*stats.OutHeader); !sent {
		return
	}
	if f, asked := ctx.Value(onSentKey{}).(func()); asked {
		f()
	}
}

func (sentTeller) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (sentTeller) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (sentTeller) HandleConn(context.Context, stats.ConnStats)                       {}
