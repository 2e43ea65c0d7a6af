package cluster

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"holdfast/internal/etcdtest"
	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/controller"
	"holdfast/shim/internal/store"
)

// claimers is the number of allocs that claim at the same time.
const claimers = 64

// BenchmarkClaim claims and releases volumes for 64 allocs at the same time, one volume for each. It compares the rate
// with that of bare commits of records of the same size: transactions of etcd that compare a revision, or store
// commits.
func BenchmarkClaim(b *testing.B) {
	b.Run("etcd", func(b *testing.B) {
		client := etcdtest.Start(b)
		n := newNode(b, client, "node")
		value := make([]byte, 500)
		ratio(b, n.State, func(ctx context.Context, worker, i int) error {
			key := fmt.Sprintf("bare/%d", worker)
			var revision int64
			for range 2 { // a claim and its release
				answer, err := client.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), ">", revision-1)).
					Then(clientv3.OpPut(key, string(value))).Commit()
				if err != nil || !answer.Succeeded {
					return fmt.Errorf("bare transaction %d: %w", i, err)
				}
				revision = answer.Header.Revision
			}
			return nil
		})
	})
	b.Run("store", func(b *testing.B) {
		s := openStore(b, nil)
		ratio(b, s, func(ctx context.Context, worker, i int) error {
			for range 2 {
				_, err := s.Commit(ctx, func(registry.View) (registry.Change, error) {
					return registry.Change{Put: []registry.Record{claim(fmt.Sprint("bare-", worker), "a")}}, nil
				})
				if err != nil {
					return err
				}
			}
			return nil
		})
	})
}

// ratio measures claims and bare commits in turn. It reports the rate of claims, and its ratio to the rate of bare
// commits.
func ratio(b *testing.B, s registry.State, bare func(ctx context.Context, worker, i int) error) {
	var volumes []registry.Record
	for i := range claimers {
		volumes = append(volumes, claimable(i))
	}
	claims := newClaims(b, s, volumes)
	var claimed, committed time.Duration
	const each = 10
	commits := 0.
	for b.Loop() {
		commits += 2 * claimers * each
		committed += concurrently(b, each, bare)
		claimed += concurrently(b, each, func(ctx context.Context, worker, i int) error {
			c := claim(fmt.Sprint("v-", worker), fmt.Sprint("alloc-", i))
			c.Usage = registry.Usage{Access: registry.SingleNodeWriter, Attachment: registry.FileSystem}
			if _, err := claims.Claim(ctx, c); err != nil {
				return err
			}
			_, err := claims.Unclaim(ctx, c.ClaimKey(), true)
			return err
		})
	}
	b.ReportMetric(commits/claimed.Seconds(), "commits/s")
	b.ReportMetric(committed.Seconds()/claimed.Seconds(), "of-bare")
}

// newClaims puts the records, and returns the claims in the state. In a cluster, volumes can be claimed only once the
// cluster has formed, so newClaims also records that.
func newClaims(b *testing.B, s registry.State, records []registry.Record) *controller.Claims {
	calls := callsOf(s)
	if _, clustered := s.(*State); clustered {
		calls.Node = "n"
		records = append(records, registry.Formation{Cluster: "bench", Expect: 1, Formed: true})
	}
	registrytest.Put(b, s, records...)
	return controller.NewClaims(calls)
}

