package e2e

import (
	"errors"
	"slices"
	"testing"
	"time"

	"holdfast/host"
	"holdfast/internal/csifake"
)

// TestBlockingListsSurviveSwaps lets lists wait for a claim while shims are swapped and die. The claim answers all of
// them. A further call with the index of the answer waits for the release.
func TestBlockingListsSurviveSwaps(t *testing.T) {
	e := newEnv(t, allCaps...)
	plugin := e.addPlugin("plugin", csifake.Monolith)
	e.must(e.create("vol"))
	_, at, err := e.host.Claims(e.ctx(), host.ClaimQuery{})
	e.must(err)
	type answer struct {
		claims []host.Claim
		at     host.Seq
		err    error
	}
	const many = 100
	answers := make(chan answer, many)
	wait := func(after host.Seq) {
		claims, at, err := e.host.Claims(e.ctx(), host.ClaimQuery{Blocking: host.Blocking{MinIndex: after}})
		answers <- answer{claims, at, err}
	}
	for range many {
		go wait(at)
	}
	e.swap()
	e.killShim()
	e.swap()
	if len(answers) > 0 {
		t.Fatalf("%d of %d calls were answered before a claim: %+v", len(answers), many, <-answers)
	}
	began := time.Now()
	if _, same, err := e.host.Claims(e.ctx(),
		host.ClaimQuery{Blocking: host.Blocking{MinIndex: at, Wait: 1}}); err != nil ||
		same != at {
		t.Errorf("the wait ended with index %d instead of %d, %v, after %v", same, at, err, time.Since(began))
	}
	e.use("user", request{source: "vol"})
	for range many {
		a := <-answers
		if e.must(a.err); len(a.claims) != 1 || a.claims[0].Alloc != "user" {
			t.Fatalf("the claim is not in %+v", a.claims)
		}
		at = a.at
	}
	go wait(at)
	e.must(e.release("user"))
	if a := <-answers; a.err != nil || len(a.claims) > 0 || a.at <= at {
		t.Errorf("after the release: %+v", a)
	}
	e.stopPlugin(plugin)
}

// TestListsWaitForOtherNodes has each list of what nodes share wait at one node for what another one does.
func TestListsWaitForOtherNodes(t *testing.T) {
	t.Parallel()
	nodes := newCluster(t, 2, nil, slices.Concat(allCaps, []string{"CREATE_DELETE_SNAPSHOT"})...)
	a, b := nodes[0], nodes[1]
	var plugin *pluginTask
	var client *csiVolume
	snap := host.SnapshotSpec{Namespace: "default", ID: "snap", Volume: "vol"}
	for _, c := range []struct {
		what string
		list func(host.Blocking) (found bool, at host.Seq, err error)
		do   func()
	}{
		{"nodes", func(w host.Blocking) (bool, host.Seq, error) {
			all, at, err := b.host.Nodes(b.ctx(), host.NodeQuery{Blocking: w, Node: "node-1"})
			return len(all) == 1 && len(all[0].Plugins) == 1, at, err
		}, func() { plugin = a.addPlugin("plugin", csifake.Monolith) }},
		{"volumes", func(w host.Blocking) (bool, host.Seq, error) {
			all, at, err := b.host.Volumes(b.ctx(), host.VolumeQuery{Blocking: w, Name: volumeName("vol")})
			return len(all) == 1 && all[0].State == "ready", at, err
		}, func() { a.must(a.create("vol")) }},
		{"claims", func(w host.Blocking) (bool, host.Seq, error) {
			all, at, err := b.host.Claims(b.ctx(), host.ClaimQuery{Blocking: w})
			return len(all) == 1, at, err
		}, func() { a.use("user", request{source: "vol"}) }},
		{"snapshots", func(w host.Blocking) (bool, host.Seq, error) {
			all, at, err := b.host.Snapshots(b.ctx(), host.SnapshotQuery{Blocking: w, Name: snap.SnapshotName()})
			return len(all) == 1, at, err
		}, func() { a.must(errOf(a.host.CreateSnapshot(a.ctx(), snap))) }},
		{"endpoint uses", func(w host.Blocking) (bool, host.Seq, error) {
			all, at, err := b.host.EndpointUses(b.ctx(), host.EndpointQuery{Blocking: w, Plugin: "fake"})
			return len(all) == 1, at, err
		}, func() {
			conn, _ := a.serveCSI()
			client = newCSIVolume(conn, "of-a-client", a.dir)
			a.must(errors.Join(client.create(a.ctx()), client.attach(a.ctx())))
		}},
	} {
		found, at, err := c.list(host.Blocking{})
		if b.must(err); found {
			t.Errorf("%s: the change is seen before", c.what)
		}
		followed := background(func() error {
			var err error
			for found := false; !found && err == nil; {
				found, at, err = c.list(host.Blocking{MinIndex: at})
			}
			return err
		})
		c.do()
		b.must(b.result("the list of "+c.what, followed))
	}
	a.must(errors.Join(client.detach(a.ctx()), client.delete(a.ctx()),
		a.host.DeleteSnapshot(a.ctx(), snap.SnapshotName()), a.release("user"), a.delete("vol")))
	a.stopPlugin(plugin)
}
