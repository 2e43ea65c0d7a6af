package lifecycle

import (
	"context"
	"errors"
	"fmt"
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

// handoff says how an active state takes over its store.
type handoff struct {
	releasedAt registry.Revision   // as the previous shim reported it; the zero value: it did not release the state
	generation registry.Generation // generation to keep; 0: take the next one
	rehearsed  *csi.Fleet          // see Process.rehearsed
}

// graceful reports whether the previous shim has released the state. Otherwise it has died.
func (h handoff) graceful() bool { return h.releasedAt != (registry.Revision{}) }

// fleet returns the rehearsal's connections to the plugins that are still registered, or a fleet without connections.
func (h handoff) fleet(table *registry.Registry, o csi.Observer) *csi.Fleet {
	if h.rehearsed == nil {
		return csi.New(table, o)
	}
	registered := map[registry.TaskKey]bool{}
	for _, in := range table.All().Instances {
		registered[in.TaskKey()] = true
	}
	h.rehearsed.SetInstances(table, func(t registry.TaskKey) bool { return registered[t] })
	return h.rehearsed
}

// handoffOf returns the handoff for one activation.
func (p *Process) handoffOf(h rpc.Handover) handoff {
	in := handoff{releasedAt: h.ReleasedAt, rehearsed: p.rehearsed}
	if h.Resume {
		in.releasedAt, in.generation = p.releasedAt, p.releasedAt.Generation
	}
	return in
}

// Limits of a rehearsal.
const (
	probeLimit   = 5 * time.Second // of one plugin
	probeAtOnce  = 16
	maxWarnings  = 20
	parsedEvents = 300 // how many of the newest events are decoded
)

// Rehearse takes over a copy of the state as Activate takes over the state itself. It verifies and migrates the copy,
// and parses the sealed parts of tasks and allocs. It probes every healthy plugin; if there are any, at least one must
// answer. It removes the copy, and keeps the connections for the activation unless the rehearsal fails.
func (p *Process) Rehearse(ctx context.Context, copied string) (rpc.Rehearsal, error) {
	p.transition.Lock()
	defer p.transition.Unlock()
	if state, hello := p.stateAndHello(); state != Candidate && state != Released || hello == nil {
		return rpc.Rehearsal{}, registry.Errorf(registry.ErrConflict,
			"this shim is %s; only a candidate that was greeted rehearses", state)
	}
	p.closeRehearsed()
	r := rehearsal{fleet: csi.New(nil, p.observer())}
	err := r.run(ctx, store.Options{Path: copied, Throwaway: true})
	if failed := os.Remove(copied); failed != nil {
		err = errors.Join(err, fmt.Errorf("remove the copy of the state: %w", failed))
	}
	warmUp()
	p.rehearsed = r.fleet
	if err != nil {
		p.closeRehearsed()
	}
	return r.Rehearsal, err
}

// warmUp initializes message types and collects garbage now, so that it is not done while calls are held.
func warmUp() {
	protoregistry.GlobalTypes.RangeMessages(func(m protoreflect.MessageType) bool {
		_ = proto.Size(m.New().Interface()) // initializes the message type
		return true
	})
	runtime.GC()
}

// closeRehearsed closes the connections of a rehearsal that no activation has used.
func (p *Process) closeRehearsed() {
	if p.rehearsed != nil {
		p.rehearsed.CloseAll()
		p.rehearsed = nil
	}
}

// rehearsal is one run of Rehearse.
type rehearsal struct {
	rpc.Rehearsal
	fleet     *csi.Fleet // of connections that the rehearsal makes
	instances []registry.Instance
}

func (r *rehearsal) run(ctx context.Context, copied store.Options) error {
	s, err := store.Open(ctx, copied)
	if err != nil {
		return fmt.Errorf("open a copy of the state: %w", err)
	}
	err = r.parse(ctx, s)
	if err == nil {
		err = r.probe(ctx)
	}
	for _, wrong := range s.CheckRecords() {
		err = errors.Join(err, fmt.Errorf("after its migrations the state is damaged: %w", wrong))
	}
	// opening the copy has raised its generation by one
	r.At = registry.Revision{Generation: s.Generation() - 1, Index: s.Index()}
	r.Schema, r.Readable = uint32(s.PreviousSchema()), uint32(s.Readable())
	return errors.Join(err, s.Close())
}

// parse parses the sealed parts of tasks and allocs, decodes the newest events, and reads the instances for probe. To
// decode all events would take longer than the rest of the rehearsal.
func (r *rehearsal) parse(ctx context.Context, state registry.State) error {
	return state.View(ctx, func(v registry.View) error {
		var errs []error
		for _, task := range v.Tasks() {
			if _, err := config.OpenTask(task.Sealed); err != nil {
				errs = append(errs, fmt.Errorf("this shim could not restart task %s; stop its job, or use a newer "+
					"shim: %w", task.TaskKey, err))
			}
		}
		for _, a := range v.Allocs() {
			if _, err := config.OpenGroup(a.Sealed); err != nil && len(a.Sealed) > 0 {
				errs = append(errs, fmt.Errorf("this shim could not prepare alloc %s again; stop its job, or use a "+
					"newer shim: %w", a.ID, err))
			}
		}
		v.Events(v.Index()-min(v.Index(), parsedEvents), parsedEvents) // damage makes View fail
		r.instances = v.AllInstances()
		return errors.Join(errs...)
	})
}

// probe connects to the task of every healthy instance and asks for its identity. It fails if none answers; a failure
// of some is a warning.
func (r *rehearsal) probe(ctx context.Context) error {
	healthy := map[registry.TaskKey][]registry.Instance{}
	for _, in := range r.instances {
		if in.Health.State == registry.Healthy {
			healthy[in.TaskKey()] = append(healthy[in.TaskKey()], in)
		}
	}
	var mu sync.Mutex
	var failed []error
	var wg sync.WaitGroup
	slots := make(chan struct{}, probeAtOnce)
	for task, instances := range healthy {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			limited, cancel := context.WithTimeout(ctx, probeLimit)
			defer cancel()
			if err := r.fleet.Preconnect(limited, task, instances); err != nil {
				mu.Lock()
				defer mu.Unlock()
				failed = append(failed, fmt.Errorf("plugin %s (%s): %w", instances[0].Plugin, task, err))
			}
		})
	}
	wg.Wait()
	r.Instances = len(healthy)
	if len(failed) > 0 && len(failed) == len(healthy) {
		return registry.Errorf(registry.ErrUnavailable, "no plugin answers this shim, but they answer the old one: %w",
			failed[0])
	}
	for _, err := range failed[:min(len(failed), maxWarnings)] {
		r.Warnings = append(r.Warnings, err.Error())
	}
	return nil
}