// concurrently calls do so many times in each worker, and returns how long all calls took together.
func concurrently(b *testing.B, times int, do func(ctx context.Context, worker, i int) error) time.Duration {
	began := time.Now()
	var workers sync.WaitGroup
	for worker := range claimers {
		workers.Go(func() {
			for i := range times {
				if err := do(b.Context(), worker, i); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	workers.Wait()
	return time.Since(began)
}

// BenchmarkClaimAmongMany measures one claim and its release beside 100 and 100 000 claims of other volumes.
func BenchmarkClaimAmongMany(b *testing.B) {
	for _, count := range []int{100, 100_000} {
		b.Run(fmt.Sprint("etcd/", count), func(b *testing.B) {
			claimAmong(b, newNode(b, etcdtest.Start(b), "node").State, count)
		})
		b.Run(fmt.Sprint("store/", count), func(b *testing.B) { claimAmong(b, openStore(b, nil), count) })
	}
}

func claimAmong(b *testing.B, s registry.State, count int) {
	records := []registry.Record{claimable(0)}
	for i := range count {
		records = append(records, claim(fmt.Sprint("other-", i), "a"))
	}
	claims := newClaims(b, s, records)
	c := claim("v-0", "alloc")
	c.Usage = registry.Usage{Access: registry.SingleNodeWriter, Attachment: registry.FileSystem}
	for b.Loop() {
		if _, err := claims.Claim(b.Context(), c); err != nil {
			b.Fatal(err)
		}
		if _, err := claims.Unclaim(b.Context(), c.ClaimKey(), true); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkWaiter has an alloc wait for the release of a volume, and then claim it. It measures from the end of the
// release's commit until the waiter is awake, and until its claim is granted. It compares these times with that of a
// bare commit in the same run. With etcd, the waiter is on another node.
func BenchmarkWaiter(b *testing.B) {
	b.Run("etcd", func(b *testing.B) {
		client := etcdtest.Start(b)
		holder, waiter := newNode(b, client, "node-1"), newNode(b, client, "node-2")
		wait(b, holder.State, waiter.State, waiter.copy.changed.next, func() error {
			_, err := client.Txn(b.Context()).If(clientv3.Compare(clientv3.ModRevision("bare"), ">", -1)).
				Then(clientv3.OpPut("bare", "value")).Commit()
			return err
		})
	})
	b.Run("store", func(b *testing.B) {
		var applied broadcast
		s := openStore(b, func(registry.Applied) { applied.fire() })
		wait(b, s, s, applied.next, func() error {
			_, err := s.Commit(b.Context(), func(registry.View) (registry.Change, error) {
				return registry.Change{Put: []registry.Record{claim("bare", "a")}}, nil
			})
			return err
		})
	})
}

// wait measures waits for releases. next returns a channel that is closed at the waiter's next change.
func wait(b *testing.B, holder, waiter registry.State, next func() <-chan struct{}, bare func() error) {
	registrytest.Put(b, holder, claimable(0))
	held, wanted := claim("v-0", "holder"), claim("v-0", "waiter")
	held.Usage = registry.Usage{Access: registry.SingleNodeWriter, Attachment: registry.FileSystem}
	wanted.Usage = held.Usage
	holding, waiting := controller.NewClaims(callsOf(holder)), controller.NewClaims(callsOf(waiter))
	must := func(err error) {
		if err != nil {
			b.Fatal(err)
		}
	}
	var commits, untilAwake, untilGranted time.Duration
	for b.Loop() {
		began := time.Now()
		must(bare())
		commits += time.Since(began)
		_, err := holding.Claim(b.Context(), held)
		must(err)
		waits, granted := make(chan struct{}), make(chan error)
		var awake, done time.Time
		go func() {
			changed := next()
			_, err := waiting.Claim(b.Context(), wanted)
			for first := true; errors.Is(err, registry.ErrConflict); first = false {
				if first {
					close(waits)
				}
				<-changed
				awake, changed = time.Now(), next()
				_, err = waiting.Claim(b.Context(), wanted)
			}
			done = time.Now()
			granted <- err
		}()
		<-waits
		_, err = holding.Unclaim(b.Context(), held.ClaimKey(), true)
		released := time.Now()
		must(err)
		must(<-granted)
		untilAwake += max(0, awake.Sub(released))
		untilGranted += max(0, done.Sub(released))
		_, err = waiting.Unclaim(b.Context(), wanted.ClaimKey(), true)
		must(err)
	}
	b.ReportMetric(untilAwake.Seconds()/commits.Seconds(), "commits-until-awake")
	b.ReportMetric(untilGranted.Seconds()/commits.Seconds(), "commits-until-granted")
}

func openStore(b testing.TB, applied func(registry.Applied)) registry.State {
	b.Helper()
	path := filepath.Join(b.TempDir(), "state", "shim.db")
	s, err := store.Open(b.Context(), store.Options{Path: path, Applied: applied})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = s.Run(ctx) })
	b.Cleanup(func() { cancel(); running.Wait(); _ = s.Close() })
	return s
}

func claimable(i int) registry.Volume {
	v := volumeOf(fmt.Sprint("v-", i), fmt.Sprint("v-", i))
	v.Capabilities = []registry.VolumeCapability{{Access: registry.SingleNodeWriter, Attachment: registry.FileSystem}}
	return v
}

// noPlugins is the table of a node without plugins.
type noPlugins struct{}

func (noPlugins) Find(registry.Role, registry.PluginID) (i registry.Instance, found bool) {
	return i, false
}
func (noPlugins) Members(registry.Role, registry.PluginID) []registry.Instance { return nil }
func (noPlugins) Await(ctx context.Context, _ registry.Role, _ registry.PluginID) (i registry.Instance, err error) {
	return i, registry.ErrUnavailable
}
