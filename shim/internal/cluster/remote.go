package cluster

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Remote passes calls to the executors of their plugins, through records. A call continues if its caller is gone. If
// the executor dies, the call continues at the next one.
type Remote struct {
	state     *State
	executors *Executors
	// serve carries out a call on this node. A call with the ID of an earlier one joins it or gets its answer.
	// intent.ErrReleased: this shim is being replaced, and the call has no answer.
	serve func(ctx context.Context, method string, request []byte) (reply []byte, err error)
	log   hclog.Logger

	running running[registry.OperationID]
}

// ErrHere means that this node is the executor of a plugin.
var ErrHere = errors.New("this node is the executor")

// Repetition says how a caller repeats a call with the same ID.
type Repetition int

const (
	// UntilDone joins the call until a caller has taken its answer.
	UntilDone Repetition = iota
	// UntilAnswered also stores the reply for Replay, because this shim may die before its caller has the reply.
	UntilAnswered
	// Anew joins the call while it is carried out, and makes a new one if the call has an answer: the answer belongs to
	// an earlier call.
	Anew
)

// Call makes the executor of the call's plugin, or the node To, carry out the call, and returns the reply. It waits for
// an executor. ErrHere means that this node is the executor and has to carry out the call itself. If ctx ends, the call
// continues; the caller can wait for it again with the same ID.
func (r *Remote) Call(ctx context.Context, c registry.RemoteCall, repeated Repetition) (reply []byte, err error) {
	for anew := repeated == Anew; ; anew = false {
		if here, err := r.ask(ctx, c, anew); err != nil || here {
			return nil, cmp.Or(err, ErrHere)
		}
		answer, here, err := r.wait(ctx, c)
		if here {
			continue
		}
		if err == nil && repeated == UntilAnswered && len(answer.Status) == 0 {
			_, err = r.state.Commit(ctx, func(registry.View) (registry.Change, error) {
				return registry.Change{Put: []registry.Record{operationOf(c, answer.Reply)}}, nil
			})
		}
		if err != nil {
			return nil, err
		}
		return r.takeAnswer(ctx, answer)
	}
}

// deleteCall deletes the record of a call whose caller has given up. If the call has begun, it continues.
func (r *Remote) deleteCall(ctx context.Context, id registry.OperationID) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if _, err := registry.Ensure(ctx, r.state, func(v registry.View) (change registry.Change, err error) {
		if c, found := v.RemoteCall(id); found {
			change.Delete = []registry.Key{c.Key()}
		}
		return change, nil
	}); err != nil {
		r.log.Warn("cannot delete the record of a call to another node, so it may still be carried out", "call", id,
			"error", err)
	}
}

// Replay returns the stored reply to an earlier call with the same ID, if that call was made with UntilAnswered.
func (r *Remote) Replay(ctx context.Context, c registry.RemoteCall) (reply []byte, found bool, err error) {
	err = r.state.View(ctx, func(v registry.View) error {
		earlier, known := v.Operation(c.ID)
		if found = known && earlier.Method == c.Method; !found {
			return nil
		}
		if reply = earlier.Answer; earlier.Digest != operationOf(c, nil).Digest {
			return reusedError(c.ID, earlier.Method)
		}
		return nil
	})
	return reply, found, err
}

// operationOf returns the record by which Replay finds the reply to the call.
func operationOf(c registry.RemoteCall, reply []byte) registry.Operation {
	sum := sha256.Sum256(c.Request)
	return registry.Operation{ID: c.ID, Method: c.Method, Digest: hex.EncodeToString(sum[:]), Answer: reply}
}

// reusedError returns the error of a call that has the ID of a call with another request.
func reusedError(id registry.OperationID, method string) error {
	return registry.Invalid("operation id %q is in use for another request (%s); mint a new one", id, method)
}

// ask makes sure that the call has a record, which asks the call's executor to carry it out. A record with an answer
// stays as it is. Otherwise, if this node is the executor, ask deletes the record and returns true.
func (r *Remote) ask(ctx context.Context, c registry.RemoteCall, anew bool) (here bool, err error) {
	_, err = registry.Ensure(ctx, r.state, func(v registry.View) (registry.Change, error) {
		here = false
		stored, found := v.RemoteCall(c.ID)
		// With anew, a stored answer belongs to an earlier call and does not count.
		asked := found && !(anew && stored.Done)
		switch {
		case asked && (stored.Method != c.Method || !bytes.Equal(stored.Request, c.Request)):
			return registry.Change{}, reusedError(c.ID, stored.Method)
		case asked && stored.Done:
			return registry.Change{}, nil
		}
		_, err := r.executors.Check(v, c.ExecutedBy())
		switch here = err == nil; {
		case here && found: // the caller may hold a lock that Serve needs
			return registry.Change{Delete: []registry.Key{c.Key()}}, nil
		case here || asked:
			return registry.Change{}, nil
		}
		c.From, c.Since = r.state.node, r.executors.now()
		return registry.Change{Put: []registry.Record{c}}, nil
	})
	return here, err
}

