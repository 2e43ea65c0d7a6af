package csi

import (
	"context"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/registry"
)

// send makes one call to the instance. What v says, and what the plugin was ever sent, does not appear in the text of its error.
func (f *Fleet) send(ctx context.Context, rpc registry.RPC, at registry.InstanceKey, v veil,
	call func(context.Context, grpc.ClientConnInterface) error,
) error {
	m := f.memory(at.Plugin)
	m.learn(v.words)
	c, in, err := f.of(at)
	if err != nil {
		return failure(rpc, at, status.Error(codes.Unavailable, err.Error()), false, m.redactor(v.words))
	}
	l, err := c.deliver(ctx, in, call)
	if err == nil {
		return nil
	}
	switch status.Code(err) {
	case codes.ResourceExhausted, // its node may be full: what it said of max_volumes_per_node is asked for again
		codes.Unimplemented: // it announced what it does not know: it may be another process, of another version
		c.news.Add(1)
	}
	left := l.left.Load()
	masks, all := m.unsaid(v, left)
	switch {
	case all && isUnreadable(err):
		err = &unreadable{withheld}
	case all:
		err = status.Error(status.Code(err), withheld)
	}
	e := failure(rpc, at, err, left, masks)
	e.Lost = left && !l.answered.Load() && status.Code(err) == codes.Unavailable
	return e
}

// again is how often a call is begun anew at most whose connection is lost before it has left.
const again = 3

// deliver meets the plugin and makes the call over the same connection. The letter says whether it may have been read at the other end.
func (c *Conn) deliver(ctx context.Context, in registry.Instance, call func(context.Context, grpc.ClientConnInterface) error) (l *letter, err error) {
	for range again {
		made := c.made.Load()
		if l, err = c.deliverOnce(ctx, in, call); err == nil || l.left.Load() || c.made.Load() == made {
			break
		}
	}
	return l, err
}

func (c *Conn) deliverOnce(ctx context.Context, in registry.Instance, call func(context.Context, grpc.ClientConnInterface) error) (*letter, error) {
	line, err := c.meet(ctx, in)
	if err != nil {
		return &letter{}, err
	}
	ctx, l := posted(over(ctx, line))
	return l, call(ctx, c.cc)
}

// withheld stands for the text of a plugin that may tell secrets which are not known now.
const withheld = "what the plugin says is withheld: the volume has secrets, and they could not be had to keep them out of it"

// unsaid masks what must not appear in the plugin's text, if it may have said one; all: nothing of it may be shown.
func (m *memory) unsaid(v veil, said bool) (masks *strings.Replacer, all bool) {
	words := v.words
	if said && v.more != nil {
		more, unknown := v.more()
		if unknown {
			return nil, true
		}
		words = append(words[:len(words):len(words)], more.words...)
	}
	return m.redactor(words), false
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
	text, kind := judge(err, c.sent.redactor(nil))
	return registry.Errorf(kind, "%s: %s: %s", rpc, codeName(err), text)
}
