package rpc

import (
	"context"
	"errors"
	"testing"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// A shim may die between any two commits of a removal. A replay at the next shim gets the same answer, and does not
// remove a volume that was created under the name since. Another operation is told that there is no such volume.
func TestRemovalIsAnsweredAfterADeath(t *testing.T) {
	name := registry.VolumeName{Namespace: "default", ID: "data"}
	errDied := errors.New("died")
	for what, c := range map[string]struct {
		dies      func(d *desk, remove func() error) error // in the first run
		recreated bool
		op        string
		runs      int
		kind      error
	}{
		"before the removal": {dies: func(*desk, func() error) error { return errDied }, op: "op-1", runs: 2},
		"before the answer": {
			dies: func(d *desk, remove func() error) error {
				must(t, remove())
				d.log.Fail(errDied)
				return nil
			}, op: "op-1", runs: 1,
		},
		"before the answer, and the volume was created again": {
			dies:      func(_ *desk, remove func() error) error { must(t, remove()); return errDied },
			recreated: true, op: "op-1", runs: 1,
		},
		"before the answer, and another operation follows": {
			dies: func(_ *desk, remove func() error) error { must(t, remove()); return errDied },
			op:   "op-2", runs: 2, kind: registry.ErrNotFound,
		},
	} {
		d, runs := newDesk(t), 0
		put := func() {
			d.put(t, registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: name.Namespace, ID: name.ID}})
		}
		remove := func() error {
			_, err := d.log.Commit(t.Context(), func(v registry.View) (registry.Change, error) {
				if _, found := v.Volume(name); !found {
					return registry.Change{}, registry.Errorf(registry.ErrNotFound, "volume %s not found", name)
				}
				return registry.Change{Delete: []registry.Key{name.Key()}}, nil
			})
			return err
		}
		ask := func(op string, run func() error) error {
			req := &pb.DeleteVolumeRequest{Call: &pb.Call{OperationId: op}}
			_, err := mutate(t.Context(), d.server, "Test.Remove", req,
				func(ctx context.Context, a *Active, call registry.Call) (struct{}, error) {
					return removed(ctx, a, call, name, func() error { runs++; return run() })
				})
			return err
		}
		put()
		if err := ask("op-1", func() error { return c.dies(d, remove) }); !errors.Is(err, errDied) {
			t.Errorf("%s: the first call: %v", what, err)
		}
		if c.recreated {
			put()
		}
		for range 2 { // the second replay gets the stored answer
			if err := ask(c.op, remove); !errors.Is(err, c.kind) || c.kind == nil && err != nil {
				t.Errorf("%s: the replay: %v", what, err)
			}
			if c.kind != nil {
				break
			}
		}
		var found bool
		must(t, d.log.View(t.Context(), func(v registry.View) error { _, found = v.Volume(name); return nil }))
		if runs != c.runs || found != c.recreated {
			t.Errorf("%s: it ran %d times, and the volume is found: %v", what, runs, found)
		}
	}
}

func (d *desk) put(t *testing.T, records ...registry.Record) {
	t.Helper()
	registrytest.Put(t, d.log, records...)
}
