package csi

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/stats"
	"google.golang.org/protobuf/proto"
)

// ear hears of a connection what its calls do not tell: that it was made, and whether a request has left.
type ear struct{ conn *Conn }

var _ stats.Handler = ear{}

// letter is one request. left is set once the request was handed to the transport, after which the plugin may read it.
// answered is set once the plugin's own status has come, which ends the answer.
type letter struct{ left, answered atomic.Bool }

type letterKey struct{}

// posted is ctx for one call, with the letter that tells whether its request has left. Without a message no handler of a plugin runs.
func posted(ctx context.Context) (context.Context, *letter) {
	l := &letter{}
	return context.WithValue(ctx, letterKey{}, l), l
}

func (ear) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

func (e ear) HandleRPC(ctx context.Context, s stats.RPCStats) {
	l, _ := ctx.Value(letterKey{}).(*letter)
	switch s := s.(type) {
	case *stats.OutPayload:
		if l != nil {
			l.left.Store(true)
		}
	case *stats.InTrailer:
		if l != nil {
			l.answered.Store(true)
		}
	case *stats.End:
		if s.Error != nil && ctx.Err() != nil {
			e.conn.cut.Store(time.Now().UnixNano())
		}
	}
}

func (ear) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

func (e ear) HandleConn(_ context.Context, s stats.ConnStats) {
	if _, ok := s.(*stats.ConnBegin); ok {
		e.conn.news.Add(1)
	}
}

// exact encodes equal messages as equal bytes: a call that is sent again, by whatever generation, is the same call.
type exact struct{}

var _ encoding.CodecV2 = exact{}

func (exact) Name() string { return "proto" }

func (exact) Marshal(v any) (mem.BufferSlice, error) {
	m, ok := v.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("%T is no message", v)
	}
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return nil, err
	}
	return mem.BufferSlice{mem.SliceBuffer(b)}, nil
}

func (exact) Unmarshal(data mem.BufferSlice, v any) error {
	a, ok := v.(*answer)
	if !ok {
		return fmt.Errorf("%T is no answer", v)
	}
	a.err = proto.Unmarshal(data.Materialize(), a.into)
	return a.err
}
