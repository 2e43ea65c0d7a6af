package host

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"

	"google.golang.org/grpc"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// Sync sends the shim the complete list of running tasks and allocs. The shim takes down all others. Open sends
// Config.Workload. Each later shim gets that list with the changes by calls since then. Sync is for hosts that keep a
// more accurate list. A task that the shim cannot adopt is left alone, and logged.
func (h *Host) Sync(ctx context.Context, all Workload) error {
	if err := all.check(); err != nil {
		return err
	}
	h.workload.replace(all)
	return h.do(ctx, writes, func(ctx context.Context, sh *shim) error { return h.sync(ctx, sh.process.Conn()) })
}

// sync sends what runs to the shim behind conn.
func (h *Host) sync(ctx context.Context, conn grpc.ClientConnInterface) error {
	reply, err := pb.NewAllocsClient(conn).Sync(ctx, h.workload.request())
	for _, r := range reply.GetRefused() {
		h.config.Logger.Error("the shim cannot adopt a running task; it is left alone",
			"task", wire.TaskKey(r.GetTask()), "reason", r.GetReason())
	}
	return err
}

// workload lists the running tasks and allocs, according to the calls through this host. Each new shim gets it. An
// entry is added before its call, as the shim may die during the call. If the shim refuses the call, the entry is
// removed: otherwise the next shim would refuse all of Sync.
type workload struct {
	mu     sync.Mutex // guards both; held only to read or change them
	allocs map[registry.AllocID]AllocGroup
	tasks  map[registry.TaskKey]WorkloadTask
}

func newWorkload(all Workload) *workload {
	w := &workload{allocs: map[registry.AllocID]AllocGroup{}, tasks: map[registry.TaskKey]WorkloadTask{}}
	w.replace(all)
	return w
}

// check returns an error if no shim could take the workload.
func (w Workload) check() error {
	for _, g := range w.Allocs {
		if _, err := wire.AllocGroup(wire.AllocGroupProto(g)); err != nil {
			return err
		}
	}
	for _, t := range w.Tasks {
		if _, err := wire.AllocTask(wire.AllocTaskProto(t.AllocTask)); err != nil {
			return err
		}
	}
	return nil
}

func (w *workload) replace(all Workload) {
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.allocs)
	clear(w.tasks)
	for _, g := range all.Allocs {
		w.allocs[g.Alloc] = g
	}
	for _, t := range all.Tasks {
		w.tasks[t.Key()] = t
	}
}

// putAlloc adds the alloc. undo restores what was there.
func (w *workload) putAlloc(g AllocGroup) (undo func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	before, known := w.allocs[g.Alloc]
	w.allocs[g.Alloc] = g
	return func() { restore(w, w.allocs, g.Alloc, before, known) }
}

func restore[K comparable, V any](w *workload, entries map[K]V, k K, before V, known bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if known {
		entries[k] = before
		return
	}
	delete(entries, k)
}

func (w *workload) removeAlloc(id registry.AllocID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.allocs, id)
}

// putTask adds the task at its attempt, unless this attempt or a newer one is known. undo restores what was there.
func (w *workload) putTask(t AllocTask) (undo func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	before, known := w.tasks[t.Key()]
	if known && before.Attempt >= t.Attempt {
		return func() {}
	}
	w.tasks[t.Key()] = WorkloadTask{AllocTask: t}
	return func() { restore(w, w.tasks, t.Key(), before, known) }
}

func (w *workload) taskStarted(k registry.TaskKey, attempt uint64, at BootTime) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if t, known := w.tasks[k]; known && t.Attempt == attempt {
		t.Running, t.Started = true, at
		w.tasks[k] = t
	}
}

// taskExited notes the end of an attempt, unless a newer one is known.
func (w *workload) taskExited(k registry.TaskKey, attempt uint64, final bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	t, known := w.tasks[k]
	switch {
	case !known || t.Attempt > attempt:
	case final:
		delete(w.tasks, k)
	default:
		t.Running = false
		w.tasks[k] = t
	}
}

// request returns the workload as Sync sends it, in a stable order.
func (w *workload) request() *pb.SyncRequest {
	w.mu.Lock()
	defer w.mu.Unlock()
	req := &pb.SyncRequest{Call: mutating()}
	for _, id := range slices.Sorted(maps.Keys(w.allocs)) {
		g := w.allocs[id]
		g.Sealed = nil // the shim has it; a host with many allocs must fit into one message
		req.Allocs = append(req.Allocs, wire.AllocGroupProto(g))
	}
	keys := slices.SortedFunc(maps.Keys(w.tasks), func(x, y registry.TaskKey) int {
		return cmp.Or(cmp.Compare(x.Alloc, y.Alloc), cmp.Compare(x.Task, y.Task))
	})
	for _, k := range keys {
		t := w.tasks[k]
		req.Tasks = append(req.Tasks, &pb.LivingTask{
			Task: wire.AllocTaskProto(t.AllocTask), Running: t.Running, Started: wire.BootTimeProto(t.Started),
		})
	}
	return req
}
