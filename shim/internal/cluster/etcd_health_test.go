package cluster

import (
	"context"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"

	"holdfast/config"
	"holdfast/internal/etcdtest"
	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// wantProblem waits until Problem matches want.
func wantProblem(t *testing.T, s *State, want string) {
	t.Helper()
	pattern := regexp.MustCompile("^" + want + "$")
	for end := time.Now().Add(time.Minute); !pattern.MatchString(s.Problem()); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%q, wanted %s", s.Problem(), want)
		}
	}
}

// runDialed runs the state of a node with its own client.
func runDialed(t *testing.T, c config.Cluster) *State {
	t.Helper()
	s, err := dial(c, openStore(t, nil), "n")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() { _ = s.Run(ctx) })
	t.Cleanup(func() { cancel(); all.Wait(); _ = s.client.Close() })
	return s
}

// TestProblemNamesTheSilentEtcd stops the process of etcd while a node runs. It also starts nodes with an endpoint
// where nothing listens, and with that of another server.
func TestProblemNamesTheSilentEtcd(t *testing.T) {
	t.Parallel()
	const date = `20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ`
	t.Run("stopped", func(t *testing.T) {
		t.Parallel()
		client, process := etcdtest.StartProcess(t)
		n := newNode(t, client, "n")
		wantProblem(t, n.State, "")
		if err := process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		// some threads may run on for a moment, so wait until all have stopped
		if _, err := syscall.Wait4(process.Pid, nil, syscall.WUNTRACED, nil); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() {
			_, err := n.Commit(t.Context(), func(registry.View) (registry.Change, error) {
				return registry.Change{Put: []registry.Record{claim("vol", "alloc")}}, nil
			})
			done <- err
		}()
		wantProblem(t, n.State, "etcd has not answered since "+date+` \(http://127.0.0.2:\d+\)`)
		if err := process.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		wantProblem(t, n.State, "")
	})
	server, absent := httptest.NewServer(http.NotFoundHandler()), httptest.NewServer(nil)
	t.Cleanup(server.Close)
	absent.Close()
	for name, test := range map[string]struct{ endpoint, want string }{
		"absent": {absent.URL, "connection refused"}, "another server": {server.URL, "error reading server preface"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := runDialed(t, config.Cluster{Endpoints: []string{test.endpoint}, LeaseTTL: leaseTTL})
			wantProblem(t, s,
				`etcd has not answered since the shim started at `+date+` \(`+test.endpoint+`\): .*`+test.want+".*")
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			if err := s.awaitReady(ctx); err == nil || !strings.Contains(err.Error(), s.Problem()) {
				t.Errorf("%v", err)
			}
		})
	}
}

// TestProblemNamesARefusal has etcd refuse a request, as if the role of the node's certificate had no permissions any
// more.
func TestProblemNamesARefusal(t *testing.T) {
	h := &etcdHealth{began: time.Unix(1, 0)}
	refuse := func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
		return rpctypes.ErrGRPCPermissionDenied
	}
	_ = h.intercept(t.Context(), "", nil, nil, nil, refuse)
	const want = "etcd has refused this node's requests since the shim started at 1970-01-01T00:00:01Z (at): " +
		"etcdserver: permission denied"
	if text := h.silence([]string{"at"}); text != want {
		t.Errorf("%q, want %q", text, want)
	}
}

// TestProblemNamesTheFullEtcd has etcd refuse changes, as if its database had no space left. The problem says what to
// do. It ends once etcd takes changes again, even if nothing is committed then.
func TestProblemNamesTheFullEtcd(t *testing.T) {
	t.Parallel()
	client := etcdtest.Start(t)
	x := newMember(t, client, "n")
	wantProblem(t, x.testNode.State, "")
	maintenance := pb.NewMaintenanceClient(client.ActiveConnection())
	members, err := client.MemberList(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	alarm := func(action pb.AlarmRequest_AlarmAction) {
		t.Helper()
		if _, err := maintenance.Alarm(t.Context(), &pb.AlarmRequest{Action: action, Alarm: pb.AlarmType_NOSPACE,
			MemberID: members.Members[0].ID}); err != nil {
			t.Fatal(err)
		}
	}
	alarm(pb.AlarmRequest_ACTIVATE)
	_, err = x.Commit(t.Context(), deciding(claim("vol", "alloc")))
	if err == nil || !strings.Contains(err.Error(), "database space exceeded") {
		t.Errorf("a commit to a full etcd: %v", err)
	}
	wantProblem(t, x.testNode.State,
		"etcd is full .*database space exceeded.*compact it, defragment each member, .*alarm disarm")
	alarm(pb.AlarmRequest_DEACTIVATE)
	wantProblem(t, x.testNode.State, "")
	registrytest.Put(t, x, claim("vol", "alloc"))
}
