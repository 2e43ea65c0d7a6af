package cluster

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

func newRemote(
	t *testing.T, x *member, serve func(context.Context, string, []byte) ([]byte, error),
) (r *Remote, stop func()) {
	r = &Remote{state: x.testNode.State, executors: x.Executors, serve: serve, log: x.log}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = r.Run(ctx) }()
	stop = func() { cancel(); <-done }
	t.Cleanup(stop)
	return r, stop
}

// newAttacher returns the attacher of a member. It has no controller.
func newAttacher(t *testing.T, m *member) *Attacher {
	remote, _ := newRemote(t, m, nil)
	return &Attacher{remote: remote, calls: callsOf(m)}
}

// TestCallIsCarriedOutByTheNextExecutor has node a carry out calls for node c, and stops it in the middle of one. Node
// b carries out that call.
func TestCallIsCarriedOutByTheNextExecutor(t *testing.T) {
	client := parallelWithEtcd(t)
	a := newMember(t, client, "a")
	a.await(t, true)()
	b, c := newMember(t, client, "b"), newMember(t, client, "c")
	c.setHealthy(false)
	began := make(chan struct{}, 1)
	_, stop := newRemote(t, a, func(ctx context.Context, method string, request []byte) ([]byte, error) {
		switch method {
		case "echo":
			return request, nil
		case "fail":
			return nil, status.Error(codes.NotFound, "no such volume")
		}
		began <- struct{}{}
		<-ctx.Done()
		return nil, context.Cause(ctx)
	})
	var carriedOut atomic.Int32
	newRemote(t, b, func(_ context.Context, method string, request []byte) ([]byte, error) {
		carriedOut.Add(1)
		return append(request, " at b"...), nil
	})
	asker, _ := newRemote(t, c, nil)
	call := func(r *Remote, id registry.OperationID, method string) (string, error) {
		call := registry.RemoteCall{ID: id, Plugin: "p", Method: method, Request: []byte("hello")}
		reply, err := r.Call(t.Context(), call, UntilDone)
		return string(reply), err
	}
	if reply, err := call(asker, "1", "echo"); err != nil || reply != "hello" {
		t.Errorf("echo: %q, %v", reply, err)
	}
	if _, err := call(asker, "2", "fail"); status.Code(err) != codes.NotFound {
		t.Errorf("fail: %v", err)
	}
	answer := make(chan string)
	go func() {
		reply, err := call(asker, "3", "hang")
		if err != nil {
			t.Errorf("hang: %v", err)
		}
		answer <- reply
	}()
	<-began
	stop()
	a.cut()
	select {
	case reply := <-answer:
		if reply != "hello at b" || carriedOut.Load() != 1 {
			t.Errorf("hang: %q, carried out %d times", reply, carriedOut.Load())
		}
	case <-time.After(time.Minute):
		t.Fatal("no node has carried out the call")
	}
	look(t, c, func(v registry.View) {
		for _, left := range v.RemoteCalls() {
			t.Errorf("a record is left: %+v", left)
		}
	})
}

// TestCallGoesOnAtTheNextExecutor has node a lose the role of executor while it carries out its own call.
func TestCallGoesOnAtTheNextExecutor(t *testing.T) {
	client := parallelWithEtcd(t)
	a := newMember(t, client, "a")
	a.await(t, true)()
	b := newMember(t, client, "b")
	newRemote(t, b, func(context.Context, string, []byte) ([]byte, error) { return nil, nil })
	at := newAttacher(t, a)
	tries := 0
	err := at.execute(t.Context(), settleMethod, testKey, request{}, func() error {
		tries++
		a.setHealthy(false)
		b.await(t, true)()
		a.await(t, false)
		_, err := a.Executors.Sending(t.Context(), testKey)
		return err
	})
	if err != nil || tries != 1 {
		t.Errorf("after %d tries at the former executor: %v", tries, err)
	}
}

// TestSameCallAgain makes a call again before the executor knows that its answer to the first call was stored. The
// executor carries out the second call too.
func TestSameCallAgain(t *testing.T) {
	client := parallelWithEtcd(t)
	n := newNode(t, client, "a")
	var answering atomic.Bool
	asked := make(chan struct{})
	n.kv = losing(n.kv, func() bool {
		if answering.CompareAndSwap(true, false) {
			<-asked
		}
		return false
	})
	a := n.asMember(t)
	a.await(t, true)()
	b := newMember(t, client, "b")
	b.setHealthy(false)
	var carriedOut atomic.Int32
	newRemote(t, a, func(context.Context, string, []byte) ([]byte, error) {
		carriedOut.Add(1)
		answering.Store(true)
		return nil, nil
	})
	asker, _ := newRemote(t, b, nil)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	call := registry.RemoteCall{ID: "1", Plugin: "p", Method: "echo"}
	if _, err := asker.Call(ctx, call, Anew); err != nil {
		t.Fatal(err)
	}
	if _, err := asker.ask(ctx, call, true); err != nil {
		t.Fatal(err)
	}
	n.catchUp(t)
	close(asked)
	if _, err := asker.Call(ctx, call, UntilDone); err != nil || carriedOut.Load() != 2 {
		t.Errorf("carried out %d times: %v", carriedOut.Load(), err)
	}
}

