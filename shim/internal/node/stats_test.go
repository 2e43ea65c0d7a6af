package node_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

var one = registry.VolumeName{Namespace: "default", ID: "one"}

// The plugin is asked about a place where the volume is published, by the paths that it knows now; the staging path
// goes with it if, and only if, the plugin stages. The plugin of these tests checks both against what it did itself.
func TestStatsAskWhereItIsPublished(t *testing.T) {
	for _, stages := range []bool{true, false} {
		w := open(t)
		w.stages = stages
		w.mustUp("a1", shared())
		w.volumes.Task = "/other" // another instance of the plugin
		w.crash()
		usage, err := w.stager.Stats(t.Context(), one)
		want := []registry.VolumeUsage{{Unit: "bytes", Total: 100, Used: 40, Available: 60}}
		if err != nil || !slices.Equal(usage, want) {
			t.Errorf("stages %v: %+v, %v", stages, usage, err)
		}
		r := w.last.stats
		if r.VolumeID != "ext-one" || !strings.HasPrefix(r.Path, "/other/publish/") ||
			(r.StagingPath != "") != stages || r.Private == nil {
			t.Errorf("stages %v: asked %+v", stages, r)
		}
		if p := r.Private(t.Context()); p.Secrets["token"].Reveal() == "" {
			t.Errorf("what the plugin must not tell is not known: %+v", p)
		}
		w.volumes.Task = "/csi"
		w.mustDown("a1")
		w.empty()
	}
}

// What is staged and not published is asked about where it is staged.
func TestStatsOfWhatIsStaged(t *testing.T) {
	w := open(t)
	w.failNext(publish, refused)
	if _, err := w.up(t.Context(), "one", "a1", shared()); err == nil {
		t.Fatal("it is published")
	}
	if err := w.stager.Unpublish(t.Context(), intent.Caller{}, keyOf("one", "a1")); err != nil {
		t.Fatal(err)
	}
	if _, err := w.stager.Stats(t.Context(), one); err != nil {
		t.Error(err)
	}
	if r := w.last.stats; r.Path != r.StagingPath || !strings.HasPrefix(r.Path, "/csi/stage/") {
		t.Errorf("asked %+v", r)
	}
}

// A block device is asked about though nothing is mounted for it.
func TestStatsOfABlockDevice(t *testing.T) {
	w := open(t)
	w.stages, w.mountsStaging = false, false
	w.upAsBlock()
	if _, err := w.stager.Stats(t.Context(), one); err != nil {
		t.Error(err)
	}
}

func (w *world) upAsBlock() {
	u := shared()
	u.Attachment = registry.BlockDevice
	w.mustUp("a1", u)
	clear(w.mounts)
}

// A plugin that does not stage any more gets no staging path, though the volume is staged.
func TestStatsOfAPluginThatStagesNoMore(t *testing.T) {
	w := open(t)
	w.mustUp("a1", shared())
	w.stages = false
	if _, err := w.stager.Stats(t.Context(), one); err != nil {
		t.Error(err)
	}
}

// Nothing is sent where there is nothing to measure, nobody to do it, or another call that has to end first; each says
// what to do.
func TestStatsAreRefused(t *testing.T) {
	for what, c := range map[string]struct {
		before func(*world)
		kind   error
		says   string
	}{
		"no such volume": {(*world).forget, registry.ErrNotFound, "not found"},
		"nobody uses it": {func(*world) {}, registry.ErrConflict, "not mounted here"},
		"the plugin cannot": {func(w *world) {
			w.mustUp("a1", shared())
			w.blind = true
		}, registry.ErrUnsupported, "with df"},
		"the mount is lost": {func(w *world) {
			w.mustUp("a1", shared())
			clear(w.mounts)
		}, registry.ErrConflict, "not mounted here"},
		"the node has booted": {func(w *world) {
			w.mustUp("a1", shared())
			w.reboot()
		}, registry.ErrConflict, "not mounted here"},
		"a device, and a boot": {func(w *world) {
			w.upAsBlock()
			w.reboot()
		}, registry.ErrConflict, "not mounted here"},
		"its mount is in trouble": {(*world).inTrouble, registry.ErrUnavailable, "the server is gone"},
		"another call is open":    {(*world).uncertainPublish, registry.ErrConflict, "NodePublishVolume"},
		"no plugin": {func(w *world) { w.absent = true }, registry.ErrUnavailable,
			"holdfast plugin status"},
		"a sick plugin": {func(w *world) {
			w.health = registry.Health{State: registry.Unhealthy, Cause: registry.CauseMissed}
		}, registry.ErrUnavailable, "is not healthy: missed"},
	} {
		t.Run(what, func(t *testing.T) {
			w := open(t)
			c.before(w)
			w.take()
			usage, err := w.stager.Stats(t.Context(), one)
			if !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.says) || usage != nil {
				t.Errorf("%v, %v", usage, err)
			}
			w.expect()
		})
	}
}

