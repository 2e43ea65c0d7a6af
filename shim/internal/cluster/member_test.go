package cluster

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"holdfast/internal/etcdtest"
	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// TestNameOfAnotherMember starts a node with the name of another one: it waits, and fences nobody.
func TestNameOfAnotherMember(t *testing.T) {
	client := etcdtest.Start(t)
	first := newNode(t, client, "node")
	second := &testNode{dir: filepath.Join(t.TempDir(), "state"), name: "node", client: client}
	second.offline(t, func(local registry.State) {
		s := New(local, client, t.Name(), "node")
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if err := s.Run(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		why := s.waiting.Load()
		if why == nil || !strings.Contains((*why).Error(), `another member of the cluster has the name "node"`) {
			t.Errorf("it waits because of %v", why)
		}
	})
	registrytest.Put(t, first, claim("v", "a"), registry.Node{Name: "node", State: registry.NodeOutOfService, Epoch: 1})
	second.start(t) // a machine that replaces a lost one
	t.Cleanup(func() { second.stop() })
	registrytest.Put(t, second, claim("v", "b"))
}

// denied refuses all reads.
type denied struct{ clientv3.KV }

func (denied) Get(context.Context, string, ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	return nil, rpctypes.ErrPermissionDenied
}

// TestNodeWithoutPermissions starts a node whose certificate etcd does not let read: it waits, and says why.
func TestNodeWithoutPermissions(t *testing.T) {
	client := etcdtest.Start(t)
	n := &testNode{dir: filepath.Join(t.TempDir(), "state"), name: "node", client: client}
	n.offline(t, func(local registry.State) {
		s := New(local, client, t.Name(), "node")
		s.kv = denied{s.kv}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if err := s.Run(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		if why := s.waiting.Load(); why == nil || !errors.Is(*why, rpctypes.ErrPermissionDenied) {
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
		want    string // part of the error; empty: none
	}{
		{"new node without a cluster", nil, "", ""},
		{"new node", nil, "a", ""},
		{"node without a cluster", volume, "", ""},
		{"node with volumes", volume, "a", "holdfast cluster migrate"},
		{"member", registry.Copy{Cluster: "a"}, "a", ""},
		{"member without its cluster", registry.Copy{Cluster: "a"}, "", "configure it with the cluster block"},
		{"member of another cluster", registry.Copy{Cluster: "b"}, "a", `member of cluster "b"`},
	} {
		t.Run(test.name, func(t *testing.T) {
			n := &testNode{dir: filepath.Join(t.TempDir(), "state")}
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
