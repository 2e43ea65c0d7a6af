package node_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/registry"
)

var seed = flag.Uint64("seed", 0, "the one history of TestHistories to run; 0: those of every run, or new ones with HOLDFAST_OPERATIONS")

// perHistory is how many operations one history has.
const perHistory = 250

// TestHistories has random operations of allocs meet random faults of their plugin, its death and the shim's, and
// judges what the plugin was asked: no illegal edge, and never two calls at once for a volume. In the end everything is
// taken back. HOLDFAST_OPERATIONS asks for more.
func TestHistories(t *testing.T) {
	if *seed != 0 {
		history(t, *seed)
		return
	}
	operations, first := usual, uint64(1)
	if text := os.Getenv("HOLDFAST_OPERATIONS"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil {
			t.Fatalf("HOLDFAST_OPERATIONS is %q: %v", text, err)
		}
		operations, first = n, uint64(time.Now().UnixNano())
	}
	done, calls := 0, 0
	for s := first; done < operations && !t.Failed(); s++ {
		ops, sent := history(t, s)
		done, calls = done+ops, calls+sent
	}
	t.Logf("%d operations, %d calls of the plugin", done, calls)
	if calls < done/2 {
		t.Errorf("only %d calls: the histories test nothing", calls)
	}
}

// history is one of them. It says how many operations it had, and how many calls they made.
func history(t *testing.T, seed uint64) (operations, calls int) {
	ok := t.Run(fmt.Sprint(seed), func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := newHistoryEnv(t, seed)
			n.startPlugin()
			n.startShim()
			n.introduce()
			for range perHistory {
				n.step()
				operations++
			}
			n.settle()
			calls = n.judge()
		})
	})
	if !ok {
		t.Logf("again: go test ./shim/internal/node -run TestHistories -seed %d", seed)
	}
	return operations, calls
}

// step is one random operation, and some time that passes.
func (n *historyEnv) step() {
	switch d := n.random.IntN(100); {
	case d < 35:
		n.prepare()
	case d < 63:
		n.release()
	case d < 67:
		n.expand()
	case d < 85:
		n.fault()
	case d < 90:
		n.crash()
		n.startShim()
		n.introduce()
	case d < 95:
		n.plugin.Load().end(n.random.IntN(3) > 0)
		n.startPlugin()
		n.introduce()
	case d < 97:
		n.sync()
	case d < 98:
		n.reboot()
	case d < 99:
		n.sicken()
	default:
		n.plugin.Load().ClearScript()
	}
	time.Sleep(time.Duration(n.random.Int64N(int64(3 * time.Second))))
}

func (n *historyEnv) anAlloc() registry.AllocID {
	return registry.AllocID(fmt.Sprintf("alloc-%d", n.random.IntN(5)))
}

// prepare asks for the volumes of an alloc, with a deadline or without, and does not wait.
func (n *historyEnv) prepare() {
	group := n.group(n.anAlloc(), wish{
		volumes: n.random.Perm(3)[:1+n.random.IntN(3)], mixed: n.random.IntN(3) == 0, inline: n.random.IntN(4) == 0,
		other: n.random.IntN(8) == 0,
	})
	limit := time.Duration(n.random.Int64N(int64(5 * time.Minute)))
	shim := n.shim
	n.allocs.Go(func() {
		ctx, cancel := context.WithTimeout(shim.ctx, limit)
		defer cancel()
		_, _ = shim.allocs.Prepare(ctx, registry.Call{}, group)
	})
}

func (n *historyEnv) release() {
	id, shim := n.anAlloc(), n.shim
	n.allocs.Go(func() { _ = shim.allocs.Release(shim.ctx, registry.Call{}, id) })
}

// expand asks for a volume to be made larger, or for what it has already.
func (n *historyEnv) expand() {
	name := registry.VolumeName{Namespace: "default", ID: registry.VolumeID(fmt.Sprintf("v%d", n.random.IntN(3)))}
	n.size += n.random.Int64N(3) << 30
	want, shim := registry.CapacityRange{Required: 1<<30 + n.size}, n.shim
	limit := time.Duration(n.random.Int64N(int64(5 * time.Minute)))
	n.allocs.Go(func() {
		ctx, cancel := context.WithTimeout(shim.ctx, limit)
		defer cancel()
		_, _ = shim.volumes.Expand(ctx, registry.Call{}, name, want)
	})
}

