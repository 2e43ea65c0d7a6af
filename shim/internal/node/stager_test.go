package node_test

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

const (
	attach    = registry.ControllerPublishRPC
	detach    = registry.ControllerUnpublishRPC
	stage     = registry.NodeStageRPC
	unstage   = registry.NodeUnstageRPC
	publish   = registry.NodePublishRPC
	unpublish = registry.NodeUnpublishRPC
)

func open(t *testing.T) *world {
	w := newWorld(func(format string, args ...any) { t.Helper(); t.Errorf(format, args...) })
	w.put(volumeOf("one"))
	t.Cleanup(w.noSecret)
	return w
}

func (w *world) mustUp(a registry.AllocID, u registry.Usage) registry.Tree {
	at, err := w.up(context.Background(), "one", a, u)
	if err != nil {
		w.errorf("up %s: %v", a, err)
	}
	return at
}

func (w *world) mustDown(a registry.AllocID) {
	if err := w.down(context.Background(), "one", a); err != nil {
		w.errorf("down %s: %v", a, err)
	}
}

// failNext has the next call of the RPC end with the fault, once.
func (w *world) failNext(rpc registry.RPC, f fault) {
	w.fault = func(got registry.RPC) fault {
		if got != rpc {
			return fault{}
		}
		w.fault = func(registry.RPC) fault { return fault{} }
		return f
	}
}

var (
	refused = fault{code: "INVALID_ARGUMENT", outcome: registry.OutcomeFailed}
	lost    = fault{code: "PERMISSION_DENIED", outcome: registry.OutcomeUncertain}
)

func TestVolumeIsStagedAndUnstaged(t *testing.T) {
	for _, c := range []struct {
		name             string
		attaches, stages bool
		up, down         []registry.RPC
	}{
		{"attach and stage", true, true, []registry.RPC{attach, stage, publish},
			[]registry.RPC{unpublish, unstage, detach}},
		{"stage only", false, true, []registry.RPC{stage, publish}, []registry.RPC{unpublish, unstage}},
		{"attach only", true, false, []registry.RPC{attach, publish}, []registry.RPC{unpublish, detach}},
		{"neither", false, false, []registry.RPC{publish}, []registry.RPC{unpublish}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := open(t)
			w.attaches, w.stages = c.attaches, c.stages
			at := w.mustUp("a1", shared())
			w.expect(c.up...)
			if !w.mounts[at.Host] || at != layout.Target(keyOf("one", "a1"), w.volumes) {
				t.Errorf("published at %+v; mounts %v", at, w.mounts)
			}
			w.mustUp("a1", shared())
			w.expect() // all of it is there
			w.crash()
			w.mustUp("a1", shared())
			w.expect() // and known to the next process
			w.mustDown("a1")
			w.expect(c.down...)
			w.mustDown("a1")
			w.expect()
			w.empty()
		})
	}
}

// What the controller answered and the volume's own context reach the node unchanged, with the secrets, over a restart
// too.
func TestContextsReachTheNode(t *testing.T) {
	w := open(t)
	v, ctx := volumeOf("one"), t.Context()
	if _, err := w.ledger.Claim(ctx, registry.Claim{Volume: v.VolumeKey(), Alloc: "a1", Request: "data", Node: "n1",
		Usage: shared()}); err != nil {
		t.Fatal(err)
	}
	if err := w.mediator.Attach(ctx, intent.Caller{}, v, shared(), w.here(v.VolumeKey(), "i-1")); err != nil {
		t.Fatal(err)
	}
	w.crash()
	w.mustUp("a1", shared())
	s, p := w.last.stage, w.last.publish
	if s.PublishContext["device"] != "/dev/ext-one" || s.VolumeContext["pool"] != "p" ||
		s.Secrets["token"].Reveal() == "" || s.Usage != shared() {
		t.Errorf("staged with %+v", s)
	}
	if p.PublishContext["device"] != "/dev/ext-one" || p.VolumeContext["pool"] != "p" ||
		p.Secrets["token"].Reveal() == "" || p.StagingPath != s.StagingPath {
		t.Errorf("published with %+v", p)
	}
	for _, path := range []string{s.StagingPath, p.TargetPath} {
		if !strings.HasPrefix(path, "/csi/") {
			t.Errorf("%s is not the plugin's path", path)
		}
	}
}