func (w *world) forget() {
	_, err := w.log.Commit(context.Background(), func(registry.View) (registry.Change, error) {
		return registry.Change{Delete: []registry.Key{volumeOf("one").Key()}}, nil
	})
	if err != nil {
		w.errorf("forget: %v", err)
	}
}

func (w *world) inTrouble() {
	w.mustUp("a1", shared())
	var refs []registry.Ref
	w.view(func(v registry.View) { refs = v.AllRefs() })
	for _, r := range refs {
		r.Trouble, r.Troubled = "the server is gone", time.Now()
		w.put(r)
	}
}

func (w *world) uncertainPublish() {
	w.mustUp("a1", shared())
	w.failNext(publish, lost)
	if _, err := w.up(context.Background(), "one", "a2", shared()); !errors.Is(err, registry.ErrUncertain) {
		w.errorf("%v", err)
	}
}

// A mount in trouble is passed over for one that is not.
func TestStatsPassOverADeadMount(t *testing.T) {
	w := open(t)
	w.inTrouble()
	at := w.mustUp("a2", shared())
	if _, err := w.stager.Stats(t.Context(), one); err != nil || w.host(w.last.stats.Path) != at.Host {
		t.Errorf("asked about %s, not %s: %v", w.last.stats.Path, at.Host, err)
	}
}

// A plugin that hangs is waited for until the limit.
func TestStatsOfAHungPluginEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := open(t)
		w.mustUp("a1", shared())
		w.measureNever()
		w.stager.Locks = &intent.Locks{}
		const statsWait = 10 * time.Second
		begin := time.Now()
		if _, err := w.stager.Stats(t.Context(), one); !errors.Is(err, context.DeadlineExceeded) ||
			time.Since(begin) != statsWait {
			t.Errorf("after %v: %v", time.Since(begin), err)
		}
	})
}

// The volume's next user comes at once: the question is cancelled, and its asker is told to ask again. Two that ask
// wait for each other.
func TestStatsDelayNoMount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := open(t)
		w.mustUp("a1", shared())
		w.measureNever()
		w.stager.Locks = &intent.Locks{}
		begin, ended := time.Now(), make(chan error, 2)
		for range cap(ended) {
			go func() {
				_, err := w.stager.Stats(t.Context(), one)
				ended <- err
			}()
		}
		synctest.Wait()
		leave, err := w.stager.Locks.Lock(t.Context(), volumeOf("one").VolumeKey(), "its next user")
		if err != nil || time.Since(begin) != 0 {
			t.Fatalf("the next user came in after %v: %v", time.Since(begin), err)
		}
		if err := <-ended; !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(), "try again") {
			t.Error(err)
		}
		leave()
		if err := <-ended; !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, registry.ErrConflict) {
			t.Error(err)
		}
	})
}

func (w *world) measureNever() {
	w.measure = func(ctx context.Context) ([]registry.VolumeUsage, error) {
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}
}

// What is told while the volume goes away may be of what lies below: it is no answer.
func TestStatsOfWhatGoesAway(t *testing.T) {
	w := open(t)
	w.mustUp("a1", shared())
	w.measure = func(context.Context) ([]registry.VolumeUsage, error) {
		w.mustDown("a1")
		return []registry.VolumeUsage{{Unit: "bytes", Total: 1}}, nil
	}
	if usage, err := w.stager.Stats(t.Context(), one); !errors.Is(err, registry.ErrConflict) || usage != nil {
		t.Errorf("%v, %v", usage, err)
	}
}
