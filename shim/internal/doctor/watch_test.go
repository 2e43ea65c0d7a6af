package doctor

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"holdfast/internal/mount"
	"holdfast/registry"
)

// watching runs a watch over the env in a bubble, and passes it to the test.
func watching(t *testing.T, records []registry.Record, test func(w *env, watch *Watch)) {
	synctest.Test(t, func(t *testing.T) {
		w := newEnv(t, records...)
		w.mount(stagedAt(), publishedAt())
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		watch := NewWatch(w.log, w.machine, layout, time.Now, hclog.NewNullLogger())
		go func() { done <- watch.Run(ctx) }()
		synctest.Wait()
		time.Sleep(watchGap) // the first inspection runs at once, and the next after a pause
		test(w, watch)
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("the watch ended with %v", err)
		}
	})
}

func used() []registry.Record { return append(placed(), data, claim(), ref()) }

func (w *env) ref() (r registry.Ref) {
	w.view(func(v registry.View) { r = v.Refs(key)[0] })
	return r
}

// sees changes the state of the published volume, and waits for the next inspection.
func (w *env) sees(s mount.Info, watch *Watch) {
	w.mu.Lock()
	w.infos[publishedAt()] = s
	w.mu.Unlock()
	watch.Wake()
	synctest.Wait()
	time.Sleep(watchGap)
	synctest.Wait()
}

// A mount that dies is recorded and reported once, with volume and alloc, and so is its recovery.
func TestDeadMountsAreReported(t *testing.T) {
	watching(t, used(), func(w *env, watch *Watch) {
		before := w.index()
		w.sees(mount.Info{}, watch)
		if w.index() != before {
			t.Error("a commit was made for a healthy mount")
		}
		begin := time.Now()
		w.sees(mount.Info{Errno: unix.ENOTCONN}, watch)
		r := w.ref()
		if r.Trouble != (mount.Info{Errno: unix.ENOTCONN}).Trouble() || !r.Troubled.Equal(begin) ||
			r.Publish != registry.MarkDone {
			t.Errorf("%+v", r)
		}
		lost := w.events(registry.EventMountLost)
		if len(lost) != 1 || !strings.Contains(lost[0], ": stop the alloc") {
			t.Errorf("told %q", lost)
		}
		w.view(func(v registry.View) {
			all, _ := v.Events(0, registry.MaxEvents)
			if e := all[len(all)-1]; e.Volume != data.VolumeName() || e.Alloc != "a1" || e.Request != "vol" ||
				e.Plugin != "ebs" {
				t.Errorf("%+v", e)
			}
		})
		after := w.index()
		w.sees(mount.Info{Errno: unix.ENOTCONN}, watch)
		if w.index() != after {
			t.Error("the same fault is recorded again")
		}
		w.sees(mount.Info{Hung: true}, watch)
		if r := w.ref(); r.Trouble != (mount.Info{Hung: true}).Trouble() || !r.Troubled.Equal(begin) {
			t.Errorf("another trouble: %+v", r)
		}
		w.sees(mount.Info{}, watch)
		if r := w.ref(); r.Trouble != "" || !r.Troubled.IsZero() || len(w.events(registry.EventMountBack)) != 1 {
			t.Errorf("well again: %+v", r)
		}
		w.drop(data.Key()) // as another node may do
		w.sees(mount.Info{Hung: true}, watch)
		w.view(func(v registry.View) {
			all, _ := v.Events(0, registry.MaxEvents)
			if e := all[len(all)-1]; e.Kind != registry.EventMountLost || e.Volume != data.VolumeName() {
				t.Errorf("without a record of the volume: %+v", e)
			}
		})
	})
}

