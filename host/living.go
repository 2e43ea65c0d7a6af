package host

import (
	"cmp"
	"maps"
	"slices"
	"sync"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// living is what runs, as far as calls through this host tell: each new shim is told it. An entry is made before its call, as the shim may
// die in the middle of it, and taken back if the shim refused the call: what it refuses once it would refuse again, and with it all else.
type living struct {
	mu     *sync.Mutex // guards both; held for no longer than a look-up
	allocs map[registry.AllocID]AllocGroup
	tasks  map[registry.TaskKey]WorkloadTask
}

func newLiving(l Workload) living {
	out := living{&sync.Mutex{}, map[registry.AllocID]AllocGroup{}, map[registry.TaskKey]WorkloadTask{}}
	out.replace(l)
	return out
}

// check says what a shim could not be told of.
func (l Workload) check() error {
	for _, g := range l.Allocs {
		if _, err := wire.AllocGroup(wire.AllocGroupProto(g)); err != nil {
			return err
		}
	}
	for _, t := range l.Tasks {
		if _, err := wire.AllocTask(wire.AllocTaskProto(t.AllocTask)); err != nil {
			return err
		}
	}
	return nil
}

func (l living) replace(all Workload) {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.allocs)
	clear(l.tasks)
	for _, g := range all.Allocs {
		l.allocs[g.Alloc] = g
	}
	for _, t := range all.Tasks {
		l.tasks[t.Key()] = t
	}
}

// putAlloc adds the alloc. undo takes that back.
func (l living) putAlloc(g AllocGroup) (undo func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	was, known := l.allocs[g.Alloc]
	l.allocs[g.Alloc] = g
	return func() { restore(l, l.allocs, g.Alloc, was, known) }
}

// restore puts back what an entry was.
func restore[K comparable, V any](l living, entries map[K]V, k K, was V, known bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if known {
		entries[k] = was
		return
	}
	delete(entries, k)
}

func (l living) dropAlloc(id registry.AllocID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.allocs, id)
}

// putTask adds the task at its attempt, unless a newer one is known. undo takes that back.
func (l living) putTask(t AllocTask) (undo func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	was, known := l.tasks[t.Key()]
	if known && was.Attempt >= t.Attempt {
		return func() {}
	}
	l.tasks[t.Key()] = WorkloadTask{AllocTask: t}
	return func() { restore(l, l.tasks, t.Key(), was, known) }
}

func (l living) started(k registry.TaskKey, attempt uint64, at BootTime) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if t, known := l.tasks[k]; known && t.Attempt == attempt {
		t.Running, t.Started = true, at
		l.tasks[k] = t
	}
}

func (l living) exited(k registry.TaskKey, attempt uint64, final bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t, known := l.tasks[k]
	switch {
	case !known || t.Attempt > attempt:
	case final:
		delete(l.tasks, k)
	default:
		t.Running = false
		l.tasks[k] = t
	}
}

// request is Sync's, in one order.
func (l living) request() *pb.SyncRequest {
	l.mu.Lock()
	defer l.mu.Unlock()
	req := &pb.SyncRequest{Call: &pb.Call{OperationId: newOperation()}}
	for _, id := range slices.Sorted(maps.Keys(l.allocs)) {
		g := l.allocs[id]
		g.Sealed = nil // the shim has it; a host with many allocs must fit into one message
		req.Allocs = append(req.Allocs, wire.AllocGroupProto(g))
	}
	keys := slices.SortedFunc(maps.Keys(l.tasks), func(x, y registry.TaskKey) int {
		return cmp.Or(cmp.Compare(x.Alloc, y.Alloc), cmp.Compare(x.Task, y.Task))
	})
	for _, k := range keys {
		t := l.tasks[k]
		req.Tasks = append(req.Tasks, &pb.LivingTask{
			Task: wire.AllocTaskProto(t.AllocTask), Running: t.Running, Started: wire.BootTimeProto(t.Started),
		})
	}
	return req
}
