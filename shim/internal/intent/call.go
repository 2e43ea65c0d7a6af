package intent

import (
	"context"
	"fmt"
	"time"

	"holdfast/registry"
)

// Caller identifies the host operation that makes CSI calls, and limits their retries.
type Caller struct {
	registry.Call           // the host's operation; zero: none
	RetryUntil    time.Time // no try begins and no wait for a plugin continues after this time; zero: no limit
}

// WaitContext returns a context for waits, which ends at RetryUntil. A call under way has its own deadline instead.
func (c Caller) WaitContext(ctx context.Context) (context.Context, context.CancelFunc) {
	if c.RetryUntil.IsZero() {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, c.RetryUntil)
}

// Call is one CSI call to send.
type Call struct {
	// Intent identifies the call: Volume, Name, RPC, Hash, and optionally Alloc, Request, Node, Operation and At. Send
	// sets the other fields.
	Intent registry.Intent
	// Before is part of the commit that opens the intent, and sets marks to Sent. If it fails, Send returns its error
	// and sends nothing. For an open call it first runs without a commit, so it must have no side effects. It may be
	// nil.
	Before func(registry.View) (registry.Change, error)
	// Select returns the task that gets the next try. It runs before each try. If the task is not Intent.At, that is
	// recorded before the call is sent there. If Select is nil, all tries go to Intent.At.
	Select func(context.Context) (registry.TaskKey, error)
	// Do sends the call. The contexts of Do and Select end with the policy's deadline.
	Do func(context.Context) error
	// Renew replaces parts of the request that may have changed since the last try, such as secrets. It runs before
	// each further try, and its context ends after Grace. It may be nil.
	Renew func(context.Context)
	// Done is part of the commit that closes the intent after Do returned nil. It may be nil.
	Done func(registry.View) registry.Change
	// Then are further decisions for the commit of Done, if this call is the last. They only save a commit: Send does
	// not return their refusal, so the caller of Send decides again (registry.Ensure).
	Then []registry.Decision
	// Failed is part of the commit that closes the intent after the call has certainly failed. clean means that no
	// earlier try of the call may have had an effect. Failed may be nil.
	Failed func(view registry.View, err *registry.CallError, clean bool) registry.Change
	// What is the purpose of the call, for errors, such as "stage volume v1". It may be empty.
	What string
	// RepeatAfter is the delay until the owner of the call sends an uncertain call again, for display; 0: unknown.
	RepeatAfter time.Duration
	// RetryUntil is as in Caller.
	RetryUntil time.Time
	// Policy is the retry policy. The zero value selects PolicyOf(Intent.RPC).
	Policy Policy
}

// explain returns the error with the purpose of the call.
func (c Call) explain(err error) error {
	if err == nil || c.What == "" {
		return err
	}
	return fmt.Errorf("%s: %w", c.What, err)
}
