package node

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"holdfast/internal/csifake"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Users with equal mount options share one staging, over restarts, until the last of them is released. Other options
// are a conflict, which names the users and no options. Read-only may differ.
func TestUsageComparedByValue(t *testing.T) {
	options := func(flags string) string {
		return "mount_options {\n fs_type = \"ext4\"\n mount_flags = [" + flags + "]\n}\n"
	}
	same := options(`"noatime", "nodev"`)
	inEnv(t, attaches+stages, func(t *testing.T, n *env) {
		n.up("a1", wish{options: same})
		n.restart()
		n.up("a2", wish{options: same + "read_only = true"})
		n.want("two users", attach, stage, publish)
		if !lastRequest[*spec.NodePublishVolumeRequest](n, publish).GetReadonly() {
			t.Error("the second user is not read-only")
		}
		err := n.tryUp("a3", wish{options: options(`"sync"`)})
		if !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(), "a1") ||
			!strings.Contains(err.Error(), "a2") || strings.Contains(err.Error(), "noatime") {
			t.Errorf("%v", err)
		}
		n.want("other options")
		n.down("a1")
		n.want("first user", unpublish)
		n.restart()
		n.down("a2")
		n.want("last user", unpublish, unstage, detach)
	})
}

// A staging mount that is gone is made again before the next publish, also while another publish of the volume is
// mounted: the plugin would publish the empty directory.
func TestLostStagingIsMadeAgainBesideAPublish(t *testing.T) {
	inEnv(t, stages, func(t *testing.T, n *env) {
		n.up("a1", wish{})
		n.want("first user", stage, publish)
		n.machine.unmount(stagingPath)
		n.up("a2", wish{})
		n.want("second user", stage, publish)
	})
}

// The stager does not use a mount without a record at the volume's own path, because a plugin that finds it may take it
// for its own.
func TestWhatIsMountedAlreadyIsNotTakenOver(t *testing.T) {
	inEnv(t, attaches+stages, func(t *testing.T, n *env) {
		for path, sent := range map[string][]registry.RPC{
			stagingPath:    {attach, detach},
			targetOf("a1"): {attach, detach},
		} {
			n.machine.mountStray(path)
			wantErr(t, n.tryUp("a1", wish{}), registry.ErrConflict, path)
			n.down("a1")
			n.want(path, sent...)
			n.machine.unmount(path)
		}
	})
}

// The stager waits for a mount that appears or disappears within a second after the response. One that appears later
// counts as missing, and one that disappears later as still mounted.
func TestLateMountIsWaitedForBeforeItIsJudged(t *testing.T) {
	for late, calls := range map[time.Duration]int{900 * time.Millisecond: 1, 3 * time.Second: 2} {
		t.Run(late.String(), func(t *testing.T) {
			inEnv(t, "", func(t *testing.T, n *env) {
				n.machine.late = late
				if err := n.tryUp("a1", wish{}); (err == nil) != (calls == 1) ||
					err != nil && !strings.Contains(err.Error(), "takes longer") {
					t.Errorf("%v", err)
				}
				time.Sleep(5 * time.Second)
				n.up("a1", wish{})
				if got := n.journaled(); len(got) != calls {
					t.Errorf("%d calls up", len(got))
				}
				n.down("a1")
				if got := n.journaled(); len(got) < calls || calls == 1 && len(got) > 1 {
					t.Errorf("%d calls down", len(got))
				}
				n.machine.late = 0
			})
		})
	}
}

