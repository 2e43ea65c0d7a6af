package cluster

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/config"
	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// secondTry calls found when a node tries the second time to join.
type secondTry struct {
	clientv3.KV
	formation string
	tries     *atomic.Int32
	found     func()
}

func (s secondTry) Get(ctx context.Context, key string, o ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	if key == s.formation && s.tries.Add(1) == 2 {
		s.found()
	}
	return s.KV.Get(ctx, key, o...)
}

// whyItWaits starts the node and returns the reason why it does not join its cluster.
func whyItWaits(t *testing.T, s *State) (why error) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s.kv = secondTry{s.kv, s.record(registry.Formation{Cluster: s.id}.Key()), &atomic.Int32{},
		func() { why = *s.notReady.Load(); cancel() }}
	if err := s.Run(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	return why
}

// wantNoMember checks that a node can start without the cluster that has refused it.
func wantNoMember(t *testing.T, local registry.State) {
	t.Helper()
	if err := local.View(t.Context(), func(v registry.View) error { return CheckMember(v, "") }); err != nil {
		t.Error(err)
	}
}

// failingOnce fails the first read of a key.
type failingOnce struct {
	clientv3.KV
	key    string
	failed *atomic.Bool
}

func (f failingOnce) Get(ctx context.Context, key string, o ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	if key == f.key && f.failed.CompareAndSwap(false, true) {
		return nil, status.Error(codes.Unavailable, "etcd has no leader")
	}
	return f.KV.Get(ctx, key, o...)
}

// TestNameOfAnotherMember starts a node with the name of another member. The node waits, and does not fence the member.
func TestNameOfAnotherMember(t *testing.T) {
	client := parallelWithEtcd(t)
	first := newNode(t, client, "node")
	second := newOffline(t, client, "node")
	second.offline(t, func(local registry.State) {
		s := New(local, client, t.Name(), "node")
		why := whyItWaits(t, s)
		if !strings.Contains(why.Error(), `another member of the cluster has the name "node"`) {
			t.Errorf("it waits because of %v", why)
		}
		wantNoMember(t, local)
	})
	registrytest.Put(t, first, claim("v", "a"), registry.Node{Name: "node", State: registry.NodeOutOfService, Epoch: 1})
	s := New(nil, client, t.Name(), "node")
	s.kv = failingOnce{s.kv, s.record(registry.NodeRecord("node")), &atomic.Bool{}}
	if _, err := s.registered(t.Context(), "another"); err != nil {
		t.Errorf("the name of a lost node, whose record is read in the second try: %v", err)
	}
	second.start(t) // a machine that replaces a lost one
	registrytest.Put(t, second, claim("v", "b"))
}

// TestMemberWithAnotherName starts a member with another name. It waits, because its claims have the old name.
func TestMemberWithAnotherName(t *testing.T) {
	n := newNode(t, parallelWithEtcd(t), "old")
	n.stop()
	n.offline(t, func(local registry.State) {
		why := whyItWaits(t, New(local, n.etcd, t.Name(), "new"))
		if !errors.Is(why, registry.ErrConflict) || !strings.Contains(why.Error(), "cluster leave --node old") {
			t.Errorf("it waits because of %v", why)
		}
	})
	n.start(t)
	registrytest.Put(t, n, claim("v", "a"))
}

// TestNodeWithAnotherExpectation starts a node that expects more nodes than the cluster was created with. The node
// waits, says what to do, and does not join. The same holds if it starts at the same time as the first node.
func TestNodeWithAnotherExpectation(t *testing.T) {
	client := parallelWithEtcd(t)
	first := newMember(t, client, "first")
	const want = "created with expect = 1, which cannot be changed, " +
		"and this node is configured with expect = 2: write 1"
	second := newOffline(t, client, "second")
	second.offline(t, func(local registry.State) {
		s := New(local, client, t.Name(), "second")
		s.expect = 2
		if why := whyItWaits(t, s); !strings.Contains(why.Error(), want) {
			t.Errorf("it waits because of %v", why)
		}
		wantNoMember(t, local)
	})
	third := newNode(t, client, "third")
	third.expect = 2
	n := &Node{State: third.State, Executors: first.Executors, plugins: first.Node.plugins}
	if err := n.describeNow(t.Context()); !errors.Is(err, registry.ErrInvalid) || !strings.Contains(err.Error(), want) {
		t.Errorf("a node that has joined before the first one was recorded: %v", err)
	}
	look(t, third.State, func(v registry.View) {
		if nodes := v.Nodes(); len(nodes) != 1 {
			t.Errorf("nodes of the cluster: %+v", nodes)
		}
	})
}

