package csi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"holdfast/internal/csifake"
	"holdfast/registry"
)

// raw passes messages on as the bytes that they are.
type raw struct{}

func (raw) Name() string { return "proto" }
func (raw) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(*v.(*[]byte))}, nil
}
func (raw) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

// listener remembers its connections, so that a test can cut them.
type listener struct {
	net.Listener
	mu    sync.Mutex
	conns []net.Conn
}

func (l *listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil {
		l.conns = append(l.conns, c)
	}
	return c, err
}

// accepted is all connections, the newest last.
func (l *listener) accepted() []net.Conn {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.conns)
}

func (l *listener) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.conns {
		_ = c.Close()
	}
	l.conns = nil
}

func listen(t *testing.T) (*listener, string) {
	t.Helper()
	socket := filepath.Join(socketDir(t), "csi.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return &listener{Listener: l}, socket
}

// server answers every call with nothing, and hands the bytes of each request to seen.
func server(t *testing.T, seen func([]byte)) (*listener, string) {
	t.Helper()
	l, socket := listen(t)
	s := grpc.NewServer(grpc.ForceServerCodecV2(raw{}), grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		var request, answer []byte
		if err := stream.RecvMsg(&request); err != nil {
			return err
		}
		seen(request)
		return stream.SendMsg(&answer)
	}))
	served := make(chan struct{})
	go func() { defer close(served); _ = s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); <-served })
	return l, socket
}