// NOT_FOUND ends an unpublish or unstage only if nothing is mounted there.
func TestNotFoundNeedsTheMountTable(t *testing.T) {
	for _, rpc := range []registry.RPC{unpublish, unstage} {
		inEnv(t, stages, func(t *testing.T, n *env) {
			n.up("a1", wish{})
			n.fails(rpc, "NOT_FOUND")
			if err := n.tryDown("a1"); err == nil || !strings.Contains(err.Error(), layout.State+"/mnt/") ||
				!strings.Contains(err.Error(), "is still mounted") {
				t.Errorf("%s: %v", rpc, err)
			}
			n.script()
			n.down("a1")
			n.up("a1", wish{})
			n.journaled()
			n.script(csifake.Rule{RPC: string(rpc), When: csifake.After, Code: "NOT_FOUND"}) // it was unmounted before
			n.down("a1")
			if got := n.journaled(); len(got) != 2 {
				t.Errorf("%s: %d calls", rpc, len(got))
			}
		})
	}
}

// The stager refuses steps in the wrong order before it sends anything, and leaves no directory behind.
func TestStepsInTheWrongOrderAreRefused(t *testing.T) {
	inEnv(t, attaches+stages, func(t *testing.T, n *env) {
		s, v, key := n.shim.stager, n.volume(0, "x-v0"), claimOf("a1")
		usage := registry.Usage{Access: accessOf(0), Attachment: registry.FileSystem}
		refused := func(want string) {
			_, published := s.Publish(t.Context(), intent.Caller{}, v, key, usage, nil)
			for _, err := range []error{s.Stage(t.Context(), intent.Caller{}, v, usage), published} {
				wantErr(t, err, registry.ErrConflict, want)
			}
		}
		refused("claim")
		claim := registry.Claim{Volume: v0, Alloc: "a1", Request: "v0", Node: nodeName, Usage: usage}
		n.put(claim)
		refused("attached")
		n.commit(registry.Change{Delete: []registry.Key{key.ClaimRecord()}})
		n.want("out of order")
		if len(n.machine.dirs) > 0 {
			t.Errorf("directories: %v", n.machine.dirs)
		}
	})
}

// The claim of a volume is not released before the volume is unpublished and unstaged.
func TestClaimKeptUntilUnpublished(t *testing.T) {
	inEnv(t, stages, func(t *testing.T, n *env) {
		n.up("a1", wish{})
		s, key := n.shim.stager, claimOf("a1")
		down := func() (err error) {
			n.view(func(v registry.View) { err = s.CheckUnmounted(v, key) })
			return err
		}
		for _, c := range []struct {
			want string
			step func() error
		}{
			{"published", func() error { return s.Unpublish(t.Context(), intent.Caller{}, key, false) }},
			{"staged", func() error { return s.Unstage(t.Context(), intent.Caller{}, v0) }},
		} {
			wantErr(t, down(), registry.ErrConflict, c.want)
			if err := c.step(); err != nil {
				t.Fatal(err)
			}
		}
		noErr(t, down())
	})
}

// A volume is released as it was mounted, whatever its plugin declares at the time of the release.
func TestVolumeIsReleasedAsItWasMounted(t *testing.T) {
	inEnv(t, "", func(t *testing.T, n *env) {
		n.up("a1", wish{})
		n.want("mounted", publish)
		n.restartPlugin(stages)
		n.up("a1", wish{})
		n.down("a1")
		n.want("released by a plugin that stages", unpublish)
	})
}

// After a reboot nothing is mounted. If the plugin was updated too, and attaches or stages now, the volume is attached
// and staged.
func TestVolumeIsMountedAnewAfterAReboot(t *testing.T) {
	for _, before := range []string{"", stages} {
		inEnv(t, before, func(t *testing.T, n *env) {
			n.up("a1", wish{})
			n.caps = append(strings.Fields(attaches+stages), "LIST_VOLUMES")
			n.reboot()
			n.journaled()
			n.up("a1", wish{})
			n.want("mounted again", attach, stage, publish)
			n.down("a1")
			n.want("released", unpublish, unstage, detach)
		})
	}
}

