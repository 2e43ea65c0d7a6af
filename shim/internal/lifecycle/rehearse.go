package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"holdfast/config"
	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/rpc"
	"holdfast/shim/internal/store"
)

// learnt is what a rehearsal leaves for the activation: connections to plugins that have said what they are.
type learnt struct {
	fleet *csi.Fleet
}

// forget gives back what nobody will use. It may be called for nothing.
func (l *learnt) forget() {
	if l != nil {
		l.fleet.CloseAll()
	}
}

// calm is how long a reign that was handed over serves those who wait before it looks around: the shim before has just done so.
const calm = time.Second

// breath is how long such a reign does nothing but answer calls that were held.
const breath = 50 * time.Millisecond

// after has f begin a while after a handover.
func (i inheritance) after(wait time.Duration, f func(context.Context) error) func(context.Context) error {
	if !i.handed() {
		return f
	}
	return func(ctx context.Context) error {
		select {
		case <-time.After(wait):
			return f(ctx)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// How a reign looks at what nobody has told it of.
const (
	aroundSoon  = 2 * time.Second  // the shim before has died: the mount table was compared, and who waits for an answer comes first
	mountsLater = 10 * time.Second // the shim before has looked
)

// around returns when mounts are first inspected, unless a plugin comes or goes before.
func (i inheritance) around() time.Duration {
	if !i.handed() {
		return aroundSoon
	}
	return calm + rand.N(mountsLater-calm)
}

// met is the rehearsal's connections to plugins, of those that are still registered; else a fleet without.
func (i inheritance) met(table *registry.Registry) *csi.Fleet {
	if i.learnt == nil {
		return csi.New(table)
	}
	serving := map[registry.TaskKey]bool{}
	for _, in := range table.All().Instances {
		serving[in.TaskKey()] = true
	}
	i.learnt.fleet.Find(table, func(t registry.TaskKey) bool { return serving[t] })
	return i.learnt.fleet
}

// inheritance is how the state comes to a reign.
type inheritance struct {
	left       store.Left
	generation registry.Generation // to go on under; 0: the next one
	learnt     *learnt             // nil: nothing
}

// handed says whether the state comes from a shim that has just let go of it, rather than from one that died some time ago.
func (i inheritance) handed() bool { return i.left != (store.Left{}) }

// inherited is how the state comes to this shim. What was learnt is used once.
func (t *Tenure) inherited(h rpc.Handover) inheritance {
	in := inheritance{left: store.Left(h.Left), learnt: t.learnt}
	t.learnt = nil
	if h.Resume {
		in.left, in.generation = store.Left(t.left), t.left.Generation
	}
	return in
}

// Limits of a rehearsal.
const (
	probeLimit  = 5 * time.Second // of one plugin
	probeAtOnce = 16
	maxWarnings = 20
	triedEvents = 300 // numbers back from the last one
)

// Rehearse takes a copy of the state over, as Activate would the state itself: it is verified and migrated, whatever runs by it is parsed, and
// every plugin is asked. The copy is removed. Of the plugins that were healthy at least one has to answer. Whoever is served meanwhile comes
// first.
func (t *Tenure) Rehearse(ctx context.Context, copied string) (rpc.Rehearsal, error) {
	t.moving.Lock()
	defer t.moving.Unlock()
	if state, hello := t.greeted(); state != Candidate && state != Released || hello == nil {
		return rpc.Rehearsal{}, registry.Errorf(registry.ErrConflict, "this shim is %s; only a candidate that was greeted rehearses", state)
	}
	t.learnt.forget()
	t.learnt = nil
	r := rehearsal{learnt: &learnt{fleet: csi.New(nil)}}
	err := r.run(ctx, store.Options{Path: copied, Decoded: t.decoded, Throwaway: true})
	err = errors.Join(err, removed(copied))
	ready()
	if err == nil {
		t.learnt = r.learnt
	} else {
		r.learnt.forget()
	}
	return r.Rehearsal, err
}

// ready does what would be done anyway while calls are held, or just after.
func ready() {
	protoregistry.GlobalTypes.RangeMessages(func(m protoreflect.MessageType) bool {
		_ = proto.Size(m.New().Interface()) // lays out what messages of that type need
		return true
	})
	runtime.GC()
}

func removed(file string) error {
	if err := os.Remove(file); err != nil {
		return fmt.Errorf("remove the copy of the state: %w", err)
	}
	return nil
}

// rehearsal is one run of Rehearse.
type rehearsal struct {
	rpc.Rehearsal
	learnt    *learnt
	instances []registry.Instance
}

func (r *rehearsal) run(ctx context.Context, copied store.Options) error {
	s, err := store.Open(ctx, copied)
	if err != nil {
		return fmt.Errorf("open a copy of the state: %w", err)
	}
	err = r.read(ctx, s)
	if err == nil {
		err = r.probe(ctx) // before what only this process has to do: plugins have others to serve when calls are held
	}
	for _, wrong := range s.CheckRecords() {
		err = errors.Join(err, fmt.Errorf("after its migrations the state is damaged: %w", wrong))
	}
	r.Left = rpc.Left{Generation: s.Generation() - 1, Index: s.Index()}
	r.Schema, r.Readable = uint32(s.PreviousSchema()), uint32(s.Readable())
	return errors.Join(err, s.Close())
}

// read parses what runs, and the newest events: what has to be known is that this shim can. To decode all that are kept takes longer than all else
// here, of processors that others want, and hardly anybody ever asks for them.
func (r *rehearsal) read(ctx context.Context, log registry.State) error {
	return log.View(ctx, func(v registry.View) error {
		var errs []error
		for _, task := range v.Tasks() {
			if _, err := config.OpenTask(task.Sealed); err != nil {
				errs = append(errs, fmt.Errorf("task %s could not be started again; stop its job, or use a shim that knows it: %w", task.TaskKey, err))
			}
		}
		for _, a := range v.Allocs() {
			if _, err := config.OpenGroup(a.Sealed); err != nil && len(a.Sealed) > 0 {
				errs = append(errs, fmt.Errorf("alloc %s could not be prepared again; stop its job, or use a shim that knows it: %w", a.ID, err))
			}
		}
		v.Events(v.Index()-min(v.Index(), triedEvents), triedEvents)
		r.instances = v.AllInstances()
		return errors.Join(errs...)
	})
}

// probe asks every plugin once: whether it answers, and what it is.
func (r *rehearsal) probe(ctx context.Context) error {
	asked := map[registry.TaskKey][]registry.Instance{}
	for _, in := range r.instances {
		if in.Health.State == registry.Healthy {
			asked[in.TaskKey()] = append(asked[in.TaskKey()], in)
		}
	}
	var mu sync.Mutex
	var failed []error
	var wg sync.WaitGroup
	slots := make(chan struct{}, probeAtOnce)
	for task, instances := range asked {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			limited, cancel := context.WithTimeout(ctx, probeLimit)
			defer cancel()
			if err := r.learnt.fleet.Greet(limited, task, instances); err != nil {
				mu.Lock()
				defer mu.Unlock()
				failed = append(failed, fmt.Errorf("plugin %s (%s): %w", instances[0].Plugin, task, err))
			}
		})
	}
	wg.Wait()
	r.Instances = len(asked)
	if len(failed) > 0 && len(failed) == len(asked) {
		return registry.Errorf(registry.ErrUnavailable, "no plugin answers this shim, though they answer the old one: %w", failed[0])
	}
	for _, err := range failed[:min(len(failed), maxWarnings)] {
		r.Warnings = append(r.Warnings, err.Error())
	}
	return nil
}