// Of two users the first goes, also after a restart: the volume stays staged until the second has gone.
func TestUnstageWaitsForLastUser(t *testing.T) {
	w := open(t)
	w.mustUp("a1", shared())
	at := w.mustUp("a2", shared())
	w.expect(attach, stage, publish, publish)
	w.crash()
	w.mustDown("a1")
	w.expect(unpublish)
	if !w.mounts[at.Host] || w.disk("ext-one").staged == "" {
		t.Error("the second user lost its volume")
	}
	w.crash()
	w.mustDown("a2")
	w.expect(unpublish, unstage, detach)
	w.empty()
}

// Two users with equal mount options share one staging, however their options were made; other options are a conflict
// that names the users; read-only may differ.
func TestUsageComparedByValue(t *testing.T) {
	w := open(t)
	options := func(flags ...string) registry.Usage {
		u := shared()
		u.FSType, u.MountFlags = strings.Clone("ext4"), registry.FlagsOf(slices.Clone(flags))
		return u
	}
	w.mustUp("a1", options("noatime", "nodev"))
	reader := options("noatime", "nodev")
	reader.ReadOnly = true
	w.mustUp("a2", reader)
	w.expect(attach, stage, publish, publish)
	if !w.last.publish.Usage.ReadOnly || w.last.stage.Usage.ReadOnly {
		t.Errorf("read-only is the publish's: %+v, %+v", w.last.stage.Usage, w.last.publish.Usage)
	}
	// Without the ledger, which refuses it too:
	err := w.stager.Stage(t.Context(), intent.Caller{}, volumeOf("one"), options("sync"))
	if !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(), "a1") ||
		!strings.Contains(err.Error(), "a2") {
		t.Errorf("%v", err)
	}
	if strings.Contains(err.Error(), "noatime") {
		t.Errorf("mount flags may be sensitive: %v", err)
	}
	if _, err = w.up(t.Context(), "one", "a3", options("sync")); !errors.Is(err, registry.ErrConflict) {
		t.Errorf("%v", err)
	}
	w.expect()
	w.mustDown("a1")
	w.expect(unpublish)
	w.mustDown("a2")
	w.expect(unpublish, unstage, detach)
	w.empty()
}

// Nothing later is sent while something earlier failed, on the way up and on the way down.
func TestNothingLaterAfterAFailure(t *testing.T) {
	for i, c := range []struct {
		rpc  registry.RPC
		sent []registry.RPC
	}{
		{attach, []registry.RPC{attach}},
		{stage, []registry.RPC{attach, stage}},
		{publish, []registry.RPC{attach, stage, publish}},
		{unpublish, []registry.RPC{unpublish}},
		{unstage, []registry.RPC{unpublish, unstage}},
		{detach, []registry.RPC{unpublish, unstage, detach}},
	} {
		for _, f := range []fault{refused, lost} {
			w := open(t)
			run := func() error { _, err := w.up(t.Context(), "one", "a1", shared()); return err }
			if i >= 3 {
				w.mustUp("a1", shared())
				w.take()
				run = func() error { return w.down(t.Context(), "one", "a1") }
			}
			w.failNext(c.rpc, f)
			if err := run(); err == nil {
				t.Errorf("%s: no error", c.rpc)
			}
			w.expect(c.sent...)
			w.view(func(v registry.View) {
				if len(v.AllClaims()) != 1 {
					t.Errorf("%s: the claim is gone", c.rpc)
				}
				events, _ := v.Events(0, 100)
				if last := events[len(events)-1]; last.Kind != registry.EventStepFailed ||
					last.Cause != registry.Cause(c.rpc) {
					t.Errorf("%s: the last event is %v", c.rpc, last)
				}
			})
			w.crash()
			w.mustDown("a1")
			w.empty()
		}
	}
}