// While no controller is registered, and one is expected, a volume is neither staged nor published unattached. In a
// cluster the plugin's executor has decided before that the volume needs no attachment.
func TestNothingIsMountedUnattachedWhileTheControllerIsAway(t *testing.T) {
	for _, c := range []struct {
		expects bool
		cluster registry.NodeName
	}{{true, ""}, {false, ""}, {true, nodeName}} {
		expected := c.expects && c.cluster == ""
		inEnv(t, stages, func(t *testing.T, n *env) {
			n.decide(func(v registry.View) registry.Change {
				return registry.RemoveChange(v, time.Now(), registry.InstanceKey{Role: registry.RoleController,
					Plugin: pluginID, Alloc: "plugin", Task: "p"})
			})
			s, usage := n.shim.stager, registry.Usage{Access: accessOf(0), Attachment: registry.FileSystem}
			s.Expected = func(registry.View, registry.Role, registry.PluginID) bool { return c.expects }
			s.Sender.Node = c.cluster
			n.put(registry.Claim{Volume: v0, Alloc: "a1", Request: "v0", Node: nodeName, Usage: usage})
			err := s.Stage(t.Context(), intent.Caller{}, n.volume(0, "x-v0"), usage)
			if errors.Is(err, registry.ErrConflict) != expected || !expected && err != nil {
				t.Errorf("%+v: %v", c, err)
			}
			noErr(t, s.Unstage(t.Context(), intent.Caller{}, v0))
			n.commit(registry.Change{Delete: []registry.Key{claimOf("a1").ClaimRecord()}})
		})
	}
}

// vault returns its secrets one after another, and then always the last one. Without a secret it does not respond.
type vault struct{ secrets []registry.SecretValue }

func (v *vault) Resolve(
	ctx context.Context, _ map[string]registry.Secret,
) (map[string]registry.SecretValue, error) {
	if len(v.secrets) == 0 {
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}
	secret := v.secrets[0]
	if len(v.secrets) > 1 {
		v.secrets = v.secrets[1:]
	}
	return map[string]registry.SecretValue{"token": secret}, nil
}

// A refused call is tried again with a secret that was replaced meanwhile.
func TestRotatedSecretIsUsedByTheNextNodeCall(t *testing.T) {
	for caps, rpc := range map[string]registry.RPC{stages: stage, "": publish} {
		inEnv(t, caps, func(t *testing.T, n *env) {
			n.shim.stager.Secrets = &vault{[]registry.SecretValue{"canary-old", "canary-new"}}
			n.script(csifake.Rule{RPC: string(rpc), Code: "UNAUTHENTICATED", Times: 1})
			n.up("a1", wish{})
			r := lastRequest[interface {
				proto.Message
				GetSecrets() map[string]string
			}](n, rpc)
			if got := r.GetSecrets()["token"]; got != "canary-new" {
				t.Errorf("%s was sent with %q", rpc, got)
			}
		})
	}
}

// A release asks for secrets only to redact errors. It continues without them, and no record has one.
func TestReleaseNeedsNoSecrets(t *testing.T) {
	inEnv(t, stages, func(t *testing.T, n *env) {
		secrets := &vault{[]registry.SecretValue{"canary-77d1"}}
		n.shim.stager.Secrets = secrets
		n.up("a1", wish{})
		n.script(csifake.Rule{RPC: string(unpublish), Code: "FAILED_PRECONDITION", Message: "bad token canary-77d1"})
		if err := n.tryDown("a1"); err == nil || strings.Contains(err.Error(), "canary") {
			t.Errorf("%v", err)
		}
		n.script()
		secrets.secrets = nil
		n.down("a1")
		secrets.secrets = []registry.SecretValue{"canary-77d1"}
		n.view(func(v registry.View) {
			events, _ := v.Events(0, 10000)
			text, err := json.Marshal([]any{v.Volumes(), v.AllRefs(), v.Intents(), v.Allocs(), events})
			if err != nil || strings.Contains(string(text), "canary") {
				t.Errorf("a secret is stored (%v): %s", err, text)
			}
		})
	})
}
