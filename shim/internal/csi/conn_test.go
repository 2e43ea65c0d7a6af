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
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"holdfast/internal/csifake"
	"holdfast/registry"
)

// raw is a codec that leaves messages as bytes.
type raw struct{}

func (raw) Name() string { return "proto" }
func (raw) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(*v.(*[]byte))}, nil
}
func (raw) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

// listener keeps its connections, so that a test can cut them.
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

// accepted returns all connections, the newest last.
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

func listen(t *testing.T, socket string) *listener {
	t.Helper()
	l, err := net.Listen("unix", socket)
	must(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return &listener{Listener: l}
}

// serve answers every call at the socket with an empty message, after it has passed the bytes of the request to seen.
func serve(t *testing.T, socket string, seen func([]byte)) (*listener, *grpc.Server) {
	t.Helper()
	l := listen(t, socket)
	s := grpc.NewServer(grpc.ForceServerCodecV2(raw{}),
		grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
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
	return l, s
}

// server serves at a new socket.
func server(t *testing.T, seen func([]byte)) (*listener, string) {
	t.Helper()
	socket := filepath.Join(socketDir(t), "csi.sock")
	l, _ := serve(t, socket, seen)
	return l, socket
}

// A repeated call has the same bytes, in this process and in another one.
func TestRepeatedCallsAreTheSameBytes(t *testing.T) {
	var got [][]byte
	_, socket := server(t, func(b []byte) { got = append(got, b) })
	many := map[string]string{}
	for i := range 50 {
		many[fmt.Sprint("key-", i)] = fmt.Sprint("value-", i)
	}
	const generations, times = 3, 5
	for generation := range generations {
		f := assumeDescribed(t, fleetFor(t, socket))
		got = got[:generation*times] // without the calls of the description
		for range times {
			err := f.Stage(patient(t), nodeKey, StageRequest{
				VolumeID: "v", PublishContext: many, StagingPath: "/s", Usage: usage, VolumeContext: many,
				Secrets: secrets,
			})
			must(t, err)
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

func TestAllRolesAndCallersShareAConnection(t *testing.T) {
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

// The next call reaches a plugin that is back, however long it was away and whatever is left of its old socket.
func TestConnReconnectsAtOnce(t *testing.T) {
	fake, f := start(t, csifake.Config{Socket: filepath.Join(socketDir(t), "csi.sock")})
	unpublish := mutatingCall(registry.NodeUnpublishRPC)
	answers(t, open(t, f))
	for round := range 3 {
		fake.Kill() // its socket's file stays
		for range 1 + 10*round {
			if err := unpublish.do(patient(t), f); err == nil {
				t.Fatal("a call of a dead plugin succeeded")
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

func TestMovedEndpointGetsANewConnection(t *testing.T) {
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

// A listener that does not speak gRPC gets no call, and delays a caller by dialLimit at most.
func TestSilentListenerGetsNoCall(t *testing.T) {
	socket := filepath.Join(socketDir(t), "csi.sock")
	l := listen(t, socket)
	go func() {
		for {
			if _, err := l.Accept(); err != nil {
				return
			}
		}
	}()
	t.Cleanup(l.cut)
	stage := mutatingCall(registry.NodeStageRPC)
	wantCallError(t, "silent listener", stage.do(patient(t), fleetFor(t, socket)), stage, registry.OutcomeFailed,
		"UNAVAILABLE", registry.ErrUnavailable)
}

// lost runs Lost on a goroutine. The end of the test ends its context, and waits for it.
func lost(t *testing.T, c *Conn) <-chan error {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	done := make(chan struct{})
	go func() { defer close(done); ended <- c.Lost(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return ended
}

// The death of the process is noticed without a call. A living process is not reported as lost.
func TestLostAtOnce(t *testing.T) {
	socket := filepath.Join(socketDir(t), "csi.sock")
	c := open(t, fleetFor(t, socket))
	if err := c.Lost(patient(t)); err == nil {
		t.Error("a plugin that does not run is not lost")
	}
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
		kill()
		if err := receive(t, gone); err == nil {
			t.Error("lost without a reason")
		}
	}
}

// After a cut, the plugin accepts a new connection, so it is not lost. It may be another process, so its description
// counts as outdated.
func TestCutConnectionIsNotLost(t *testing.T) {
	l, socket := server(t, func([]byte) {})
	c := open(t, fleetFor(t, socket))
	answers(t, c)
	gone := lost(t, c)
	for range 3 {
		c.described.Store(c.changes.Load())
		l.cut()
		eventually(t, "a new connection is made", c.Outdated)
		answers(t, c)
	}
	select {
	case err := <-gone:
		t.Errorf("lost: %v", err)
	default:
	}
}

// A description is outdated before the first Describe and after a new connection. It is also outdated after
// RESOURCE_EXHAUSTED and UNIMPLEMENTED, which may contradict it.
func TestWhatMakesADescriptionOutdated(t *testing.T) {
	fake, f := start(t, csifake.Config{})
	c := open(t, New(table{nodeKey: {InstanceKey: nodeKey, Endpoint: registry.Endpoint{Host: fake.Socket()}}},
		Observer{Metrics: &CallMetrics{}}))
	defer c.close()
	describe := func(what string, outdated bool) {
		t.Helper()
		if c.Outdated() != outdated {
			t.Errorf("%s: outdated is %v", what, !outdated)
		}
		if _, err := c.Describe(patient(t), []registry.Role{registry.RoleNode}); err != nil || c.Outdated() {
			t.Errorf("%s: outdated after Describe: %v", what, err)
		}
	}
	describe("never asked", true)
	describe("asked again", false)
	c = open(t, f)
	for _, rpc := range []registry.RPC{registry.NodeStageRPC, registry.NodeStatsRPC} {
		for code, outdated := range map[codes.Code]bool{
			codes.Internal: false, codes.NotFound: false, codes.ResourceExhausted: true, codes.Unimplemented: true,
		} {
			answers(t, c)
			fake.On(string(rpc)).Times(1).Code(code, "no")
			if _, err := askStats(patient(t), f); rpc == registry.NodeStatsRPC && err == nil {
				t.Error("no error")
			}
			_ = mutatingCall(registry.NodeStageRPC).do(patient(t), f)
			describe(code.String(), outdated)
		}
	}
	fake.Kill()
	fake = csifake.Start(t, fake.Config())
	answers(t, c)
	fake.On("NodeGetInfo").Times(1).Code(codes.Internal, "metadata service is away")
	if _, err := c.Describe(patient(t), []registry.Role{registry.RoleNode}); err == nil {
		t.Error("it was described without NodeGetInfo")
	}
	describe("restarted", true)
}

// A new process at the socket describes itself before any other call. A plugin that differs from the registered one
// gets no call.
func TestNewProcessDescribesItselfFirst(t *testing.T) {
	fake, f := start(t, csifake.Config{})
	unpublish := mutatingCall(registry.NodeUnpublishRPC)
	must(t, unpublish.do(patient(t), f))
	fake.Kill()
	fake = csifake.Start(t, fake.Config())
	answers(t, open(t, f))
	if err := unpublish.do(patient(t), f); err != nil {
		t.Errorf("the same plugin again: %v", err)
	}
	all, err := fake.Calls()
	must(t, err)
	last, asked := "", false
	for _, c := range all { // the calls of both processes; only the call before the last NodeUnpublishVolume matters
		if c.RPC == "NodeUnpublishVolume" {
			asked = last == "NodeGetInfo" || last == "NodeGetCapabilities"
		}
		last = c.RPC
	}
	if !asked {
		t.Error("the new process was not asked to describe itself")
	}
	before := calls(t, fake, "NodeUnpublishVolume")
	fake.Kill()
	cfg := fake.Config()
	cfg.Caps = []string{"GET_VOLUME_STATS"}
	fake = csifake.Start(t, cfg)
	answers(t, open(t, f))
	err = unpublish.do(patient(t), f)
	call, is := errors.AsType[*registry.CallError](err)
	if !is || call.Code != "UNAVAILABLE" || call.Outcome != registry.OutcomeFailed ||
		calls(t, fake, "NodeUnpublishVolume") != before {
		t.Errorf("another plugin: %v; %d calls, were %d", err, calls(t, fake), before)
	}
}

// When End returns, the kernel has told the plugin that a call was cut off, and no new connection is made. Other
// connections are closed later.
func TestEndShutsDownWhereACallWasCut(t *testing.T) {
	for what, cut := range map[string]bool{"a call was cut off": true, "none was": false} {
		t.Run(what, func(t *testing.T) {
			l, socket := server(t, func([]byte) {})
			f := fleetFor(t, socket)
			c := open(t, f)
			answers(t, c)
			c.current().cut.Store(cut)
			was := l.accepted()
			last := was[len(was)-1]
			if hungUp(t, last) {
				t.Fatal("the connection had ended before")
			}
			rest := f.End()
			if hungUp(t, last) != cut {
				t.Errorf("hung up: %v", !cut)
			}
			if _, err := c.connect(patient(t)); err == nil {
				t.Error("there is another connection")
			}
			rest()
			eventually(t, "the connection is closed", func() bool { return hungUp(t, last) })
		})
	}
}

// A process that shuts down gracefully finishes its calls. Later calls reach the next process.
func TestCallsOfARetiringProcessEnd(t *testing.T) {
	arrived, finish := make(chan struct{}), make(chan struct{})
	socket := filepath.Join(socketDir(t), "csi.sock")
	_, old := serve(t, socket, func([]byte) { close(arrived); <-finish })
	c := newConn("disk", socket, dial, &sentSecrets{}, &CallMetrics{})
	l, err := c.connect(patient(t))
	must(t, err)
	ended := make(chan error, 1)
	request, reply := &csi.ProbeRequest{}, &csi.ProbeResponse{}
	go func() { ended <- l.invoke(patient(t), &callTrace{}, "Identity", "Probe", request, reply) }()
	<-arrived
	go old.GracefulStop()
	eventually(t, "the end of the process is noticed", func() bool { return !l.up() })
	serve(t, socket, func([]byte) {})
	if _, err := c.Probe(patient(t)); err != nil {
		t.Errorf("a call after the old process: %v", err)
	}
	close(finish)
	if err := <-ended; err != nil {
		t.Errorf("a call at the old process: %v", err)
	}
	c.close()
}

// hungUp reports whether the other side has ended the connection, according to the kernel.
func hungUp(t *testing.T, conn net.Conn) (is bool) {
	t.Helper()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	must(t, err)
	err = raw.Control(func(fd uintptr) {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		_, _ = unix.Poll(poll, 0)
		is = poll[0].Revents&unix.POLLRDHUP != 0
	})
	return is || err != nil // this side was closed after the other side
}