// TestAnswerArrivesAsTheCallerBecomesTheExecutor stores the answer to a call while the caller, which has become the
// executor, is about to delete the call's record. The caller takes the answer: the call is not carried out again.
func TestAnswerArrivesAsTheCallerBecomesTheExecutor(t *testing.T) {
	client := parallelWithEtcd(t)
	n := newNode(t, client, "a")
	call := registry.RemoteCall{ID: "1", Plugin: "p", Method: "echo"}
	answered := call
	answered.From, answered.Done = "a", true
	b := newNode(t, client, "b")
	var asks atomic.Bool
	n.kv = withCommit(n.kv, func(_ context.Context, send sendTxn) (*clientv3.TxnResponse, error) {
		if asks.CompareAndSwap(true, false) {
			commit(t, b, registry.Change{Put: []registry.Record{answered}})
		}
		return send()
	})
	a := n.asMember(t)
	a.await(t, true)()
	commit(t, b, registry.Change{Put: []registry.Record{call}})
	a.see(t, "the call", func(v registry.View) bool { return len(v.RemoteCalls()) == 1 })
	asker := &Remote{state: n.State, executors: a.Executors, log: a.log}
	asks.Store(true)
	if here, err := asker.ask(t.Context(), call, false); here || err != nil {
		t.Errorf("carried out again: %v, %v", here, err)
	}
}

// TestAnswerIsNotThatOfAWithdrawnCall withdraws a call while it is carried out, and makes the same call again. The
// second call is carried out too.
func TestAnswerIsNotThatOfAWithdrawnCall(t *testing.T) {
	client := parallelWithEtcd(t)
	n := newNode(t, client, "a")
	a := n.asMember(t)
	a.await(t, true)()
	b := newMember(t, client, "b")
	b.setHealthy(false)
	asker, _ := newRemote(t, b, nil)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	call := registry.RemoteCall{ID: "1", Plugin: "p", Method: "count"}
	ask := func() {
		if _, err := asker.ask(ctx, call, true); err != nil {
			t.Error(err)
		}
	}
	again := make(chan struct{})
	var carriedOut atomic.Int32
	newRemote(t, a, func(context.Context, string, []byte) ([]byte, error) {
		if carriedOut.Add(1) > 1 {
			return []byte("second"), nil
		}
		b.catchUp(t)
		asker.deleteCall(ctx, "1")
		ask()
		n.catchUp(t)
		close(again)
		return []byte("first"), nil
	})
	ask()
	select {
	case <-again:
	case <-ctx.Done():
	}
	if reply, err := asker.Call(ctx, call, UntilDone); err != nil || string(reply) != "second" {
		t.Errorf("the second call: %q, %v", reply, err)
	}
}

// TestReplyStaysForACallerThatRepeats keeps a reply after the record of the call was removed, because the shim may die
// before the host has the reply.
func TestReplyStaysForACallerThatRepeats(t *testing.T) {
	client := parallelWithEtcd(t)
	a := newMember(t, client, "a")
	a.await(t, true)()
	b := newMember(t, client, "b")
	newRemote(t, a, func(_ context.Context, _ string, request []byte) ([]byte, error) { return request, nil })
	asker, _ := newRemote(t, b, nil)
	c := registry.RemoteCall{ID: "1", Plugin: "p", Method: "echo", Request: []byte("hello")}
	if _, found, err := asker.Replay(t.Context(), c); found || err != nil {
		t.Errorf("before the call: %v, %v", found, err)
	}
	if reply, err := asker.Call(t.Context(), c, UntilAnswered); err != nil || string(reply) != "hello" {
		t.Errorf("the call: %q, %v", reply, err)
	}
	look(t, b, func(v registry.View) {
		if left := v.RemoteCalls(); len(left) > 0 {
			t.Errorf("a record is left: %+v", left)
		}
	})
	if reply, found, err := asker.Replay(t.Context(), c); !found || err != nil || string(reply) != "hello" {
		t.Errorf("repeated: %q, %v, %v", reply, found, err)
	}
	c.Request = []byte("other")
	if _, _, err := asker.Replay(t.Context(), c); !errors.Is(err, registry.ErrInvalid) {
		t.Errorf("another request: %v", err)
	}
}

// TestCallOutlivesTheSwapOfItsExecutor has the executor's shim refuse a call, as it does once a swap has begun.
func TestCallOutlivesTheSwapOfItsExecutor(t *testing.T) {
	client := parallelWithEtcd(t)
	a := newMember(t, client, "a")
	a.await(t, true)()
	b := newMember(t, client, "b")
	refused := false
	newRemote(t, a, func(_ context.Context, _ string, request []byte) ([]byte, error) {
		if !refused {
			refused = true
			return nil, intent.ErrReleased
		}
		return request, nil
	})
	asker, _ := newRemote(t, b, nil)
	c := registry.RemoteCall{ID: "1", Plugin: "p", Method: "echo", Request: []byte("hello")}
	if reply, err := asker.Call(t.Context(), c, UntilAnswered); err != nil || string(reply) != "hello" {
		t.Errorf("the call: %q, %v", reply, err)
	}
}

// TestGivenUpCreationIsWithdrawn asks for a new volume while no node executes its plugin, and gives up.
func TestGivenUpCreationIsWithdrawn(t *testing.T) {
	a := newMember(t, parallelWithEtcd(t), "a")
	a.makeFormer(t)
	at := newAttacher(t, a)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error)
	go func() {
		_, err := at.Provide(ctx, registry.Call{ID: "op"}, volumeOf("vol", "vol").VolumeSpec, registry.Origin{})
		done <- err
	}()
	until(t, "another node is asked", func() bool { return a.remoteCalls(t) > 0 })
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) || a.remoteCalls(t) != 0 {
		t.Errorf("%v; %d calls are left", err, a.remoteCalls(t))
	}
}
