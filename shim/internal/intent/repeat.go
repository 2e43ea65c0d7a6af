package intent

import (
	"context"
	"slices"

	"holdfast/registry"
)

// repeat repeats once a call that this node has begun as a former executor.
func (s Sender) repeat(ctx context.Context, c Call) error {
	if c.Intent.RPC != s.Late.RPC || c.Intent.Hash != s.Late.Hash {
		return registry.Errorf(registry.ErrConflict, "%s of %s cannot be repeated: its volume has changed",
			s.Late.RPC, s.Late.For)
	}
	return s.Repeat(ctx, c.Intent.Volume.Plugin, *s.Late, c.Do)
}

// Repeat repeats once a call that this node has begun as a former executor. It returns nil if the plugin's answer shows
// that the call has ended there. A repeated call continues where the first one was (CSI spec, "Timeouts").
func (s Sender) Repeat(
	ctx context.Context, plugin registry.PluginID, late registry.LateCall, do func(context.Context) error,
) error {
	if err := s.Pause.Wait(ctx, ""); err != nil {
		return err
	}
	if s.Executors != nil {
		if err := s.Executors.Repeating(ctx, plugin, late); err != nil {
			return err
		}
	}
	ctx, end := drained(ctx, s.Drain, PolicyOf(late.RPC).Deadline)
	defer end()
	err := callError(late.RPC, do(ctx))
	if err == nil || Ends(err) {
		return nil
	}
	return err
}

// ended returns the change for a call with a certain outcome. It records the former executors where the call may still
// run.
func (d *delivery) ended(view registry.View, failed bool) registry.Change {
	open, _ := d.OpenCall(view, d.Intent)
	if len(open.Senders) == 0 {
		return registry.Change{}
	}
	late := view.LateCallOf(open)
	late.Failed = failed
	return view.Ended(late, open.Senders)
}

// storeTry stores the task and the sender of the next try.
func (d *delivery) storeTry(ctx context.Context, at registry.TaskKey) error {
	next := d.Intent
	next.At = at
	err := d.store(ctx, func(view registry.View) registry.Change {
		open, _ := d.OpenCall(view, d.Intent) // another node may have sent it since
		next.Senders = WithSender(open.Senders, d.sender)
		return registry.Change{Put: []registry.Record{next}}
	})
	if err == nil {
		d.Intent = next
	}
	return err
}

// checkSend returns an error if the call must not be sent. While this node was not the executor, another node may have
// begun a call for the volume.
func (d *delivery) checkSend(ctx context.Context) error {
	if d.sender == "" {
		return nil
	}
	return d.State.View(ctx, func(view registry.View) error {
		if !d.owns(view) {
			return d.forgotten()
		}
		executor, err := d.executor(view)
		if err != nil {
			return err
		}
		if open, _ := d.OpenCall(view, d.Intent); !slices.Contains(open.Senders, d.sender) {
			d.Intent.Senders = open.Senders // a commit without a known outcome was carried out; the next try adds it
			return registry.Errorf(registry.ErrUnavailable, "the record of %s of %s has changed", open.RPC, open.Name)
		}
		return view.Blocks(executor, d.Intent)
	})
}