// TestMemberWithAnotherExpectation changes the number of nodes that a member is configured with. It stays a member, and
// the cluster forms with the number that it was created with.
func TestMemberWithAnotherExpectation(t *testing.T) {
	n := newNode(t, parallelWithEtcd(t), "node")
	n.expect = 2
	m := n.asMember(t)
	for _, expect := range []int{2, 1, 3} {
		n.expect = expect
		if err := errors.Join(n.checkFormation(t.Context()), m.describeNow(t.Context())); err != nil {
			t.Error(err)
		}
		look(t, n, func(v registry.View) {
			if f := v.Formation(); f.Expect != 2 || f.Formed || (m.expects.last == "") != (expect == 2) {
				t.Errorf("configured with %d: %+v; logged %q", expect, f, m.expects.last)
			}
			st := v.NodeStatus(v.Nodes()[0], nil, nil)
			if !strings.HasPrefix(st.Unformed, "1 of 2 nodes of the cluster have") {
				t.Errorf("the status is %+v", st)
			}
		})
	}
}

// TestMemberOfAClusterThatEtcdHasLost starts a member of a cluster whose records are gone from etcd, and then with an
// etcd where another node has formed the cluster again. The member waits, and keeps its records.
func TestMemberOfAClusterThatEtcdHasLost(t *testing.T) {
	client := parallelWithEtcd(t)
	form := func(n *testNode) {
		registrytest.Put(t, n, registry.Formation{Cluster: t.Name(), Expect: 1, Formed: true, Since: time.Now()})
	}
	n := newNode(t, client, "node")
	form(n)
	registrytest.Put(t, n, claim("v", "a"))
	n.stop()
	if _, err := client.Delete(t.Context(), n.prefix, clientv3.WithPrefix()); err != nil {
		t.Fatal(err)
	}
	wantRefusal := func() {
		t.Helper()
		n.offline(t, func(local registry.State) {
			s := New(local, client, t.Name(), "node")
			if why := whyItWaits(t, s); !errors.Is(why, registry.ErrConflict) ||
				!strings.Contains(why.Error(), "etcd does not have the records of cluster") {
				t.Errorf("it waits because of %v", why)
			}
			// a shim that ran meanwhile loads the copy anew if etcd has compacted its revision
			if _, err := s.load(t.Context()); !errors.Is(err, registry.ErrConflict) {
				t.Errorf("it loads the copy: %v", err)
			}
			look(t, local, func(v registry.View) {
				if len(v.AllClaims()) != 1 {
					t.Errorf("claims: %v", v.AllClaims())
				}
			})
			left := Leave(t.Context(), local, config.Cluster{ID: t.Name(), Endpoints: client.Endpoints()}, "node",
				hclog.NewNullLogger())
			if left == nil || !strings.Contains(left.Error(), "leave --force --confirm") {
				t.Errorf("it leaves: %v", left)
			}
		})
	}
	wantRefusal()
	form(newNode(t, client, "other"))
	wantRefusal()
}

// denied refuses all reads.
type denied struct{ clientv3.KV }

func (denied) Get(context.Context, string, ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	return nil, rpctypes.ErrPermissionDenied
}

// TestNodeWithoutPermissions starts a node whose certificate gives no permission to read etcd. It waits, and says why.
func TestNodeWithoutPermissions(t *testing.T) {
	client := parallelWithEtcd(t)
	n := newOffline(t, client, "node")
	n.offline(t, func(local registry.State) {
		s := New(local, client, t.Name(), "node")
		s.kv = denied{s.kv}
		if why := whyItWaits(t, s); !errors.Is(why, rpctypes.ErrPermissionDenied) {
			t.Errorf("it waits because of %v", why)
		}
	})
}

func TestCheckMember(t *testing.T) {
	volume := registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: "default", ID: "v"}}
	for _, test := range []struct {
		name    string
		record  registry.Record
		cluster string
		want    string // a part of the error; empty: no error
	}{
		{"new node without a cluster", nil, "", ""},
		{"new node", nil, "a", ""},
		{"node without a cluster", volume, "", ""},
		{"node with volumes", volume, "a", "holdfast cluster migrate"},
		{"node without volumes that was drained", registry.Node{Name: "node", State: registry.NodeReady}, "a", ""},
		{"member", registry.Copy{Cluster: "a"}, "a", ""},
		{"member without its cluster", registry.Copy{Cluster: "a"}, "", "configure it with the cluster block"},
		{"member of another cluster", registry.Copy{Cluster: "b"}, "a", `member of cluster "b"`},
	} {
		t.Run(test.name, func(t *testing.T) {
			n := newOffline(t, nil, "node")
			n.offline(t, func(s registry.State) {
				if test.record != nil {
					registrytest.Put(t, s, test.record)
				}
				err := s.View(t.Context(), func(v registry.View) error { return CheckMember(v, test.cluster) })
				if test.want == "" && err != nil || test.want != "" && !errors.Is(err, registry.ErrConflict) ||
					err != nil && !strings.Contains(err.Error(), test.want) {
					t.Errorf("%v, want %q", err, test.want)
				}
			})
		})
	}
}
