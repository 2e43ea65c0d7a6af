package controller

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
)

// run runs Run, as the next process does, until end is called.
func (d *desk) run() (end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = d.Controller.Run(ctx) }()
	return func() { cancel(); <-done }
}

// runFor runs Run for a time.
func (d *desk) runFor(wait time.Duration) {
	end := d.run()
	defer end()
	time.Sleep(wait)
}

// After a crash the next process finishes creations and deletions by repeating the same call.
func TestUnfinishedOperationIsFinishedByTheNextProcess(t *testing.T) {
	for _, later := range [][]fault{nil, {uncertain("UNKNOWN", false), uncertain("UNAVAILABLE", true),
		uncertain("NOT_FOUND", true)}} {
		synctest.Test(t, func(t *testing.T) {
			d := open(t, of(registry.CreateDelete))
			d.faults = []fault{uncertain("FAILED_PRECONDITION", true)}
			wantErr(t, "", errOf(d.Controller.Create(t.Context(), call, spec())), registry.ErrUncertain, "")
			d.crash()
			d.faults = slices.Clone(later)
			d.runFor(time.Hour)
			if v, _ := d.stored(); v.State != registry.VolumeReady || v.External != key.External {
				t.Errorf("%+v", v)
			}
			d.expect(slices.Repeat([]string{"CreateVolume data"}, len(later)+2)...)

			remove := registry.Call{ID: "op-2", Method: "Delete", Digest: "d2"}
			d.faults = []fault{uncertain("FAILED_PRECONDITION", true)}
			wantErr(t, "", d.Controller.Delete(t.Context(), remove, name), registry.ErrUncertain, "")
			d.crash()
			// for a deletion, NOT_FOUND means success
			d.faults = slices.DeleteFunc(slices.Clone(later), func(f fault) bool { return f.code == "NOT_FOUND" })
			tries := len(d.faults) + 2
			d.runFor(time.Hour)
			if _, found := d.stored(); found || len(d.made) > 0 {
				t.Errorf("stored %v, made %v", found, d.made)
			}
			d.expect(slices.Repeat([]string{"DeleteVolume vol-data"}, tries)...)
		})
	}
}

// A deletion continues after its caller has gone. A certain refusal ends it.
func TestUnfinishedOperationEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := open(t, of(registry.CreateDelete), ready())
		d.made["vol-data"] = true
		end := d.run()
		defer end()
		d.faults = []fault{uncertain("UNAVAILABLE", false), failed("PERMISSION_DENIED"), failed("PERMISSION_DENIED")}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		wantErr(t, "", d.Controller.Delete(ctx, call, name), registry.ErrUncertain, "")
		time.Sleep(time.Hour)
		if v, _ := d.stored(); v.State != registry.VolumeReady || len(d.made) != 1 {
			t.Errorf("%+v, %v", v, d.made)
		}
		if kinds := d.kinds(); !slices.Contains(kinds, registry.EventVolumeKept) {
			t.Errorf("events %v", kinds)
		}
	})
}

// Other operations get the lock between two tries.
func TestVolumeIsDeregisteredBetweenTwoTries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := open(t, of(registry.CreateDelete))
		d.faults = slices.Repeat([]fault{uncertain("UNKNOWN", false)}, 1000)
		if _, err := d.Controller.Create(t.Context(), call, spec()); err == nil {
			t.Fatal("no error")
		}
		d.crash()
		end := d.run()
		defer end()
		time.Sleep(time.Hour)
		if v, _ := d.stored(); v.State != registry.VolumeCreating {
			t.Errorf("%+v", v)
		}
		noErr(t, "", d.Controller.Deregister(t.Context(), name))
		d.journal = nil
		time.Sleep(time.Hour)
		d.expect()
	})
}

// If Run cannot read the state, it returns, although an operation is still tried again.
func TestRunReturnsIfTheStateCannotBeRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := open(t, of(registry.CreateDelete))
		d.faults = slices.Repeat([]fault{uncertain("UNKNOWN", false)}, 1000)
		wantErr(t, "", errOf(d.Controller.Create(t.Context(), call, spec())), registry.ErrUncertain, "")
		damaged, list := errors.New("damaged"), d.unfinished
		done := make(chan error, 1)
		go func() {
			done <- runUnfinished(t.Context(), d.wakeup, func(ctx context.Context) ([]registry.VolumeName, error) {
				names, err := list(ctx)
				list = func(context.Context) ([]registry.VolumeName, error) { return nil, damaged }
				return names, err
			}, d.resume)
		}()
		time.Sleep(time.Minute)
		d.Wake()
		synctest.Wait()
		select {
		case err := <-done:
			wantErr(t, "", err, damaged, "")
		default:
			t.Error("Run has not returned")
		}
	})
}

// If the plugin goes away for good before Run gets the lock of a volume, the volume can be deregistered after a while.
func TestVolumeOfAPluginThatIsGoneIsDeregistered(t *testing.T) {
	for _, state := range []registry.VolumeState{registry.VolumeCreating, registry.VolumeDeleting} {
		synctest.Test(t, func(t *testing.T) {
			v := ready()
			v.State = state
			plugins := of(registry.CreateDelete)
			d := open(t, plugins, v)
			if state == registry.VolumeCreating {
				d.put(registry.Intent{Volume: v.VolumeKey(), Name: name, RPC: registry.CreateVolumeRPC})
			}
			unlock, err := d.Locks.Lock(t.Context(), name, "a test")
			noErr(t, "", err)
			end := d.run()
			defer end()
			synctest.Wait() // Run has found the plugin
			delete(plugins, registry.RoleController)
			unlock()
			time.Sleep(time.Hour)
			noErr(t, string(state), d.Controller.Deregister(t.Context(), name))
		})
	}
}

// Attach waits for an absent controller if a task for it is known, or if the controller created the volume. So no
// volume is used without being attached.
func TestAttachWaitsForAnAbsentController(t *testing.T) {
	node := with()
	node.Role = registry.RoleNode
	split, made := ready(), ready()
	split.Plugin, split.Created = "split", false
	for what, v := range map[string]registry.Volume{"its task is known": split, "it has made the volume": made} {
		synctest.Test(t, func(t *testing.T) {
			c := claimed()
			c.Volume = v.VolumeKey()
			plugins := table{registry.RoleNode: node}
			d := open(t, plugins, v, c)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			wantErr(t, what, d.Controller.Attach(ctx, by, v, usage(), here("i-1")), registry.ErrUnavailable, "")
			plugins[registry.RoleController] = of(registry.AttachDetach)[registry.RoleController]
			if err := d.Controller.Attach(t.Context(), by, v, usage(), here("i-1")); err != nil {
				t.Errorf("%s, when it is back: %v", what, err)
			}
			d.expect("ControllerPublishVolume vol-data i-1")
		})
	}
	synctest.Test(t, func(t *testing.T) {
		d := open(t, table{registry.RoleNode: node})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		s := split.VolumeSpec
		wantErr(t, "registered without being confirmed", errOf(d.Controller.Register(ctx, s)),
			registry.ErrUnavailable, "")
	})
}
