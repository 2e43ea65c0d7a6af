package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/store"
)

// ownVolumes returns volumes of a node with their claims: more records than one transaction moves.
func ownVolumes(node registry.NodeName) (records []registry.Record) {
	for i := range batchSize {
		name := fmt.Sprintf("v-%02d", i)
		records = append(records, volumeOf(name, name))
		c := claimOf(node, name, "a")
		records = append(records, c)
	}
	return records
}

func volumeOf(id, external string) registry.Volume {
	return registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: "default", ID: registry.VolumeID(id), Plugin: "p",
		External: registry.ExternalID(external)}, Created: true, State: registry.VolumeReady}
}

func noSecrets([]SecretUse) {}

// killing returns a KV that kills this process at a moment before or after a transaction. It skips the given number of
// such moments.
func killing(kv clientv3.KV, moments int) clientv3.KV {
	moment := func() {
		if moments--; moments < 0 {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	return withCommit(kv, func(_ context.Context, send sendTxn) (*clientv3.TxnResponse, error) {
		moment()
		defer moment()
		return send()
	})
}

// killedMigration is the environment variable with the arguments of becomeKilledMigration.
const killedMigration = "HOLDFAST_KILLED_MIGRATION"

// becomeKilledMigration migrates a node in this process and kills the process on the way, if killedMigration is set.
func becomeKilledMigration() {
	var endpoint, id, dir string
	var moments int
	if _, err := fmt.Sscan(os.Getenv(killedMigration), &endpoint, &id, &dir, &moments); err != nil {
		return
	}
	ctx := context.Background()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}})
	if err != nil {
		panic(err)
	}
	local, err := store.Open(ctx, store.Options{Path: filepath.Join(dir, "shim.db")})
	if err != nil {
		panic(err)
	}
	go func() { _ = local.Run(ctx) }()
	s := New(local, client, id, "node")
	s.kv = killing(s.kv, moments)
	if _, err := s.migrate(ctx, noSecrets); err != nil {
		panic(err)
	}
	os.Exit(0)
}

// TestMigrate kills a migration before and after each of its transactions, and repeats it. Afterwards another node sees
// all records, and each volume with its claim.
func TestMigrate(t *testing.T) {
	client := parallelWithEtcd(t)
	other := newNode(t, client, "other")
	node := newOffline(t, client, "node")
	records := ownVolumes("node")
	node.offline(t, func(s registry.State) { registrytest.Put(t, s, records...) })
	// Each process continues with the transactions that the earlier ones have not made.
	for _, kill := range []struct {
		when    string
		moments int // see killing
	}{{"before the first", 0}, {"after the first", 1}, {"before the second", 0}, {"after the last", 1}} {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s %s %d",
			killedMigration, client.Endpoints()[0], t.Name(), node.dir, kill.moments))
		out, err := cmd.CombinedOutput()
		end, is := errors.AsType[*exec.ExitError](err)
		if !is || end.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatalf("killed %s transaction: %v\n%s", kill.when, err, out)
		}
	}
	node.offline(t, func(s registry.State) {
		if err := s.View(t.Context(), func(v registry.View) error { return CheckMember(v, "") }); err != nil {
			t.Errorf("the node is a member before its migration has ended: %v", err)
		}
		for _, want := range []int{len(records), 0} { // the first migration makes the node a member
			moved, err := New(s, client, t.Name(), "node").migrate(t.Context(), noSecrets)
			if err != nil || moved != want {
				t.Errorf("moved %d of %d records: %v", moved, want, err)
			}
		}
	})
	node.start(t)
	other.catchUp(t)
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

// TestMigrateRefuses moves nothing if the cluster has a different record, or if a call of the node is unfinished.
func TestMigrateRefuses(t *testing.T) {
	client := parallelWithEtcd(t)
	other := newNode(t, client, "other")
	registrytest.Put(t, other, volumeOf("taken", "x"), volumeOf("name", "same"))
	key := registry.VolumeKey{Plugin: "p", External: "v"}
	const otherName = `node "old-name", but this node is called "node"`
	stored := volumeOf("stored", "stored")
	stored.Node = "old-name"
	for _, test := range []struct {
		record registry.Record
		want   string
	}{
		{volumeOf("taken", "y"), `the cluster has another volume "taken"`},
		{volumeOf("another-name", "same"), `is volume "name" of the cluster`},
		{claimOf("old-name", "v", "a"), otherName},
		{registry.EndpointUse{Volume: key, Call: registry.NodeStageRPC, Target: "/mnt", Node: "old-name"}, otherName},
		{stored, otherName},
		{registry.VolumeSnapshot{SnapshotSpec: registry.SnapshotSpec{Namespace: "default", ID: "s", Volume: "v"},
			Plugin: "p", Source: "v", Node: "old-name", State: registry.SnapshotReady}, otherName},
		{registry.Intent{Volume: key, RPC: registry.CreateVolumeRPC, Outcome: registry.OutcomePending},
			"unfinished since"},
		{registry.VolumeSnapshot{SnapshotSpec: registry.SnapshotSpec{Namespace: "default", ID: "s", Volume: "v"},
			Plugin: "p", Source: "v", State: registry.SnapshotCreating}, "snapshot default/s is creating"},
	} {
		node := newOffline(t, client, "node")
		node.offline(t, func(s registry.State) {
			registrytest.Put(t, s, append(ownVolumes("node"), test.record)...)
			_, err := New(s, client, t.Name(), "node").migrate(t.Context(), noSecrets)
			if !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %s", err, test.want)
			}
		})
	}
	registrytest.Put(t, other, registry.Formation{Cluster: t.Name(), Expect: 3})
	node := newOffline(t, client, "node")
	node.offline(t, func(s registry.State) {
		registrytest.Put(t, s, ownVolumes("node")...)
		state := New(s, client, t.Name(), "node")
		state.expect = 5
		if _, err := state.migrate(t.Context(), noSecrets); err == nil ||
			!strings.HasSuffix(err.Error(), "expect = 5: write 3 in its cluster block, and restart its agent") {
			t.Errorf("with another number of nodes: %v", err)
		}
	})
	found, err := client.Get(t.Context(), other.record(ownVolumes("node")[0].Key()))
	if err != nil || len(found.Kvs) > 0 {
		t.Errorf("something was moved: %v, %v", found, err)
	}
}