// A failed publish is unpublished, though its failure was certain: the plugin may have done half of it (rule U).
func TestFailedPublishIsUndone(t *testing.T) {
	w := open(t)
	f := refused
	f.effect = true
	w.failNext(publish, f)
	if _, err := w.up(t.Context(), "one", "a1", shared()); err == nil {
		t.Error("no error")
	}
	w.take()
	w.mustDown("a1")
	w.expect(unpublish, unstage, detach)
	w.empty()
}

func TestPluginThatLies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := open(t)
		w.failNext(publish, fault{then: func() {
			clear(w.mounts)
			w.mounts[layout.Staging(volumeOf("one").VolumeKey(), w.volumes).Host] = true
		}})
		if _, err := w.up(t.Context(), "one", "a1", shared()); !errors.Is(err, registry.ErrInternal) ||
			!strings.Contains(err.Error(), "nothing was mounted") {
			t.Errorf("published where nothing is mounted: %v", err)
		}
		at := w.mustUp("a1", shared())
		w.failNext(unpublish, fault{then: func() { w.mounts[at.Host] = true }})
		if err := w.down(t.Context(), "one", "a1"); !errors.Is(err, registry.ErrInternal) ||
			!strings.Contains(err.Error(), "still mounted") {
			t.Errorf("unpublished what is still mounted: %v", err)
		}
		w.mustDown("a1")
		w.empty()
	})
}

// What nobody has recorded is not used, though it is mounted where the volume belongs: a plugin that finds it may take
// it for its own.
func TestWhatIsMountedAlreadyIsNotTakenOver(t *testing.T) {
	w := open(t)
	staging := layout.Staging(volumeOf("one").VolumeKey(), w.volumes).Host
	for path, sent := range map[string][]registry.RPC{
		staging: {attach, detach},
		layout.Target(keyOf("one", "a1"), w.volumes).Host: {attach, stage, unstage, detach},
	} {
		_ = w.MakeDir(path)
		w.mounts[path] = true
		if _, err := w.up(t.Context(), "one", "a1", shared()); !errors.Is(err, registry.ErrConflict) ||
			!strings.Contains(err.Error(), path) {
			t.Errorf("%v", err)
		}
		w.mustDown("a1")
		w.expect(sent...)
		delete(w.mounts, path)
		_, _ = w.RemoveDir(path), w.RemoveDir(filepath.Dir(path))
	}
	w.mustUp("a1", shared())
	w.mustDown("a1")
	w.empty()
}

// A mount that appears or goes away within a second after the answer is waited for. One that takes longer is judged as
// missing, or as left.
func TestLateMountIsWaitedForBeforeItIsJudged(t *testing.T) {
	for by, asked := range map[time.Duration]int{900 * time.Millisecond: 1, 3 * time.Second: 2} {
		t.Run(by.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := open(t)
				w.stager = w.newStager(w.plugin, &slowTable{machine: w.machine, by: by}, vault{})
				start := time.Now()
				for range asked {
					_, err := w.up(t.Context(), "one", "a1", shared())
					if late := asked > 1 && time.Since(start) < by; (err != nil) != late || late &&
						!strings.Contains(err.Error(), "takes longer") {
						t.Fatalf("after %v: %v", time.Since(start), err)
					}
					time.Sleep(2 * time.Second)
				}
				if asked > 1 {
					if err := w.down(t.Context(), "one", "a1"); err == nil ||
						!strings.Contains(err.Error(), "still mounted") {
						t.Errorf("%v", err)
					}
					time.Sleep(2 * time.Second)
				}
				w.mustDown("a1")
				for _, rpc := range []string{string(publish) + " ", string(unpublish) + " "} {
					n := 0
					for _, call := range w.plugin.journal {
						if strings.HasPrefix(call, rpc) {
							n++
						}
					}
					if n != asked {
						t.Errorf("%s was sent %d times, not %d: %q", rpc, n, asked, w.plugin.journal)
					}
				}
				w.empty()
			})
		})
	}
}

