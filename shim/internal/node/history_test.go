package node

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/registry"
	"holdfast/shim/internal/controller"
)

var seed = flag.Uint64("seed", 0,
	"the one history of TestHistories to run; 0: those of every run, or new ones with HOLDFAST_OPERATIONS")

// snapshotCalls are the RPCs that take and delete snapshots.
var snapshotCalls = []string{
	"CreateSnapshot", "DeleteSnapshot", "CreateVolumeGroupSnapshot", "DeleteVolumeGroupSnapshot",
}

// perHistory is the number of operations of one history.
const perHistory = 250

// TestHistories mixes random operations of allocs and snapshots with random faults of their plugin, lost mounts, rolls
// of the plugin, and kills of the plugin, the shim and the node. It checks the calls that the plugin got: no illegal
// step, and never two calls at once for a volume. In the end all volumes are released. HOLDFAST_OPERATIONS sets the
// number of operations.
func TestHistories(t *testing.T) {
	if *seed != 0 {
		runHistory(t, *seed)
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
	done, made := 0, map[string]int{}
	for s := first; done < operations && !t.Failed(); s++ {
		ops, calls := runHistory(t, s)
		done += ops
		for what, n := range calls {
			made[what] += n
		}
	}
	t.Logf("%d operations: %v", done, made)
	for _, what := range append(snapshotCalls, "ControllerModifyVolume", "NodePublishVolume", rolls) {
		if made[what] == 0 && !t.Failed() {
			t.Errorf("no %s in %d operations: the histories do not test it", what, done)
		}
	}
}

// history is one random history of an env.
type history struct {
	*env
	random *rand.Rand
	rolls  int   // number of rolls of the plugin
	size   int64 // how much larger than at first volumes were asked to be, in bytes
}

// rolls counts the rolls of the plugin in the result of runHistory.
const rolls = "roll"

// runHistory runs the history of a seed. It returns the number of its operations, and of the calls that succeeded by
// RPC.
func runHistory(t *testing.T, seed uint64) (operations int, calls map[string]int) {
	ok := t.Run(fmt.Sprint(seed), func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			h := newHistory(t, seed)
			h.start()
			for range perHistory {
				h.step()
				operations++
			}
			h.machine.failParts(nil)
			h.settle()
			h.judge()
			calls = map[string]int{rolls: h.rolls}
			for _, c := range journal.Calls(h.journal.Lines()) {
				if c.End != nil && c.End.Code == "OK" {
					calls[c.RPC]++
				}
			}
		})
	})
	if !ok {
		t.Logf("again: go test ./shim/internal/node -run TestHistories -seed %d", seed)
	}
	return operations, calls
}

// newHistory returns a history with random capabilities of its plugin.
func newHistory(t *testing.T, seed uint64) *history {
	random, faults := rand.New(rand.NewPCG(seed, 1)), rand.New(rand.NewPCG(seed, 2))
	caps := ""
	for _, c := range []string{attaches, stages} {
		if random.IntN(4) > 0 {
			caps += c
		}
	}
	if random.IntN(4) > 0 {
		caps += []string{"EXPAND_VOLUME ", "controller/EXPAND_VOLUME ", "node/EXPAND_VOLUME "}[random.IntN(3)] +
			[]string{"expansion/ONLINE ", "expansion/OFFLINE ", ""}[random.IntN(3)]
	}
	if random.IntN(2) == 0 {
		caps += []string{reports, reportsOnNode + reportsLists + reportsStorages}[random.IntN(2)]
	}
	if random.IntN(3) > 0 {
		caps += snapshots
	}
	if random.IntN(3) > 0 {
		caps += groups
	}
	if random.IntN(3) > 0 {
		caps += "MODIFY_VOLUME "
	}
	h := &history{env: newEnv(t, caps), random: random}
	h.machine.late = time.Duration(random.IntN(4)) * 300 * time.Millisecond
	h.forgets = random.IntN(3) == 0
	ids := csifake.IDForms[random.IntN(len(csifake.IDForms))]
	for i := range 3 {
		v := h.volume(i, "")
		v.External = registry.ExternalID(ids.VolumeID(string(v.ID)))
		h.put(v)
	}
	h.machine.failParts(func(string) (err error, effect bool) {
		if faults.IntN(10) == 0 {
			err = errPartHangs
		}
		return err, faults.IntN(2) == 0
	})
	return h
}

// step is one random operation, and some time that passes.
func (h *history) step() {
	switch d := h.random.IntN(100); {
	case d < 35:
		h.prepare()
	case d < 62:
		h.release()
	case d < 66:
		h.expand()
	case d < 70:
		h.snapshot()
	case d < 72:
		h.modify()
	case d < 85:
		h.fault()
	case d < 88:
		h.restart()
	case d < 92:
		h.roll()
	case d < 94:
		h.plugin.Load().end(h.random.IntN(3) > 0)
		h.startPlugin()
		h.introduce()
	case d < 96:
		h.sync()
	case d < 97:
		h.reboot()
	case d < 98:
		h.sicken()
	case d < 99:
		h.loseMount()
	default:
		h.script()
	}
	time.Sleep(time.Duration(h.random.Int64N(int64(3 * time.Second))))
}

func (h *history) anAlloc() registry.AllocID {
	return registry.AllocID(fmt.Sprintf("alloc-%d", h.random.IntN(5)))
}

func (h *history) aVolume() registry.VolumeName {
	return registry.VolumeName{Namespace: "default", ID: registry.VolumeID(fmt.Sprintf("v%d", h.random.IntN(3)))}
}

