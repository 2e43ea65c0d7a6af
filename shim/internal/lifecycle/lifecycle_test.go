package lifecycle

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"holdfast/hooks"
	"holdfast/internal/mount"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
	"holdfast/shim/internal/rpc"
	"holdfast/shim/internal/store"
)

// process is a Process as main runs it, in this test process, with the connection of the host.
type process struct {
	*Process
	t     *testing.T
	conn  *grpc.ClientConn
	ended chan error // gets the result of Run
	stop  context.CancelFunc
}

func newProcess(t *testing.T) *process {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	p := &process{Process: New("test", hclog.NewNullLogger()), t: t, ended: make(chan error, 1), stop: cancel}
	listener := bufconn.Listen(1 << 20)
	g := grpc.NewServer(grpc.WaitForHandlers(true))
	p.Register(ctx, g)
	var wg sync.WaitGroup
	wg.Go(func() { _ = g.Serve(listener) })
	wg.Go(func() { p.ended <- p.Run(ctx) })
	dial := func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }
	conn, err := grpc.NewClient("passthrough:shim", grpc.WithContextDialer(dial),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	p.conn = conn
	t.Cleanup(func() {
		cancel()
		g.Stop()
		wg.Wait()
		if r := p.take(); r != nil { // of a process that has failed: its end would have taken that along
			_ = r.close()
		}
		_ = conn.Close()
	})
	return p
}

// dirs returns a layout in a new directory, which is unmounted at the end.
func dirs(t *testing.T) hooks.Layout {
	t.Helper()
	dir, err := os.MkdirTemp("", "h-")
	must(t, err)
	t.Cleanup(func() {
		mounts, err := mount.Below(dir)
		must(t, err)
		for _, m := range slices.Backward(mounts) {
			must(t, unix.Unmount(m.Point, 0))
		}
		must(t, os.RemoveAll(dir))
	})
	l := hooks.Layout{Run: filepath.Join(dir, "run"), State: filepath.Join(dir, "state")}
	must(t, os.Mkdir(l.Run, 0o700))
	must(t, os.Mkdir(l.State, 0o700))
	return l
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func hello(l hooks.Layout) rpc.Hello {
	return rpc.Hello{Node: "node-1", StateDir: l.State, RunDir: l.Run, Operations: hooks.Operations}
}

// activate sends Hello and Activate.
func (p *process) activate(l hooks.Layout) {
	p.t.Helper()
	_, err := p.Hello(p.t.Context(), hello(l))
	must(p.t, err)
	must(p.t, p.Activate(p.t.Context(), rpc.Handover{}))
}

// starting records the start of a plugin's task.
func (p *process) starting(alloc string) error {
	text := "task \"plugin\" {\n driver = \"raw_exec\"\n csi_plugin {\n id = \"x\"\n type = \"node\"\n }\n}\n"
	job, err := pb.NewJobsClient(p.conn).Parse(p.t.Context(),
		&pb.ParseRequest{Source: &pb.Source{Name: "x.hcl", Text: []byte(text)}})
	if err != nil {
		return err
	}
	_, err = pb.NewTasksClient(p.conn).Starting(p.t.Context(), &pb.TaskStartingRequest{
		Call: &pb.Call{OperationId: "start-" + alloc},
		Task: &pb.AllocTask{Task: &pb.TaskKey{Alloc: alloc, Task: "plugin"}, Attempt: 1,
			Sealed: job.GetJob().GetGroups()[0].GetTasks()[0].GetSealed()},
	})
	return err
}

// tasks lists the plugin tasks that the shim knows.
func (p *process) tasks() (allocs []string) {
	p.t.Helper()
	reply, err := pb.NewPluginsClient(p.conn).List(p.t.Context(), &pb.ListPluginsRequest{})
	must(p.t, err)
	for _, task := range reply.GetTasks() {
		allocs = append(allocs, task.GetTask().GetAlloc())
	}
	return allocs
}

// goroutines lists the goroutines that run code of Holdfast or of a library, by the functions that created them.
func goroutines() (list []string) {
	buf := make([]byte, 1<<20)
	made := regexp.MustCompile(`(?m)^created by (\S+)`)
	for stack := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		if m := made.FindStringSubmatch(stack); m != nil && !strings.HasPrefix(m[1], "testing.") &&
			!strings.Contains(m[1], "google.golang.org/grpc") {
			list = append(list, m[1])
		}
	}
	slices.Sort(list)
	return list
}