// slowTable shows a mount at a target, and its end, so much later.
type slowTable struct {
	*machine
	by      time.Duration
	shown   map[string]bool
	changed map[string]time.Time
}

func (s *slowTable) Mounted(path string) (bool, error) {
	if s.shown == nil {
		s.shown, s.changed = map[string]bool{}, map[string]time.Time{}
	}
	is, err := s.machine.Mounted(path)
	if !strings.Contains(path, "/publish/") {
		return is, err
	}
	since, changes := s.changed[path]
	switch {
	case is == s.shown[path]:
		delete(s.changed, path)
	case !changes:
		s.changed[path] = time.Now()
	case time.Since(since) >= s.by:
		s.shown[path] = is
		delete(s.changed, path)
	}
	return s.shown[path], nil
}

// "Not found" takes a publish or a stage down only if nothing is mounted there.
func TestNotFoundNeedsTheMountTable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gone := fault{code: "NOT_FOUND", outcome: registry.OutcomeFailed}
		for _, rpc := range []registry.RPC{unpublish, unstage} {
			w := open(t)
			w.mustUp("a1", shared())
			w.failNext(rpc, gone)
			err := w.down(t.Context(), "one", "a1")
			if err == nil || !strings.Contains(err.Error(), layout.State+"/mnt/") ||
				!strings.Contains(err.Error(), "is still mounted") {
				t.Errorf("%s: not found, and still mounted: the error is %v", rpc, err)
			}
			w.mustDown("a1")
			w.empty()

			w = open(t)
			w.mustUp("a1", shared())
			gone := gone
			gone.effect = true // somebody else had done it
			w.failNext(rpc, gone)
			w.mustDown("a1")
			w.empty()
		}
	})
}

// While a call has no certain answer, nothing else is sent for the volume: whoever comes next has it end first, by the
// same call again, and its conflict says which one it was.
func TestUncertainCallIsSettledFirst(t *testing.T) {
	w := open(t)
	w.mustUp("a1", shared())
	w.failNext(publish, lost)
	if _, err := w.up(t.Context(), "one", "a2", shared()); !errors.Is(err, registry.ErrUncertain) {
		t.Errorf("%v", err)
	}
	w.take()
	err := w.stager.Unpublish(t.Context(), intent.Caller{}, keyOf("one", "a1"))
	if !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(), "NodePublishVolume") ||
		!strings.Contains(err.Error(), "alloc a2") {
		t.Errorf("%v", err)
	}
	w.expect()
	w.view(func(v registry.View) {
		if open, _ := registry.OpenIntent(v, volumeOf("one").VolumeKey()); open.Alloc != "a2" ||
			open.Request != "data" || open.Operation != "op" {
			t.Errorf("%+v", open)
		}
	})
	w.failNext(publish, lost)
	if _, err := w.up(t.Context(), "one", "a3", shared()); !errors.Is(err, registry.ErrUncertain) {
		t.Errorf("%v", err)
	}
	w.expect(publish)
	w.mustUp("a3", shared())
	w.expect(publish, publish)
	w.mustDown("a1")
	w.mustDown("a2")
	w.mustDown("a3")
	w.empty()
}

// A publish or stage that is refused before it is sent leaves no directory behind.
func TestRefusedCallLeavesNoDirectory(t *testing.T) {
	w := open(t)
	v, ctx := volumeOf("one"), t.Context()
	if err := w.stager.Stage(ctx, intent.Caller{}, v, shared()); !errors.Is(err, registry.ErrConflict) {
		t.Errorf("stage without a claim: %v", err)
	}
	if _, err := w.stager.Publish(ctx, intent.Caller{}, v, keyOf("one", "a1"), shared()); !errors.Is(err,
		registry.ErrConflict) {
		t.Errorf("publish without a claim: %v", err)
	}
	w.expect()
	w.empty()
}