// sync names some of the allocs as living.
func (n *historyEnv) sync() {
	living := []registry.AllocID{n.anAlloc(), n.anAlloc()}
	shim := n.shim
	n.allocs.Go(func() { _, _ = shim.allocs.Sync(shim.ctx, living) })
}

var faulty = []string{
	"ControllerPublishVolume", "ControllerUnpublishVolume", "NodeStageVolume", "NodeUnstageVolume", "NodePublishVolume",
	"NodeUnpublishVolume",
	"ControllerExpandVolume", "NodeExpandVolume", "NodeGetVolumeStats",
}

// fault has the plugin go wrong at some of its next calls.
func (n *historyEnv) fault() {
	r := csifake.Rule{RPC: faulty[n.random.IntN(len(faulty))], Times: 1 + n.random.IntN(3), When: csifake.Before}
	if n.random.IntN(2) == 0 {
		r.When = csifake.After
	}
	switch n.random.IntN(8) {
	case 0:
		r.Delay = csifake.Duration(n.random.Int64N(int64(10 * time.Minute)))
	case 1:
		r.Hang = csifake.UntilCancelled
	case 2:
		r.Drop = true
	case 3:
		r.Crash = true
	default:
		r.Code = journal.CodeName(uint32(1 + n.random.IntN(16)))
	}
	if r.Code == "NOT_FOUND" && strings.HasPrefix(r.RPC, "NodeUn") {
		r.When = csifake.After // nothing is there, it says, and there is no mount table to see that it lies
	}
	if err := n.plugin.Load().Script(r); err != nil {
		n.t.Fatal(err)
	}
}

// sicken has the plugin say for a while that volumes are unhealthy, if it ever says how they are.
func (n *historyEnv) sicken() {
	says := csifake.Condition{Abnormal: true, Message: fmt.Sprintf("message %d", n.random.IntN(3))}
	r := csifake.Rule{RPC: "NodeGetVolumeStats", Times: 1 + n.random.IntN(8), Condition: &says}
	if err := n.plugin.Load().Script(r); err != nil {
		n.t.Fatal(err)
	}
}

// settle ends all faults and all allocs, and waits until nothing is left.
func (n *historyEnv) settle() {
	n.plugin.Load().end(false)
	n.startPlugin()
	n.introduce()
	n.emptied()
	n.usedAgain()
	n.emptied()
	n.shim.cancel(errShimEnds)
	n.shim.fleet.CloseAll()
	n.shim.loops.Wait()
	n.allocs.Wait()
	n.plugin.Load().end(false)
}

// emptied has no alloc live any more, and waits until nothing is left.
func (n *historyEnv) emptied() {
	if _, err := n.shim.allocs.Sync(n.shim.ctx, nil); err != nil {
		n.t.Errorf("sync: %v", err)
	}
	for range 24 {
		time.Sleep(n.pauseBeforeLook())
		select {
		case <-n.plugin.Load().ended: // it died in ListVolumes
			n.startPlugin()
			n.introduce()
		default:
		}
		if len(n.left()) == 0 {
			break
		}
		n.unmountTold()
	}
}

// pauseBeforeLook is how long a person waits before the next look: after an hour everything has been tried that is
// tried by itself. Where releases wait for that person, the look comes sooner, as each try of theirs costs the test
// time.
func (n *historyEnv) pauseBeforeLook() time.Duration {
	if len(n.mounts.stuck()) > 0 {
		return 10 * time.Minute
	}
	return time.Hour
}

// unmountTold is a person who unmounts by hand what the status of an alloc says nobody can take down. Nobody uses
// any volume any more, and there was time for every release to fail: each mount that its plugin has forgotten is in
// somebody's records, and what has to be unmounted next is told.
func (n *historyEnv) unmountTold() {
	stuck := n.mounts.stuck()
	if len(stuck) == 0 {
		return
	}
	recorded, told := map[string]bool{}, ""
	err := n.log.View(context.Background(), func(v registry.View) error {
		for _, r := range v.AllRefs() {
			recorded[r.Target.Host] = true
		}
		for _, p := range v.Stagings() {
			recorded[p.Path.Host] = true
		}
		for _, a := range v.Allocs() {
			told += registry.Waits(a.Waiting) + "\n"
		}
		return nil
	})
	if err != nil {
		n.t.Fatal(err)
	}
	some := false
	for _, path := range stuck {
		if !recorded[path] {
			n.t.Errorf("lost: %s is still mounted, and no record says so", path)
		}
		if strings.Contains(told, path) {
			n.mounts.unmount(path)
			some = true
		}
	}
	if !some {
		n.t.Errorf("nobody is told that %s is still mounted: %s", strings.Join(stuck, ", "), told)
	}
}