// wait waits until the call has an answer. here: this node has become the executor meanwhile.
func (r *Remote) wait(ctx context.Context, c registry.RemoteCall) (answer registry.RemoteCall, here bool, err error) {
	for {
		changed := r.state.copy.changed.next()
		var executor string
		if err = r.state.View(ctx, func(v registry.View) error {
			var found bool
			if answer, found = v.RemoteCall(c.ID); !found {
				return registry.Errorf(registry.ErrUncertain, "call %s was forgotten; its outcome is unknown", c.ID)
			}
			_, err := r.executors.Check(v, c.ExecutedBy())
			here = err == nil && !answer.Done
			executor = describe(v, c.ExecutedBy())
			return nil
		}); err != nil || answer.Done || here {
			return answer, here, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return answer, false, registry.Errorf(registry.ErrUnavailable, "it is not done yet (%s): %w", executor,
				context.Cause(ctx))
		}
	}
}

// takeAnswer deletes the record of an answered call, and returns the reply or error in it.
func (r *Remote) takeAnswer(ctx context.Context, c registry.RemoteCall) ([]byte, error) {
	if _, err := r.state.Commit(ctx, func(registry.View) (registry.Change, error) {
		return registry.Change{Delete: []registry.Key{c.Key()}}, nil
	}); err != nil {
		return nil, err
	}
	if len(c.Status) == 0 {
		return c.Reply, nil
	}
	var s statuspb.Status
	if err := proto.Unmarshal(c.Status, &s); err != nil {
		return nil, registry.Errorf(registry.ErrInternal, "decode the status of call %s: %w", c.ID, err)
	}
	return nil, status.ErrorProto(&s)
}

// Run carries out the calls for plugins that this node executes, until ctx ends.
func (r *Remote) Run(ctx context.Context) error {
	if err := r.state.awaitReady(ctx); err != nil {
		return err
	}
	var all sync.WaitGroup
	defer all.Wait()
	for {
		changed, ended := r.state.copy.changed.next(), r.running.ended.next()
		due, err := viewed(ctx, r.state, func(v registry.View) (due []registry.RemoteCall) {
			for _, c := range v.RemoteCalls() {
				if _, err := r.executors.Check(v, c.ExecutedBy()); err == nil && !c.Done {
					due = append(due, c)
				}
			}
			return due
		})
		if err != nil {
			return err
		}
		for _, c := range due {
			if r.running.begin(c.ID) {
				all.Go(func() { defer r.running.end(c.ID); r.carryOut(ctx, c) })
			}
		}
		select {
		case <-changed:
		case <-ended:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// maxAnswer bounds an answer in bytes: etcd takes requests of 1.5 MiB, and JSON makes the answer larger by a third.
const maxAnswer = 1 << 20

// carryOut carries out a call and stores its answer. It repeats the call if the call fails and this node has lost and
// regained the role of the executor meanwhile, or if the answer cannot be stored. It ends without an answer if this
// node is no longer the executor, or if the call was deleted.
func (r *Remote) carryOut(ctx context.Context, c registry.RemoteCall) {
	for ctx.Err() == nil {
		open, err := viewed(ctx, r.state, func(v registry.View) bool {
			now, found := v.RemoteCall(c.ID)
			return found && !now.Done
		})
		if err != nil || !open { // the call was withdrawn, or an earlier try has stored its answer after all
			return
		}
		term, here := r.executors.Term(ctx, c.ExecutedBy())
		if !here {
			return // the next executor carries it out
		}
		reply, err := r.serve(ctx, c.Method, c.Request)
		if errors.Is(err, intent.ErrReleased) { // the next shim carries it out, or this one if the swap is given up
			intent.Sleep(ctx, retryPause)
			continue
		}
		if ctx.Err() != nil {
			return
		}
		if err != nil && r.executors.Moved(ctx, c.ExecutedBy(), term) {
			continue
		}
		if len(reply) > maxAnswer {
			reply, err = nil, status.Errorf(codes.ResourceExhausted,
				"the answer of node %s has %d bytes, and at most %d go through etcd; ask that node itself",
				r.state.node, len(reply), maxAnswer)
		}
		c.Done, c.Reply, c.Status = true, reply, nil
		if err != nil {
			if c.Status, err = proto.Marshal(status.Convert(err).Proto()); err != nil {
				r.log.Error("cannot encode the error of a call for another node", "error", err)
				return
			}
		}
		_, err = r.state.Commit(ctx, func(v registry.View) (registry.Change, error) {
			if now, found := v.RemoteCall(c.ID); !found || now.Done || !now.Since.Equal(c.Since) { // withdrawn
				return registry.Change{}, nil
			}
			return registry.Change{Put: []registry.Record{c}}, nil
		})
		if err == nil {
			return
		}
		if ctx.Err() != nil {
			return // the next shim, or another executor, carries it out
		}
		r.log.Warn("cannot store the answer of a call for another node", "call", c.ID, "error", err)
		intent.Sleep(ctx, time.Second)
	}
}