// An unpublish that may have taken effect leaves nothing that a later publish could take for done.
func TestUncertainUnpublishIsNotPublished(t *testing.T) {
	w := open(t)
	w.check = false
	w.build()
	w.mustUp("a1", shared())
	w.failNext(unpublish, lost)
	_ = w.down(t.Context(), "one", "a1")
	w.take()
	w.mustUp("a1", shared())
	w.expect(unpublish, publish)
}

// After a boot, nothing of the node's part is taken for done, and the controller's part stays.
func TestBootMakesTheNodesPartUncertain(t *testing.T) {
	for _, reconciled := range []bool{true, false} {
		w := open(t)
		w.mustUp("a1", shared())
		w.take()
		w.reboot()
		w.crash()
		if reconciled {
			findings, err := w.reconciled(t.Context())
			if err != nil || len(findings) != 2 || findings[0].Kind != registry.FoundRebooted ||
				findings[1].Kind != registry.FoundRebooted {
				t.Errorf("%v, %v", findings, err)
			}
		}
		w.mustUp("a1", shared())
		w.expect(stage, publish)
		w.reboot()
		w.crash()
		w.mustDown("a1")
		w.expect(unpublish, unstage, detach)
		w.empty()
	}
}

// What is taken down follows what was recorded when it was put up, not what the plugin announces now.
func TestCapabilitiesOfTheTimeCount(t *testing.T) {
	w := open(t)
	w.mustUp("a1", shared())
	w.take()
	w.attaches, w.stages = false, false
	w.crash()
	w.mustDown("a1")
	w.expect(unpublish, unstage, detach)
	w.empty()

	w.mustUp("a1", shared())
	w.expect(publish)
	w.stages = true // a plugin that stages now leaves those alone that were published without
	w.mustUp("a1", shared())
	w.expect()
	w.mustDown("a1")
	w.expect(unpublish)
	w.empty()
}

func TestAnotherInstanceKnowsOtherPaths(t *testing.T) {
	w := open(t)
	w.mustUp("a1", shared())
	w.volumes.Task = "/local/csi"
	w.mustUp("a2", shared())
	w.mustDown("a1")
	w.mustDown("a2")
	w.empty()
}

func TestOrderIsRefusedNotAssumed(t *testing.T) {
	w := open(t)
	v, key, ctx := volumeOf("one"), keyOf("one", "a1"), t.Context()
	steps := map[string]func() error{
		"stage without a claim": func() error { return w.stager.Stage(ctx, intent.Caller{}, v, shared()) },
		"publish without a claim": func() error {
			_, err := w.stager.Publish(ctx, intent.Caller{}, v, key, shared())
			return err
		},
	}
	for what, step := range steps {
		if err := step(); !errors.Is(err, registry.ErrConflict) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := w.ledger.Claim(ctx, registry.Claim{Volume: key.Volume, Alloc: "a1", Request: "data", Node: "n1",
		Usage: shared()}); err != nil {
		t.Fatal(err)
	}
	for what, step := range steps {
		if err := step(); !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(), "attached") {
			t.Errorf("%s, now not attached: %v", what, err)
		}
	}
	w.expect()
}

// A plugin that hangs costs its caller the caller's own time, and leaves an uncertain call behind.
func TestHungPlugin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := open(t)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		w.failNext(stage, fault{code: "DEADLINE_EXCEEDED", outcome: registry.OutcomeUncertain,
			then: func() { <-ctx.Done() }})
		if _, err := w.up(ctx, "one", "a1", shared()); !errors.Is(err, registry.ErrUncertain) ||
			!errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		w.mustDown("a1")
		w.empty()
	})
}

func TestNewerModesNeedTheirCapability(t *testing.T) {
	w := open(t)
	w.stager = w.newStager(plain{w.plugin}, w.machine, vault{})
	if _, err := w.up(t.Context(), "one", "a1", shared()); !errors.Is(err, registry.ErrUnsupported) {
		t.Errorf("%v", err)
	}
	w.expect(attach)
	w.mustDown("a1")
	w.empty()
}

