package driver

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/registry"
)

// send makes one call to the instance. What v says, and what the plugin was ever sent, does not appear in the text of its error.
func (f *Fleet) send(ctx context.Context, rpc registry.RPC, at registry.InstanceKey, v veil,
	call func(context.Context, grpc.ClientConnInterface) error,
) error {
	f.learn(at.Plugin, v)
	c, in, err := f.of(at)
	if err != nil {
		return failure(rpc, at, status.Error(codes.Unavailable, err.Error()), false, v.words())
	}
	left, err := c.deliver(ctx, in, call)
	if err == nil {
		return nil
	}
	switch status.Code(err) {
	case codes.ResourceExhausted, // its node may be full: what it said of max_volumes_per_node is asked for again
		codes.Unimplemented: // it announced what it does not know: it may be another process, of another version
		c.news.Add(1)
	}
	words, all := f.unsaid(at.Plugin, v, left)
	if all {
		err = status.Error(status.Code(err), withheld)
	}
	return failure(rpc, at, err, left, words)
}

// again is how often a call is begun anew at most whose connection is lost before it has left.
const again = 3

// deliver meets the plugin and makes the call over the same connection. left: it may have been read at the other end.
func (c *Conn) deliver(ctx context.Context, in registry.Instance, call func(context.Context, grpc.ClientConnInterface) error) (left bool, err error) {
	for range again {
		made := c.made.Load()
		if left, err = c.deliverOnce(ctx, in, call); err == nil || left || c.made.Load() == made {
			break
		}
	}
	return left, err
}

func (c *Conn) deliverOnce(ctx context.Context, in registry.Instance, call func(context.Context, grpc.ClientConnInterface) error) (left bool, err error) {
	line, err := c.meet(ctx, in)
	if err != nil {
		return false, err
	}
	ctx, letter := posted(over(ctx, line))
	err = call(ctx, c.cc)
	return letter.left.Load(), err
}

// withheld stands for the text of a plugin that may tell secrets which are not known now.
const withheld = "what the plugin says is withheld: the volume has secrets, and they could not be had to keep them out of it"

// unsaid is what must not appear in the plugin's text, if it may have said one; all: nothing of it may.
func (f *Fleet) unsaid(id registry.PluginID, v veil, said bool) (words []string, all bool) {
	if said && v.more != nil {
		more, unknown := v.more()
		if unknown {
			return nil, true
		}
		words = more.words()
	}
	return append(words, append(v.words(), f.remembered(id)...)...), false
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
	text, kind := judge(err, c.hide())
	return registry.Errorf(kind, "%s: %s: %s", rpc, codeName(err), text)
}
