package node

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/internal/csifake"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

func (n *env) stats() ([]registry.VolumeUsage, error) {
	return n.shim.stager.Stats(context.Background(), v0Name)
}

// The plugin measures a volume at a path where it is published, else where it is staged. It gets the staging path if it
// stages.
func TestStatsAskWhereItIsPublished(t *testing.T) {
	for what, c := range map[string]struct {
		caps string
		up   func(n *env)
		path string
	}{
		"published":    {"", func(n *env) { n.up("a1", wish{}) }, targetOf("a1")},
		"block device": {"", func(n *env) { n.up("a1", wish{block: true}) }, targetOf("a1")},
		"staged and published": {stages, func(n *env) {
			n.up("a1", wish{})
			n.restart()
		}, targetOf("a1")},
		"staged": {stages, func(n *env) {
			n.fails(publish, "INVALID_ARGUMENT")
			_ = n.tryUp("a1", wish{})
			_ = n.shim.stager.Unpublish(context.Background(), intent.Caller{}, claimOf("a1"), false)
		}, stagingPath},
		"one mount in trouble": {stages, func(n *env) {
			n.trouble()
			n.up("a2", wish{})
		}, targetOf("a2")},
	} {
		t.Run(what, func(t *testing.T) {
			inEnv(t, c.caps+measures, func(t *testing.T, n *env) {
				c.up(n)
				usage, err := n.stats()
				r := lastRequest[*spec.NodeGetVolumeStatsRequest](n, registry.NodeStatsRPC)
				if err != nil || len(usage) == 0 || hostPath(r.GetVolumePath()) != c.path ||
					(r.GetStagingTargetPath() != "") != (c.caps == stages) {
					t.Errorf("%+v, %v; asked %+v", usage, err, r)
				}
			})
		})
	}
}

// trouble mounts volume v0 for alloc a1, and records that its mount is in trouble.
func (n *env) trouble() {
	n.up("a1", wish{})
	var refs []registry.Ref
	n.view(func(v registry.View) { refs = v.AllRefs() })
	for _, r := range refs {
		r.Trouble, r.Troubled = "the server is gone", time.Now()
		n.put(r)
	}
}

// Stats sends nothing if nothing is mounted, if the plugin cannot answer or if another call is open. The error says
// what to do.
func TestStatsAreRefused(t *testing.T) {
	up := func(f func(n *env)) func(n *env) {
		return func(n *env) {
			n.up("a1", wish{})
			f(n)
		}
	}
	for what, c := range map[string]struct {
		before func(*env)
		kind   error
		says   string
	}{
		"not used": {func(*env) {}, registry.ErrConflict, "not mounted here"},
		"lost mount": {up(func(n *env) { n.machine.unmount(targetOf("a1")) }), registry.ErrConflict,
			"not mounted here"},
		"rebooted":      {up((*env).reboot), registry.ErrConflict, "not mounted here"},
		"in trouble":    {(*env).trouble, registry.ErrUnavailable, "the server is gone"},
		"no plugin":     {(*env).removePlugin, registry.ErrUnavailable, "holdfast plugin status"},
		"no capability": {func(n *env) { n.restartPlugin("") }, registry.ErrUnsupported, "with df"},
		"unhealthy plugin": {func(n *env) {
			in, _ := n.shim.table.Find(registry.RoleNode, pluginID)
			in.Health = registry.Health{State: registry.Unhealthy, Cause: registry.CauseMissed}
			n.put(in)
		}, registry.ErrUnavailable, "is not healthy: heartbeats missed"},
		"open call": {func(n *env) {
			n.script(csifake.Rule{RPC: string(publish), Hang: csifake.UntilCancelled})
			_ = n.tryUp("a1", wish{})
		}, registry.ErrConflict, "NodePublishVolume"},
		"call under way": {func(n *env) {
			n.script(csifake.Rule{RPC: string(publish), Hang: csifake.UntilCancelled})
			n.async(func() { _ = n.tryUp("a1", wish{}) })
		}, context.DeadlineExceeded, "where a mount for alloc a1 is under way: it did not end within 10s"},
	} {
		t.Run(what, func(t *testing.T) {
			inEnv(t, measures, func(t *testing.T, n *env) {
				c.before(n)
				usage, err := n.stats()
				if !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.says) || usage != nil {
					t.Errorf("%v, %v", usage, err)
				}
				n.mu.Lock()
				defer n.mu.Unlock()
				if n.requests[string(registry.NodeStatsRPC)] != nil {
					t.Error("the plugin was asked")
				}
			})
		})
	}
}

// The next call for the volume cancels Stats at once. Stats of a hung plugin ends by itself.
func TestStatsDelayNoMount(t *testing.T) {
	inEnv(t, measures, func(t *testing.T, n *env) {
		n.up("a1", wish{})
		n.script(csifake.Rule{RPC: string(registry.NodeStatsRPC), Hang: csifake.UntilCancelled})
		wantErr(t, errOf(n.stats()), nil, "DEADLINE_EXCEEDED")
		done := make(chan error, 1)
		n.async(func() {
			_, err := n.stats()
			done <- err
		})
		began := time.Now()
		n.up("a2", wish{})
		if took := time.Since(began); took != 0 {
			t.Errorf("the next user waited %v", took)
		}
		wantErr(t, <-done, registry.ErrConflict, "try again")
	})
}

// If the volume is unmounted during a measurement, the plugin may have measured the directory below. Stats discards the
// result.
func TestStatsOfWhatGoesAway(t *testing.T) {
	inEnv(t, measures, func(t *testing.T, n *env) {
		n.up("a1", wish{})
		n.script(csifake.Rule{RPC: string(registry.NodeStatsRPC), Delay: csifake.Duration(time.Second)})
		done := make(chan error, 1)
		n.async(func() {
			_, err := n.stats()
			done <- err
		})
		synctest.Wait()
		n.machine.unmount(targetOf("a1"))
		wantErr(t, <-done, registry.ErrConflict)
	})
}

// The error about a volume that its plugin has not named yet has the volume's name.
func TestStatsOfAVolumeInCreation(t *testing.T) {
	inEnv(t, measures, func(t *testing.T, n *env) {
		name := registry.VolumeName{Namespace: "default", ID: "v7"}
		n.put(registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: name.Namespace, ID: name.ID, Plugin: pluginID},
			State: registry.VolumeCreating})
		_, err := n.shim.stager.Stats(t.Context(), name)
		wantErr(t, err, registry.ErrConflict, "volume "+name.String()+" is not mounted here")
	})
}
