package driver

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/registry"
)

// send makes one call to the instance. What is in hide does not appear in the text of its error.
func (f *Fleet) send(ctx context.Context, rpc registry.RPC, at registry.InstanceKey, hide []string,
	call func(context.Context, grpc.ClientConnInterface) error,
) error {
	c, err := f.of(at)
	if err != nil {
		return failure(rpc, at, status.Error(codes.Unavailable, err.Error()), false, hide)
	}
	if err := c.ready(ctx); err != nil {
		return failure(rpc, at, err, false, hide)
	}
	ctx, letter := posted(ctx)
	err = call(ctx, c.cc)
	if status.Code(err) == codes.ResourceExhausted {
		c.news.Add(1) // its node may be full: what it said of max_volumes_per_node is asked for again
	}
	return failure(rpc, at, err, letter.left.Load(), hide)
}

// ask makes one call that changes nothing.
func (c *Conn) ask(ctx context.Context, rpc registry.RPC, call func(context.Context) error) error {
	err := c.ready(ctx)
	if err == nil {
		err = call(ctx)
	}
	if err == nil {
		return nil
	}
	v, text := judge(err, nil)
	return registry.Errorf(v.kind, "%s: %s: %s", rpc, codeName(err), text)
}
