package node

import (
	"context"
	"errors"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"holdfast/internal/csifake"
	"holdfast/registry"
)

// A claim is released by force only if its node is not alive, or if its node does not know the alloc and has no mount
// for it. The release needs a confirmation. The volume is detached first, and an event names the operator.
func TestOnlyAbandonedClaimsAreReleasedByForce(t *testing.T) {
	inEnv(t, attaches+stages, func(t *testing.T, n *env) {
		v1 := n.volume(1, "x-v1")
		release := func(alloc registry.AllocID, f registry.Force) ([]registry.ReleaseStep, error) {
			name := v0Name
			if alloc == "there" {
				name = v1.VolumeName()
			}
			return n.shim.allocs.ForceReleaseClaims(n.shim.ctx, name, alloc, f)
		}
		refused := func(alloc registry.AllocID, kind error, words string) {
			t.Helper()
			_, err := release(alloc, registry.Force{By: operator, Confirm: string(alloc)})
			if !errors.Is(err, kind) || !strings.Contains(err.Error(), words) {
				t.Errorf("release the claim of %s: %v", alloc, err)
			}
		}
		n.up("known", wish{})
		refused("known", registry.ErrConflict, "this node knows alloc known: stop it")
		refused("nobody", registry.ErrNotFound, "alloc nobody has no claim")

		var here registry.Attachment
		n.view(func(v registry.View) { here, _ = v.Attachment(registry.AttachmentKey{Volume: v0, Node: nodeName}) })
		lease := registry.NodeLease{Node: "other", Lease: 1}
		attached := registry.Attachment{Volume: v1.VolumeKey(), Name: v1.VolumeName(), Node: "other",
			NodeID: here.NodeID,
			State:  registry.MarkDone}
		n.put(registry.Claim{Volume: v1.VolumeKey(), Name: v1.VolumeName(), Alloc: "there", Request: "v1",
			Node: "other"},
			attached, lease)
		refused("there", registry.ErrConflict, "node other, which has the claim, is alive")
		n.commit(registry.Change{Delete: []registry.Key{lease.Key()}})
		wantErr(t, errOf(release("there", registry.Force{By: operator})), registry.ErrDenied, "add --confirm there")
		n.rpcs()
		steps, err := release("there", registry.Force{DryRun: true})
		if err != nil || len(steps) != 2 || steps[0].RPC != detach || steps[1].Action != registry.ReleaseClaim {
			t.Errorf("dry run: %+v, %v", steps, err)
		}
		n.want("after a dry run")
		n.script(csifake.Rule{RPC: string(detach), Times: 1, Answer: func(
			_ context.Context, _, reply proto.Message, err error) (proto.Message, error) {
			n.put(lease)
			return reply, err
		}})
		refused("there", registry.ErrConflict, "node other, which has the claim, is alive") // again
		n.want("until the node is alive again", detach)
		n.commit(registry.Change{Delete: []registry.Key{lease.Key()}})
		n.put(attached)
		if _, err := release("there", registry.Force{By: operator, Confirm: "there"}); err != nil {
			t.Fatal(err)
		}
		n.want("after the release", detach)
		n.put(registry.Claim{Volume: v0, Name: v0Name, Alloc: "unknown", Request: "v0", Node: nodeName})
		if _, err := release("unknown", registry.Force{By: operator, Confirm: "unknown"}); err != nil {
			t.Fatal(err)
		}
		n.want("beside a user of the node")
		n.view(func(v registry.View) {
			if claims := v.Claims(v0); len(claims) != 1 || claims[0].Alloc != "known" {
				t.Errorf("claims: %+v", claims)
			}
		})
		forced := n.events(registry.EventForced)
		if len(forced) != 3 || forced[0] != "claim of node other, by "+operator {
			t.Errorf("events: %q", forced)
		}
		n.down("known")
	})
}
