package cluster

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"holdfast/internal/etcdtest"
	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// ownVolumes are more records of a node than one transaction moves: volumes with their claims.
func ownVolumes(node registry.NodeName) (records []registry.Record) {
	for i := range batchSize {
		name := fmt.Sprintf("v-%02d", i)
		records = append(records, volumeOf(name, name))
		c := claim(name, "a")
		c.Node = node
		records = append(records, c)
	}
	return records
}

func volumeOf(id, external string) registry.Volume {
	return registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: "default", ID: registry.VolumeID(id), Plugin: "p",
		External: registry.ExternalID(external)}, Created: true, State: registry.VolumeReady}
}

// stopping calls stop before a transaction after the first ones.
type stopping struct {
	clientv3.KV
	after int
	stop  func()
}

func (k *stopping) Txn(ctx context.Context) clientv3.Txn {
	if k.after--; k.after < 0 {
		k.stop()
	}
	return k.KV.Txn(ctx)
}

// TestMigrate interrupts a migration, and repeats it: another node sees all records, and each volume with its claim.
func TestMigrate(t *testing.T) {
	client := etcdtest.Start(t)
	other := newNode(t, client, "other")
	node := &testNode{dir: filepath.Join(t.TempDir(), "state"), name: "node", client: client}
	records := ownVolumes("node")
	node.offline(t, func(s registry.State) {
		registrytest.Put(t, s, records...)
		interrupted := New(s, client, t.Name(), "node")
		ctx, cancel := context.WithCancel(t.Context())
		interrupted.kv = &stopping{interrupted.kv, 1, cancel}
		if _, err := interrupted.migrate(ctx); err == nil {
			t.Error("the interrupted migration has succeeded")
		}
		if err := s.View(t.Context(), func(v registry.View) error { return CheckMember(v, "") }); err != nil {
			t.Errorf("the node is a member after half of its records: %v", err)
		}
		for _, want := range []int{len(records), 0} { // the node is a member then
			if moved, err := New(s, client, t.Name(), "node").migrate(t.Context()); err != nil || moved != want {
				t.Errorf("moved %d of %d records: %v", moved, want, err)
			}
		}
	})
	node.start(t)
	defer node.stop()
	if err := other.copy.wait(t.Context(), node.reached()); err != nil {
		t.Fatal(err)
	}
	for _, n := range []*testNode{node, other} {
		look(t, n, func(v registry.View) {
			for _, r := range records {
				if v.Get(r.Key()) == nil {
					t.Errorf("%s has no record of %s", n.name, nameOf(r))
				}
			}
			if _, found := v.VolumeByKey(registry.VolumeKey{Plugin: "p", External: "v-00"}); !found {
				t.Errorf("%s does not find a volume by the plugin's id", n.name)
			}
		})
	}
}

// TestMigrateRefuses moves nothing of what the cluster has otherwise, or of a node with unfinished calls.
func TestMigrateRefuses(t *testing.T) {
	client := etcdtest.Start(t)
	other := newNode(t, client, "other")
	registrytest.Put(t, other, volumeOf("taken", "x"), volumeOf("name", "same"))
	elsewhere := claim("v", "a")
	elsewhere.Node = "old-name"
	key := registry.VolumeKey{Plugin: "p", External: "v"}
	for _, test := range []struct {
		record registry.Record
		want   string
	}{
		{volumeOf("taken", "y"), `the cluster has another volume "taken"`},
		{volumeOf("another-name", "same"), `is volume "name" of the cluster`},
		{elsewhere, `in use by node "old-name", but this node is called "node"`},
		{registry.Intent{Volume: key, RPC: registry.CreateVolumeRPC, Outcome: registry.OutcomePending}, "is unfinished"},
	} {
		node := &testNode{dir: filepath.Join(t.TempDir(), "state"), name: "node", client: client}
		node.offline(t, func(s registry.State) {
			registrytest.Put(t, s, append(ownVolumes("node"), test.record)...)
			_, err := New(s, client, t.Name(), "node").migrate(t.Context())
			if !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %s", err, test.want)
			}
		})
	}
	if found, err := client.Get(t.Context(), other.record(ownVolumes("node")[0].Key())); err != nil || len(found.Kvs) > 0 {
		t.Errorf("something was moved: %v, %v", found, err)
	}
}