// plain is a table of plugins without SINGLE_NODE_MULTI_WRITER.
type plain struct{ *plugin }

func (p plain) Await(ctx context.Context, role registry.Role, id registry.PluginID) (registry.Instance, error) {
	i, err := p.plugin.Await(ctx, role, id)
	i.Fingerprint.Capabilities = slices.DeleteFunc(i.Fingerprint.Capabilities, func(c registry.Capability) bool {
		return c == registry.SingleNodeMulti
	})
	return i, err
}

// mute tells no secret before its caller gives up.
type mute struct{}

func (mute) Resolve(ctx context.Context, _ map[string]registry.Secret) (map[string]registry.SecretValue, error) {
	<-ctx.Done()
	return nil, context.Cause(ctx)
}

// What an error must not tell is asked for when a volume is taken down; that nobody answers holds nothing up.
func TestReleaseNeedsNoSecrets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := open(t)
		u := shared()
		u.MountFlags = registry.FlagsOf([]string{"password=x"})
		w.mustUp("a1", u)
		w.mustUp("a2", u)
		w.mustDown("a1")
		p := w.last.private
		if p.Unknown || p.Secrets["token"].Reveal() == "" || !slices.Contains(p.MountFlags.List(), "password=x") ||
			len(p.Contexts) != 2 ||
			p.Contexts[0]["pool"] != "p" || p.Contexts[1]["device"] != "/dev/ext-one" {
			t.Errorf("%+v", p)
		}
		w.crash()
		w.stager = w.newStager(w.plugin, w.machine, mute{})
		w.mustDown("a2")
		if !w.last.private.Unknown {
			t.Errorf("%+v", w.last.private)
		}
		w.empty()
	})
}

// away is a table in which the controller is not, for a moment.
type away struct{ *plugin }

func (a away) Find(role registry.Role, id registry.PluginID) (registry.Instance, bool) {
	if role == registry.RoleController {
		return registry.Instance{}, false
	}
	return a.plugin.Find(role, id)
}

// A volume is neither staged nor published unattached while nobody can say whether it has to be attached.
func TestNothingIsPutUpWhileTheControllerIsAway(t *testing.T) {
	v := volumeOf("one")
	for what, expected := range map[string]bool{"a controller is expected": true, "there is none": false} {
		w := open(t)
		w.attaches = false
		if _, err := w.ledger.Claim(t.Context(), registry.Claim{Volume: v.VolumeKey(), Alloc: "a1", Request: "data",
			Node: "n1", Usage: shared()}); err != nil {
			t.Fatal(err)
		}
		s := w.newStager(away{w.plugin}, w.machine, vault{})
		s.Expected = func(_ registry.View, role registry.Role, id registry.PluginID) bool {
			return expected && role == registry.RoleController && id == v.Plugin
		}
		if err := s.Stage(t.Context(), intent.Caller{}, v, shared()); errors.Is(err, registry.ErrConflict) != expected {
			t.Errorf("%s: %v", what, err)
		}
		if expected {
			w.expect()
		}
	}
}

// A claim is not given up before everything that it stands for is down.
func TestClaimKeptUntilUnpublished(t *testing.T) {
	w, key := open(t), keyOf("one", "a1")
	w.mustUp("a1", shared())
	down := func(says string, step func() error) {
		t.Helper()
		existed, err := w.unclaim(t.Context(), key)
		if existed || !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(), says) {
			t.Errorf("released %v: %v", existed, err)
		}
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	by := intent.Caller{}
	down("published", func() error { return w.stager.Unpublish(t.Context(), by, key) })
	down("staged", func() error { return w.stager.Unstage(t.Context(), by, key.Volume) })
	down("attached", func() error { return w.mediator.Detach(t.Context(), by, key.Volume, "n1") })
	if existed, err := w.unclaim(t.Context(), key); !existed || err != nil {
		t.Errorf("%v, %v", existed, err)
	}
}