// becomes waits until the list is equal to want.
func becomes(t *testing.T, what string, list func() []string, want []string) {
	t.Helper()
	got := list()
	for end := time.Now().Add(time.Minute); !slices.Equal(got, want) && time.Now().Before(end); got = list() {
		time.Sleep(time.Millisecond)
	}
	if !slices.Equal(got, want) {
		t.Errorf("%s:\n%s\nwant\n%s", what, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// openFiles lists the files that this process has open below the layout's directories, and its inotify instances.
func openFiles(l hooks.Layout) (list []string) {
	fds, _ := os.ReadDir("/proc/self/fd")
	for _, fd := range fds {
		to, _ := os.Readlink("/proc/self/fd/" + fd.Name())
		if strings.HasPrefix(to, filepath.Dir(l.State)) || strings.Contains(to, "inotify") {
			list = append(list, to)
		}
	}
	return list
}

// One process is active three times. The generation rises each time, and nothing is lost. In between, the process has
// no goroutine and no open file of an active shim, and answers no call.
func TestActiveAgainInOneProcess(t *testing.T) {
	l := dirs(t)
	p := newProcess(t)
	if st := p.Status(); st.Lifecycle != pb.LifecycleState_LIFECYCLE_STATE_CANDIDATE || st.Generation != 0 {
		t.Errorf("at first: %+v", st)
	}
	_, err := pb.NewPluginsClient(p.conn).List(t.Context(), &pb.ListPluginsRequest{}) // and the connection is there
	if status.Code(err) != codes.Unavailable {
		t.Errorf("a candidate lists: %v", err)
	}
	before := goroutines()
	var want []string
	for life := 1; life <= 3; life++ {
		p.activate(l)
		if st := p.Status(); st.Lifecycle != pb.LifecycleState_LIFECYCLE_STATE_ACTIVE || int(st.Generation) != life {
			t.Errorf("life %d: %+v", life, st)
		}
		if len(openFiles(l)) == 0 || len(goroutines()) <= len(before) {
			t.Error("this test sees no open file or no goroutine of an active shim") // its own control
		}
		if got := p.tasks(); !slices.Equal(got, want) {
			t.Errorf("life %d knows %v, want %v", life, got, want)
		}
		must(t, p.starting(fmt.Sprint("a", life)))
		want = append(want, fmt.Sprint("a", life))
		_, err := p.Quiesce(t.Context())
		must(t, err)
		if err := p.starting("late"); status.Code(err) != codes.Unavailable {
			t.Errorf("a quiesced shim takes a call: %v", err)
		}
		if got := p.tasks(); !slices.Equal(got, want) {
			t.Errorf("a quiesced shim reads %v", got)
		}
		mustRelease(t, p)
		if st := p.Status(); st.Lifecycle != pb.LifecycleState_LIFECYCLE_STATE_RELEASED {
			t.Errorf("released: %+v", st)
		}
		becomes(t, fmt.Sprintf("runs after life %d", life), goroutines, before)
		becomes(t, fmt.Sprintf("open after life %d", life), func() []string { return openFiles(l) }, nil)
	}
}

// If a handover is given up before Release, the shim stays active under its own generation. A cancelled Quiesce that is
// served late, after the Activate that has replaced it, has no effect.
func TestQuiescedShimGoesOn(t *testing.T) {
	l := dirs(t)
	p := newProcess(t)
	p.activate(l)
	_, err := p.Quiesce(t.Context())
	must(t, err)
	must(t, p.Activate(t.Context(), rpc.Handover{}))
	must(t, p.Activate(t.Context(), rpc.Handover{Resume: true})) // the shim is active already
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.Quiesce(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled Quiesce: %v", err)
	}
	must(t, p.starting("a"))
	if st := p.Status(); st.Generation != 1 || st.Lifecycle != pb.LifecycleState_LIFECYCLE_STATE_ACTIVE {
		t.Errorf("%+v", st)
	}
}

func TestMovesOutOfTurnAreRefused(t *testing.T) {
	l := dirs(t)
	p := newProcess(t)
	if err := p.Activate(t.Context(), rpc.Handover{}); !errors.Is(err, registry.ErrConflict) ||
		!strings.Contains(err.Error(), "Hello") {
		t.Errorf("before Hello: %v", err)
	}
	if _, err := p.Release(t.Context()); !errors.Is(err, registry.ErrConflict) {
		t.Errorf("Release of a candidate: %v", err)
	}
	if _, err := p.Quiesce(t.Context()); !errors.Is(err, registry.ErrConflict) {
		t.Errorf("Quiesce of a candidate: %v", err)
	}
	p.activate(l)
	if err := p.Activate(t.Context(), rpc.Handover{}); !errors.Is(err, registry.ErrConflict) {
		t.Errorf("Activate twice: %v", err)
	}
	must(t, p.starting("a"))
}

// The directories and the node of an active shim do not change.
func TestHelloOfAnotherHostIsRefused(t *testing.T) {
	l := dirs(t)
	p := newProcess(t)
	p.activate(l)
	for _, change := range []func(*rpc.Hello){
		func(h *rpc.Hello) {
			h.StateDir = "/elsewhere"
		}, func(h *rpc.Hello) { h.RunDir = "/elsewhere" }, func(h *rpc.Hello) { h.Node = "node-2" },
	} {
		h := hello(l)
		change(&h)
		if _, err := p.Hello(t.Context(), h); !errors.Is(err, registry.ErrConflict) ||
			!strings.Contains(err.Error(), l.State) {
			t.Errorf("%+v: %v", h, err)
		}
	}
	if _, err := p.Hello(t.Context(), hello(l)); err != nil {
		t.Errorf("the same again: %v", err)
	}
	mustRelease(t, p)
	other := dirs(t)
	if _, err := p.Hello(t.Context(), hello(other)); err != nil {
		t.Errorf("a released shim: %v", err)
	}
}

// A damaged file is reported and unchanged, and the shim stays a candidate. Once the file is replaced, the same shim
// becomes active.
func TestDamagedStateLeavesACandidate(t *testing.T) {
	l := dirs(t)
	rubbish := bytes.Repeat([]byte("rubbish "), 8192)
	must(t, os.WriteFile(l.Database(), rubbish, 0o600))
	p := newProcess(t)
	_, err := p.Hello(t.Context(), hello(l))
	must(t, err)
	before := goroutines()
	err = p.Activate(t.Context(), rpc.Handover{})
	if !errors.Is(err, registry.ErrDamaged) || !strings.Contains(err.Error(), l.Database()) {
		t.Errorf("got %v", err)
	}
	if st := p.Status(); st.Lifecycle != pb.LifecycleState_LIFECYCLE_STATE_CANDIDATE {
		t.Errorf("%+v", st)
	}
	if now, err := os.ReadFile(l.Database()); err != nil || !bytes.Equal(now, rubbish) {
		t.Errorf("the file has changed: %v", err)
	}
	becomes(t, "open after the refusal", func() []string { return openFiles(l) }, nil)
	becomes(t, "runs after the refusal", goroutines, before)
	must(t, os.Remove(l.Database()))
	must(t, p.Activate(t.Context(), rpc.Handover{}))
}

// Of two shims at one state directory, the second waits until its deadline and names the file. It answers Status
// meanwhile. It becomes active when the first releases the state.
func TestSecondActiveShimIsRefusedTheState(t *testing.T) {
	l := dirs(t)
	first, second := newProcess(t), newProcess(t)
	first.activate(l)
	_, err := second.Hello(t.Context(), hello(l))
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- second.Activate(ctx, rpc.Handover{}) }()
	for second.at() != Activating {
		runtime.Gosched()
	}
	if st := second.Status(); st.Lifecycle != pb.LifecycleState_LIFECYCLE_STATE_CANDIDATE || st.Generation != 0 {
		t.Errorf("while it waits: %+v", st)
	}
	must(t, first.starting("a"))
	cancel()
	if err := <-done; !errors.Is(err, registry.ErrConflict) || !errors.Is(err, context.Canceled) ||
		!strings.Contains(err.Error(), l.Database()) {
		t.Errorf("the second: %v", err)
	}
	if st := first.Status(); st.Generation != 1 {
		t.Errorf("the first: %+v", st)
	}
	go func() { done <- second.Activate(t.Context(), rpc.Handover{}) }()
	mustRelease(t, first)
	must(t, <-done)
	if got := second.tasks(); !slices.Equal(got, []string{"a"}) || second.Status().Generation != 2 {
		t.Errorf("the second knows %v, %+v", got, second.Status())
	}
}

func (p *process) at() State {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state
}

// The end of the host also ends a shim that waits for its state.
func TestLifeEndsAnActivationThatWaits(t *testing.T) {
	l := dirs(t)
	first, second := newProcess(t), newProcess(t)
	first.activate(l)
	_, err := second.Hello(t.Context(), hello(l))
	must(t, err)
	done := make(chan error, 1)
	go func() { done <- second.Activate(context.WithoutCancel(t.Context()), rpc.Handover{}) }()
	for second.at() != Activating {
		runtime.Gosched()
	}
	second.stop()
	must(t, <-second.ended)
	if err := <-done; err == nil {
		t.Error("it was activated after its end")
	}
	if st := second.Status(); st.Lifecycle != pb.LifecycleState_LIFECYCLE_STATE_GONE {
		t.Errorf("%+v", st)
	}
}

// A failure of the store ends the process. The call that caused it gets no answer, so the host sends it to the next
// shim.
func TestFailureOfTheStoreEndsTheProcess(t *testing.T) {
	l := dirs(t)
	p := newProcess(t)
	p.activate(l)
	must(t, p.starting("a"))
	must(t, os.Remove(l.Database()))
	err := p.starting("b")
	if st := status.Convert(err); st.Code() != codes.Unavailable || len(st.Details()) > 0 {
		t.Errorf("the call: %v", err)
	}
	if err := <-p.ended; !errors.Is(err, registry.ErrDamaged) ||
		!strings.Contains(err.Error(), "next one starts from the disk") {
		t.Errorf("Run: %v", err)
	}
	if st := p.Status(); st.Lifecycle != pb.LifecycleState_LIFECYCLE_STATE_GONE {
		t.Errorf("%+v", st)
	}
}

// The end of the host takes an active shim down.
func TestEndOfLife(t *testing.T) {
	l := dirs(t)
	p := newProcess(t)
	p.activate(l)
	p.stop()
	must(t, <-p.ended)
	becomes(t, "open", func() []string { return openFiles(l) }, nil)
	if err := p.Activate(t.Context(), rpc.Handover{}); !errors.Is(err, registry.ErrConflict) {
		t.Errorf("Activate of one that is gone: %v", err)
	}
}

// The shim writes a copy only to a regular file that the host has created.
func TestSnapshotIsWrittenToAFile(t *testing.T) {
	l, other := dirs(t), dirs(t)
	p := newProcess(t)
	p.activate(l)
	must(t, p.starting("a"))
	write := func(path string) error {
		stream, err := pb.NewControlClient(p.conn).Snapshot(t.Context(), &pb.SnapshotRequest{File: path})
		must(t, err)
		for {
			chunk, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			if len(chunk.GetData()) > 0 {
				t.Errorf("%s: it was sent as well", path)
			}
		}
	}
	linked, pipe := filepath.Join(other.Run, "linked"), filepath.Join(other.Run, "pipe")
	must(t, os.WriteFile(other.Database(), []byte("what was there before, which is longer than nothing"), 0o600))
	must(t, os.Symlink(other.Database(), linked))
	must(t, unix.Mkfifo(pipe, 0o600))
	for what, path := range map[string]string{"missing": filepath.Join(other.Run, "missing"), "linked": linked,
		"a pipe": pipe, "a directory": other.Run} {
		if err := write(path); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v", what, err)
		}
	}
	must(t, write(other.Database()))
	s, err := store.Open(t.Context(), store.Options{Path: other.Database(), Generation: 1})
	must(t, err)
	defer s.Close()
	if s.Index() != p.Status().Index {
		t.Errorf("index %d, want %d", s.Index(), p.Status().Index)
	}
}

// Release ends watchers and does not wait for them. It waits for workers.
func TestReleaseDoesNotWaitForWatches(t *testing.T) {
	p := newProcess(t)
	p.activate(dirs(t))
	r := p.current()
	end, stopped := make(chan struct{}), make(chan struct{})
	defer close(end)
	r.watchers.Go(func() { <-r.watchCtx.Done(); close(stopped); <-end })
	worked := false
	r.workers.Go(func() { <-r.Context.Done(); runtime.Gosched(); worked = r.watchCtx.Err() == nil })
	released := make(chan error, 1)
	go func() { _, err := p.Release(t.Context()); released <- err }()
	select {
	case err := <-released:
		must(t, err)
	case <-time.After(time.Minute):
		t.Fatal("the release waits for a watcher")
	}
	if !worked {
		t.Error("the worker was not waited for, or the watchers were ended before it")
	}
	<-stopped
}

// Release cuts off an operation whose commit is under way, and releases the state only after the end of the commit. The
// next shim answers the operation.
func TestReleaseWaitsForACommitUnderWay(t *testing.T) {
	l := dirs(t)
	p, next := newProcess(t), newProcess(t)
	reached, cut := make(chan struct{}), make(chan struct{})
	p.Committing = func(at CommitPoint, c registry.Change) {
		if at == BeforeStore && c.Touches(registry.BucketTasks) {
			close(reached)
			<-cut
			if state := p.at(); state != Releasing {
				t.Errorf("the shim is %s during a commit", state)
			}
		}
	}
	p.activate(l)
	answered, released := make(chan error), make(chan error)
	go func() { answered <- p.starting("a") }()
	<-reached
	_, err := p.Quiesce(t.Context())
	must(t, err)
	go func() { _, err := p.Release(t.Context()); released <- err }()
	if err := <-answered; status.Code(err) != codes.Unavailable || len(status.Convert(err).Details()) > 0 {
		t.Errorf("the operation got %v", err)
	}
	for p.current() != nil {
		runtime.Gosched()
	}
	close(cut)
	must(t, <-released)
	next.activate(l)
	must(t, next.starting("a"))
	if got := next.tasks(); !slices.Equal(got, []string{"a"}) {
		t.Errorf("the next shim knows %v", got)
	}
}

// A shim that releases the state answers reads until it has released it. After that, and for all mutating calls, it
// answers that it is not active.
func TestReadsAreAnsweredUntilTheStateIsReleased(t *testing.T) {
	p := newProcess(t)
	p.activate(dirs(t))
	was := p.Status()
	list := func() error {
		reply, err := pb.NewVolumesClient(p.conn).List(t.Context(), &pb.ListVolumesRequest{Call: &pb.Call{}})
		if at := reply.GetAnswer().GetGeneration(); err == nil && at != uint64(was.Generation) {
			t.Errorf("an answer has generation %d, want %d", at, was.Generation)
		}
		return err
	}
	notActive := func(err error) bool {
		st := status.Convert(err)
		return st.Code() == codes.Unavailable && len(st.Details()) == 0
	}
	_, err := p.Quiesce(t.Context())
	must(t, err)
	end := make(chan struct{})
	p.current().workers.Go(func() { <-end })
	released := make(chan error, 1)
	go func() { _, err := p.Release(t.Context()); released <- err }()
	for state, _ := p.stateAndHello(); state != Releasing; state, _ = p.stateAndHello() {
		runtime.Gosched()
	}
	if err := list(); err != nil {
		t.Errorf("volumes are not listed during the release: %v", err)
	}
	if is := p.Status(); is.Generation != was.Generation || is.Index != was.Index || is.Schema != was.Schema {
		t.Errorf("during the release the status is %+v, and was %+v", is, was)
	}
	_, err = pb.NewAllocsClient(p.conn).Release(t.Context(),
		&pb.ReleaseAllocRequest{Call: &pb.Call{OperationId: "0123456789abcdef0123456789abcdef"}, Alloc: "a"})
	if !notActive(err) {
		t.Errorf("an alloc is released during the release of the state: %v", err)
	}
	close(end)
	must(t, <-released)
	if err := list(); !notActive(err) {
		t.Errorf("volumes are listed after the release: %v", err)
	}
	if is := p.Status(); is.Generation != 0 || is.Index != 0 ||
		is.Lifecycle != pb.LifecycleState_LIFECYCLE_STATE_RELEASED {
		t.Errorf("the status after the release is %+v", is)
	}
}

func mustRelease(t *testing.T, p *process) {
	t.Helper()
	_, err := p.Release(t.Context())
	must(t, err)
}