// Without a wake-up, a mount that is missing in the table is noticed within 30 seconds, without an inspection, and so
// is a missing part of a volume.
func TestVanishedMountsAreRecorded(t *testing.T) {
	withPart := ref()
	withPart.Parts = []registry.Part{{Path: "a/b", At: partAt("a/b"), Mark: registry.MarkDone}}
	for vanished, c := range map[string]struct {
		ref  registry.Ref
		says string
	}{
		publishedAt(): {ref(), "it is not mounted any more"},
		partAt("a/b"): {withPart, `"a/b" of it is not mounted any more`},
	} {
		watching(t, append(placed(), data, claim(), c.ref), func(w *env, _ *Watch) {
			pass := func(change func()) {
				w.mu.Lock()
				change()
				w.mu.Unlock()
				time.Sleep(watchGap + watchEvery)
				synctest.Wait()
			}
			pass(func() {
				w.mounts = slices.DeleteFunc(w.mounts, func(m mount.Mount) bool { return m.Point == vanished })
			})
			if r := w.ref(); !strings.Contains(r.Trouble, c.says) {
				t.Errorf("%s vanished: %+v", vanished, r)
			}
			pass(func() { w.mount(vanished) })
			if r := w.ref(); r.Trouble != "" || len(r.Parts) != len(c.ref.Parts) {
				t.Errorf("%s is back: %+v", vanished, r)
			}
		})
	}
}

// A block device is inspected, whether it is mounted or not.
func TestBlockDevicesAreWatched(t *testing.T) {
	block := ref()
	block.Usage.Attachment = registry.BlockDevice
	watching(t, append(placed(), data, claim(), block), func(w *env, watch *Watch) {
		w.sees(mount.Info{Block: true}, watch)
		if r := w.ref(); r.Trouble != "" {
			t.Errorf("%+v", r)
		}
		w.sees(mount.Info{}, watch)
		if r := w.ref(); !strings.Contains(r.Trouble, "block device is gone") {
			t.Errorf("%+v", r)
		}
	})
}

// A publish that is unconfirmed, from another boot or being changed is not inspected, because an inspection uses the
// mount.
func TestOnlyConfirmedPublishesAreInspected(t *testing.T) {
	sent, old := ref(), ref()
	sent.Publish, old.Boot = registry.MarkSent, "boot-0"
	open := registry.Intent{Volume: key, RPC: registry.NodeUnpublishRPC, Alloc: "a1", Request: "vol",
		Outcome: registry.OutcomePending}
	for what, list := range map[string][]registry.Record{
		"sent": append(placed(), data, claim(), sent), "of another boot": append(placed(), data, claim(), old),
		"with an open call": append(used(), open),
	} {
		w := newEnv(t, list...)
		w.mount(publishedAt())
		w.inspections = make(chan []string, 1)
		watch := NewWatch(w.log, w.machine, layout, time.Now, hclog.NewNullLogger())
		must(t, watch.inspect(t.Context()))
		if len(w.inspections) > 0 {
			t.Errorf("%s: it is inspected", what)
		}
	}
}

// A failed inspection changes neither a recorded trouble nor its absence.
func TestFailedInspectionChangesNothing(t *testing.T) {
	watching(t, used(), func(w *env, watch *Watch) {
		w.sees(mount.Info{Hung: true}, watch)
		before := w.index()
		w.mu.Lock()
		w.failure = errors.New("no helper")
		w.mu.Unlock()
		w.sees(mount.Info{}, watch)
		if w.index() != before || w.ref().Trouble == "" {
			t.Errorf("%+v", w.ref())
		}
	})
}

// A ref that has changed during an inspection is left to the next inspection.
func TestStaleInspectionChangesNothing(t *testing.T) {
	w := newEnv(t, used()...)
	w.mount(publishedAt())
	w.infos[publishedAt()] = mount.Info{Hung: true}
	r := ref()
	r.Publish = registry.MarkSent
	watch := NewWatch(w.log, late{w.machine, func() { w.put(r) }}, layout, time.Now, hclog.NewNullLogger())
	must(t, watch.inspect(t.Context()))
	if got := w.ref(); got.Trouble != "" || got.Publish != registry.MarkSent {
		t.Errorf("%+v", got)
	}
}

// A hung inspection delays only the next one, and Wake never blocks.
func TestHungInspectionBlocksNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newEnv(t, used()...)
		w.mount(publishedAt())
		w.hang = make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		watch := NewWatch(w.log, w.machine, layout, time.Now, hclog.NewNullLogger())
		go func() { done <- watch.Run(ctx) }()
		for range 100 {
			watch.Wake()
			w.put(data) // and commits go on
		}
		begin := time.Now()
		time.Sleep(inspectLimit + watchGap)
		synctest.Wait()
		cancel()
		<-done
		if took := time.Since(begin); took > inspectLimit+2*watchGap {
			t.Errorf("it ended after %v", took)
		}
	})
}