// usedAgain has all volumes used once more, by one who writes: the last chance for what was expanded while nobody did.
func (n *historyEnv) usedAgain() {
	group := n.group("alloc-last", wish{volumes: []int{0, 1, 2}})
	if _, err := n.shim.allocs.Prepare(n.shim.ctx, registry.Call{}, group); err != nil {
		n.t.Errorf("used again: %v", err)
	}
}

// shrunken is the volumes of which the node does not know what their controller has made of them last, by what the
// plugin was asked. A plugin that has forgotten its volumes has forgotten their sizes.
func shrunken(lines []journal.Line) (left []string) {
	for i, l := range slices.Backward(lines) {
		if l.Kind == journal.Forgot {
			lines = lines[i:]
			break
		}
	}
	owed := map[string]int64{}
	for _, c := range journal.Calls(lines) {
		switch {
		case c.End == nil || c.End.Code != "OK" || c.Abandoned || c.End.Answer == nil &&
			c.RPC == "ControllerExpandVolume":
		case c.RPC == "ControllerExpandVolume" && c.End.Answer.NodeExpand:
			owed[c.Volume] = c.End.Answer.Bytes
		case c.RPC == "NodeExpandVolume" && c.Bytes >= owed[c.Volume]:
			delete(owed, c.Volume)
		}
	}
	for id, bytes := range owed {
		left = append(left, fmt.Sprintf("%s has %d bytes, and its node does not know", id, bytes))
	}
	return left
}

// left is what is recorded.
func (n *historyEnv) left() (left []string) {
	err := n.log.View(context.Background(), func(v registry.View) error {
		for _, a := range v.Allocs() {
			left = append(left, fmt.Sprintf("alloc %s, %s: %s", a.ID, a.State, registry.Waits(a.Waiting)))
		}
		for _, vol := range v.Volumes() {
			if vol.Ephemeral {
				left = append(left, "inline volume "+vol.VolumeName().String())
			}
			if vol.Health.Abnormal() {
				left = append(left, "the health of volume "+vol.VolumeName().String())
			}
		}
		for _, c := range v.AllClaims() {
			left = append(left, "claim "+c.ClaimKey().String())
		}
		for _, r := range v.AllRefs() {
			left = append(left, "ref "+r.ClaimKey().String())
		}
		for _, p := range v.Stagings() {
			left = append(left, fmt.Sprintf("staging of %s: %q", p.Volume, p.State))
		}
		for _, at := range v.AllAttachments() {
			left = append(left, fmt.Sprintf("attachment of %s: %q", at.Volume, at.State))
		}
		for _, i := range v.Intents() {
			left = append(left, fmt.Sprintf("%s of %s, %s", i.RPC, i.Volume, i.Outcome))
		}
		return nil
	})
	if err != nil {
		left = append(left, err.Error())
	}
	return left
}

// judge says how many calls the plugin was asked for.
func (n *historyEnv) judge() (calls int) {
	for _, what := range n.left() {
		n.t.Errorf("left: %s", what)
	}
	for _, path := range n.mounts.stuck() {
		n.t.Errorf("left: %s is still mounted", path)
	}
	lines := n.journal.Lines()
	for _, v := range journal.Check(lines, journal.Options{Settled: true}) {
		n.t.Errorf("journal: %s", v)
	}
	for _, what := range shrunken(lines) {
		n.t.Error(what)
	}
	if n.t.Failed() {
		for i, l := range lines {
			n.t.Logf("%d %s %s %s %s call %d %s %s %s %s", i+1, l.Wall.Format("15:04:05.000"), l.Instance, l.Run,
				l.Kind, l.Call, l.RPC, l.Volume, l.Target, l.Code)
		}
	}
	return len(journal.Calls(lines))
}