// TestRequestsAreTheSameBytes: a call that is sent again, by this generation or another, cannot be told from the first.
func TestRequestsAreTheSameBytes(t *testing.T) {
	var got [][]byte
	_, socket := server(t, func(b []byte) { got = append(got, b) })
	many := map[string]string{}
	for i := range 50 {
		many[fmt.Sprint("key-", i)] = fmt.Sprint("value-", i)
	}
	const generations, times = 3, 5
	for generation := range generations {
		f := met(t, fleetFor(t, socket))
		got = got[:generation*times] // without what was asked to know it
		for range times {
			err := f.Stage(patient(t), nodeKey, StageRequest{
				VolumeID: "v", PublishContext: many, StagingPath: "/s", Usage: usage, VolumeContext: many, Secrets: secrets,
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	usual := map[string]bool{}
	for i, b := range got {
		if !bytes.Equal(b, got[0]) {
			t.Errorf("request %d differs from the first", i)
		}
		var m csi.NodeStageVolumeRequest
		if err := proto.Unmarshal(b, &m); err != nil || len(m.GetPublishContext()) != len(many) {
			t.Fatalf("request %d: %v", i, err)
		}
		plain, _ := proto.Marshal(&m)
		usual[string(plain)] = true
	}
	if len(got) != generations*times || len(usual) == 1 {
		t.Errorf("%d requests; the usual encoding has %d forms of them, so this proves nothing", len(got), len(usual))
	}
}

// TestOneConnectionPerTask: all roles and all callers share it.
func TestOneConnectionPerTask(t *testing.T) {
	fake, f := start(t, csifake.Config{})
	c := open(t, f)
	answers(t, c)
	ctx := patient(t)
	var wg sync.WaitGroup
	for _, m := range mutating {
		wg.Go(func() { _ = m.do(ctx, f) })
		wg.Go(func() {
			if _, err := c.Describe(ctx, []registry.Role{registry.RoleController, registry.RoleNode}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	all, err := fake.Calls()
	if err != nil || len(all) < len(mutating) {
		t.Fatalf("%d calls, %v", len(all), err)
	}
	for _, one := range all {
		if one.Conn == 0 || one.Conn != all[0].Conn {
			t.Errorf("%s came over connection %d, the first call over %d", one.RPC, one.Conn, all[0].Conn)
		}
	}
}

// TestReconnects: a plugin that is there again is called at once, however long it was away and whatever is left of its old socket.
func TestReconnects(t *testing.T) {
	fake, f := start(t, csifake.Config{Socket: filepath.Join(socketDir(t), "csi.sock")})
	unpublish := mutating[7]
	answers(t, open(t, f))
	for round := range 3 {
		fake.Kill()                                                                  // its socket's file stays
		for deadline := time.Now().Add(time.Duration(round) * time.Second / 10); ; { // longer and longer
			if err := unpublish.do(patient(t), f); err == nil {
				t.Fatal("a call of a dead plugin succeeded")
			}
			if time.Now().After(deadline) {
				break
			}
			time.Sleep(dialPause)
		}
		fake = csifake.Start(t, fake.Config())
		if err := unpublish.do(patient(t), f); err != nil {
			t.Errorf("round %d: the first call after the restart: %v", round, err)
		}
		if ready, err := open(t, f).Probe(patient(t)); err != nil || !ready {
			t.Errorf("round %d: probe: %v, %v", round, ready, err)
		}
	}
}

// TestEndpointMoves: an instance with another socket gets another connection.
func TestEndpointMoves(t *testing.T) {
	one, f := start(t, csifake.Config{})
	two, _ := start(t, csifake.Config{})
	answers(t, open(t, f))
	for k, in := range f.instances.(table) {
		in.Endpoint.Host = two.Socket()
		f.instances.(table)[k] = in
	}
	answers(t, open(t, f))
	if a, b := calls(t, one), calls(t, two); a != 1 || b != 1 {
		t.Errorf("%d and %d calls", a, b)
	}
}

// TestSomebodyElseListens: what accepts and does not speak gRPC gets no call, and holds nobody longer than one dial.
func TestSomebodyElseListens(t *testing.T) {
	l, socket := listen(t)
	go func() {
		for {
			if _, err := l.Accept(); err != nil {
				return
			}
		}
	}()
	t.Cleanup(l.cut)
	f := fleetFor(t, socket)
	wantCallError(t, "silent listener", mutating[4].do(patient(t), f), mutating[4], registry.OutcomeFailed, "UNAVAILABLE", registry.ErrUnavailable)
}

// lost runs Lost on a goroutine.
func lost(t *testing.T, c *Conn) <-chan error {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	done := make(chan struct{})
	go func() { defer close(done); ended <- c.Lost(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return ended
}

// TestLostAtOnce: the death of the plugin's process is known without any timer, and its life is not mistaken for its death.
func TestLostAtOnce(t *testing.T) {
	socket := filepath.Join(socketDir(t), "csi.sock")
	f := fleetFor(t, socket)
	c := open(t, f)
	fastest := patience
	for range 3 {
		kill := process(t, socket)
		answers(t, c)
		gone := lost(t, c)
		for range 20 {
			if _, err := c.Probe(patient(t)); err != nil {
				t.Fatal(err)
			}
		}
		select {
		case err := <-gone:
			t.Fatalf("lost while it lives: %v", err)
		default:
		}
		began := time.Now()
		kill()
		select {
		case err := <-gone:
			if err == nil {
				t.Error("lost without a reason")
			}
		case <-patient(t).Done():
			t.Fatal("the death was not noticed")
		}
		fastest = min(fastest, time.Since(began))
	}
	if fastest > time.Second/4 {
		t.Errorf("the death was noticed after %v at best: that was a timer", fastest)
	}
}

// TestLostEndsWithItsContext: no loss, no reason.
func TestLostEndsWithItsContext(t *testing.T) {
	_, f := start(t, csifake.Config{})
	c := open(t, f)
	for _, connect := range []bool{false, true} {
		if connect {
			answers(t, c)
		}
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan error, 1)
		go func() { ended <- c.Lost(ctx) }()
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Lost returned %v", err)
		}
	}
}

// TestLostOfNobody: a shim that comes when the plugin is dead already need not wait to know it.
func TestLostOfNobody(t *testing.T) {
	fake, f := start(t, csifake.Config{})
	fake.Kill()
	if err := open(t, f).Lost(patient(t)); err == nil {
		t.Error("a dead plugin is not lost")
	}
}

// TestCutConnectionIsNoLoss: somebody answers anew, so the plugin is not lost; but it may be another process, so what it said is outdated.
func TestCutConnectionIsNoLoss(t *testing.T) {
	l, socket := server(t, func([]byte) {})
	c := open(t, fleetFor(t, socket))
	answers(t, c)
	gone := lost(t, c)
	for range 3 {
		before := c.changes.Load()
		c.described.Store(before)
		l.cut()
		for ctx := patient(t); !c.Outdated(); time.Sleep(time.Millisecond) {
			if ctx.Err() != nil {
				t.Fatal("no new connection was made")
			}
		}
		answers(t, c)
	}
	select {
	case err := <-gone:
		t.Errorf("lost: %v", err)
	default:
	}
}

// TestOutdated: what was never asked is, after a good Describe nothing is, until the plugin is another process or says that something is full.
func TestOutdated(t *testing.T) {
	fake, f := start(t, csifake.Config{})
	strangers := New(table{})
	t.Cleanup(strangers.CloseAll)
	if stranger, err := strangers.Connect("disk", taskKey, registry.Endpoint{Host: fake.Socket()}); err != nil || !stranger.Outdated() {
		t.Errorf("what was never asked is not outdated: %v", err)
	}
	c := open(t, f)
	roles := []registry.Role{registry.RoleNode}
	describe := func(what string) {
		t.Helper()
		if !c.Outdated() {
			t.Errorf("%s: not outdated", what)
		}
		if _, err := c.Describe(patient(t), roles); err != nil {
			t.Fatal(err)
		}
		answers(t, c)
		if c.Outdated() {
			t.Errorf("%s: outdated after it was asked", what)
		}
	}
	answers(t, c)
	if c.Outdated() {
		t.Error("outdated when it has just been registered")
	}
	fake.On("NodeUnpublishVolume").Times(1).Code(codes.Internal, "stuck")
	_ = mutating[7].do(patient(t), f)
	if c.Outdated() {
		t.Error("outdated by INTERNAL")
	}
	fake.On("NodePublishVolume").Times(1).Code(codes.ResourceExhausted, "full")
	_ = mutating[6].do(patient(t), f)
	describe("full")
	fake.Kill()
	fake = csifake.Start(t, fake.Config())
	answers(t, c)
	fake.On("NodeGetInfo").Times(1).Code(codes.Internal, "metadata service is away")
	if _, err := c.Describe(patient(t), roles); err == nil {
		t.Error("it was described without NodeGetInfo")
	}
	describe("restarted")
}

// TestUnknownStatus: an error that is no status at all is no answer.
func TestUnknownStatus(t *testing.T) {
	trace := &callTrace{}
	trace.left.Store(true)
	late := fmt.Errorf("wrapped: %w", context.DeadlineExceeded)
	err := failure(registry.NodeStageRPC, registry.InstanceKey{}, late, trace, redactor{})
	call, ok := errors.AsType[*registry.CallError](err)
	if !ok || call.Outcome != registry.OutcomeUncertain || call.Detail == "" {
		t.Errorf("%+v", call)
	}
}