// upTo returns a random duration.
func (h *history) upTo(most time.Duration) time.Duration {
	return time.Duration(h.random.Int64N(int64(most)))
}

// prepare requests the volumes of an alloc, with a deadline, and does not wait.
func (h *history) prepare() {
	w := wish{volumes: h.random.Perm(3)[:1+h.random.IntN(3)], mixed: h.random.IntN(3) == 0,
		inline: h.random.IntN(4) == 0}
	if h.random.IntN(8) == 0 {
		w.options = "mount_options {\n fs_type = \"xfs\"\n}"
	}
	if h.random.IntN(4) == 0 {
		w.subPaths = []string{"a", "b/c"}[:1+h.random.IntN(2)]
	}
	group := h.group(h.anAlloc(), w)
	h.call(func(ctx context.Context, s *shim) { _, _ = s.allocs.Prepare(ctx, registry.Call{}, group) })
}

// call makes a call in the background, with a random deadline.
func (h *history) call(f func(context.Context, *shim)) {
	limit, s := h.upTo(5*time.Minute), h.shim
	h.allocs.Go(func() {
		ctx, cancel := context.WithTimeout(s.ctx, limit)
		defer cancel()
		f(ctx, s)
	})
}

func (h *history) release() {
	id, shim := h.anAlloc(), h.shim
	h.allocs.Go(func() { _ = shim.allocs.Release(shim.ctx, registry.Call{}, id, false) })
}

// expand requests a larger size for a volume, or the size that the volume already has.
func (h *history) expand() {
	name := h.aVolume()
	h.size += h.random.Int64N(3) * gib
	want := registry.CapacityRange{Required: gib + h.size}
	h.call(func(ctx context.Context, s *shim) { _, _ = s.volumes.Expand(ctx, registry.Call{}, name, want) })
}

// snapshot takes a snapshot of a volume or of two, or deletes one.
func (h *history) snapshot() {
	spec := registry.SnapshotSpec{Namespace: "default", ID: registry.SnapshotID(fmt.Sprintf("s%d", h.random.IntN(3))),
		Volume: h.aVolume().ID}
	deletes := h.random.IntN(2) == 0
	remove := (*controller.Snapshots).Delete
	if h.random.IntN(2) == 0 {
		remove, spec.Volume = (*controller.Snapshots).DeleteGroup, ""
		for _, i := range h.random.Perm(3)[:2] {
			spec.Volumes = append(spec.Volumes, registry.VolumeID(fmt.Sprintf("v%d", i)))
		}
	}
	h.call(func(ctx context.Context, s *shim) {
		if deletes {
			_ = remove(s.snapshots, ctx, registry.Call{}, spec.SnapshotName())
		} else {
			_, _ = s.snapshots.Create(ctx, registry.Call{}, spec)
		}
	})
}

// modify sets a mutable parameter of a volume to a random value.
func (h *history) modify() {
	name, parameters := h.aVolume(), map[string]string{"iops": strconv.Itoa(h.random.IntN(100))}
	h.call(func(ctx context.Context, s *shim) { _, _ = s.volumes.Modify(ctx, registry.Call{}, name, parameters) })
}

// roll starts another instance of the plugin beside the running one, and ends the older one later. A plugin whose start
// makes the backend forget cannot run twice.
func (h *history) roll() {
	if h.forgets {
		return
	}
	old, oldTask := h.plugin.Load(), h.task
	h.rolls++
	h.task.Alloc = registry.AllocID(fmt.Sprintf("plugin-%d", h.rolls))
	h.startPlugin()
	h.introduce()
	time.Sleep(h.upTo(time.Minute))
	old.end(h.random.IntN(3) > 0)
	h.removeTask(oldTask)
}

// sync names some of the allocs as living.
func (h *history) sync() {
	living := []registry.AllocID{h.anAlloc(), h.anAlloc()}
	shim := h.shim
	h.allocs.Go(func() { _, _ = shim.allocs.Sync(shim.ctx, living) })
}

// fault makes the plugin fail some of its next calls.
func (h *history) fault() {
	rpcs := slices.Concat(changing, healthCalls, snapshotCalls, []string{"ControllerModifyVolume"})
	r := csifake.Rule{RPC: rpcs[h.random.IntN(len(rpcs))], Times: 1 + h.random.IntN(3), When: csifake.Before}
	if h.random.IntN(2) == 0 {
		r.When = csifake.After
	}
	switch h.random.IntN(8) {
	case 0:
		r.Delay = csifake.Duration(h.upTo(10 * time.Minute))
	case 1:
		r.Hang = csifake.UntilCancelled
	case 2:
		r.Drop = true
	case 3:
		r.Crash = true
	default:
		r.Code = journal.CodeName(uint32(1 + h.random.IntN(16)))
	}
	h.script(r)
}

// sicken makes the plugin report volumes as unhealthy for a while, if it reports conditions.
func (h *history) sicken() {
	says := csifake.Condition{Abnormal: true, Message: fmt.Sprintf("message %d", h.random.IntN(3))}
	rpc := healthCalls[h.random.IntN(len(healthCalls))]
	h.script(csifake.Rule{RPC: rpc, Times: 1 + h.random.IntN(8), Condition: &says})
}

// loseMount unmounts something, as another program may do.
func (h *history) loseMount() {
	if held := slices.Sorted(maps.Keys(h.machine.held())); len(held) > 0 {
		h.machine.unmount(held[h.random.IntN(len(held))])
	}
}
