package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/internal/csifake"
	"holdfast/registry"
	"holdfast/shim/internal/controller"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// expand requests a larger size for volume v0, and waits a minute.
func (n *env) expand(bytes int64) error {
	ctx, cancel := context.WithTimeout(n.shim.ctx, time.Minute)
	defer cancel()
	_, err := n.shim.volumes.Expand(ctx, registry.Call{}, v0Name, registry.CapacityRange{Required: bytes})
	return err
}

func (n *env) mustExpand(bytes int64) {
	n.t.Helper()
	if err := n.expand(bytes); err != nil {
		n.t.Errorf("expand to %d: %v", bytes, err)
	}
}

// wantExpansions checks the expansions that the plugin got since the last check, as "controller 2" or "staging 2" with
// the size in GiB. Repetitions in a row count as one.
func (n *env) wantExpansions(when string, want ...string) {
	n.t.Helper()
	var got []string
	for _, c := range n.journaled() {
		where := map[bool]string{true: "staging", false: "target"}[c.Path == c.Staging]
		switch registry.RPC(c.RPC) {
		case expand:
			got = append(got, fmt.Sprintf("controller %d", c.Bytes/gib))
		case expandOnNode:
			got = append(got, fmt.Sprintf("%s %d", where, c.Bytes/gib))
		}
	}
	if got = slices.Compact(got); !slices.Equal(got, want) {
		n.t.Errorf("%s: the plugin got %q, want %q", when, got, want)
	}
}

// expansion returns the volume v0, with the state of its expansion as its status shows it.
func (n *env) expansion() (v registry.Volume) {
	n.view(func(view registry.View) {
		v, _ = view.VolumeByKey(v0)
		p, _ := view.Staging(v0)
		v.Expansion = v.Expansion.OnNode(p.Expanded, len(view.Refs(v0)) > 0)
	})
	return v
}

// wantExpanded checks that volume v0 has the size, and that nothing is pending.
func (n *env) wantExpanded(bytes int64) {
	n.t.Helper()
	if v := n.expansion(); v.Expansion.Pending() || v.Expansion.Open() || v.Expansion.Refused != "" ||
		v.Capacity < bytes {
		n.t.Errorf("the volume has %d bytes, want %d; recorded: %+v", v.Capacity, bytes, v.Expansion)
	}
}

func (n *env) wantPending() {
	n.t.Helper()
	if e := n.expansion().Expansion; !e.Pending() {
		n.t.Errorf("nothing is pending: %+v", e)
	}
}

const (
	offline = "EXPAND_VOLUME expansion/OFFLINE "
	alone   = "node/EXPAND_VOLUME expansion/ONLINE "
)

var readOnly = wish{options: "read_only = true"}

// Other nodes may release the claims of this node while it is lost, and delete the volume. An open expansion is then
// closed, and not repeated.
func TestExpansionWithoutAClaimIsClosed(t *testing.T) {
	for _, deleted := range []bool{false, true} {
		inEnv(t, stages+expands, func(t *testing.T, n *env) {
			n.up("a1", wish{})
			n.fails(expandOnNode, "ABORTED")
			if err := n.expand(2 * gib); err == nil {
				t.Error("it was expanded")
			}
			var before registry.Volume
			n.view(func(v registry.View) { before, _ = v.VolumeByKey(v0) })
			change := registry.Change{Delete: []registry.Key{claimOf("a1").ClaimRecord()}}
			if deleted {
				change.Delete = append(change.Delete, before.Key())
			}
			n.commit(change)
			n.journaled()
			n.shim.allocs.AwaitAdmitted = func(context.Context, func(string)) error { return nil } // as in a cluster
			n.down("a1")
			n.want("released", unpublish, unstage)
			if left := n.left(); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
			n.script()
			if deleted {
				n.put(before)
			}
		})
	}
}

// An expansion that is pending without a claim is no work for this node, which would try it again and again.
func TestExpansionWithoutAClaimIsNotDue(t *testing.T) {
	inEnv(t, stages+expands, func(t *testing.T, n *env) {
		n.up("a1", wish{})
		var claims []registry.Claim
		n.view(func(v registry.View) { claims = v.Claims(v0) })
		n.commit(registry.Change{Delete: []registry.Key{claims[0].Key()}})
		pending := n.expansion()
		pending.Expansion.Node.Required = 2 * gib
		if due, err := n.shim.stager.Grows(t.Context(), pending); due || err != nil {
			t.Errorf("it is due: %v, %v", due, err)
		}
		n.put(claims[0])
	})
}

// A volume that was expanded while unused is expanded on its node at the next mount, once: after it is staged and
// before it is published, or after it is published if its plugin does not stage it.
func TestExpandedWhileUnused(t *testing.T) {
	for name, c := range map[string]struct {
		caps  string
		use   wish
		calls []string
		order []registry.RPC
	}{
		"staged": {stages + expands, wish{}, []string{"controller 2", "staging 2"},
			[]registry.RPC{stage, expandOnNode, publish}},
		"not staged": {expands, wish{}, []string{"controller 2", "target 2"}, []registry.RPC{publish, expandOnNode}},
		"offline": {stages + offline, wish{}, []string{"controller 2", "staging 2"},
			[]registry.RPC{stage, expandOnNode, publish}},
		"node alone": {stages + alone, wish{}, []string{"staging 2"}, []registry.RPC{stage, expandOnNode, publish}},
		"block device": {stages + expands, wish{block: true}, []string{"controller 2", "target 2"},
			[]registry.RPC{stage, publish, expandOnNode}},
		"controller alone": {stages + "controller/EXPAND_VOLUME", wish{}, []string{"controller 2"},
			[]registry.RPC{stage, publish}},
	} {
		t.Run(name, func(t *testing.T) {
			inEnv(t, c.caps, func(t *testing.T, n *env) {
				n.mustExpand(2 * gib)
				n.restart()
				n.up("a1", c.use)
				before := n.seen
				n.wantExpansions("first mount", c.calls...)
				n.seen = before
				if got := n.rpcs(); !slices.Equal(got[len(got)-len(c.order):], c.order) {
					t.Errorf("the order is %q, want %q", got, c.order)
				}
				n.restart()
				n.up("a2", c.use)
				n.down("a1")
				n.down("a2")
				n.up("a1", c.use)
				n.wantExpansions("later mounts")
				n.wantExpanded(2 * gib)
			})
		})
	}
}

// A volume in use is expanded at once if its plugin allows that. Otherwise the error names the users, and nothing is
// sent. A volume that is large enough is not expanded again.
func TestExpandedWhileUsed(t *testing.T) {
	inEnv(t, stages+expands, func(t *testing.T, n *env) {
		n.up("a1", wish{})
		for range 2 {
			n.mustExpand(2 * gib)
		}
		n.wantExpansions("online", "controller 2", "staging 2")
		wantErr(t, n.expand(gib), registry.ErrInvalid, "smaller")
	})
	inEnv(t, stages+offline, func(t *testing.T, n *env) {
		n.up("a1", wish{})
		wantErr(t, n.expand(2*gib), registry.ErrConflict, "alloc a1", "stop the jobs")
		n.wantExpansions("offline")
	})
}

// A volume that is read-only on the node waits for a user that may write. If the volume is staged for writing,
// read-only users do not matter.
func TestReadOnlyVolumeGrowsLater(t *testing.T) {
	for caps, steps := range map[string][2]string{expands: {"", "target 2"}, stages + expands: {"staging 2", ""}} {
		inEnv(t, caps, func(t *testing.T, n *env) {
			n.mustExpand(2 * gib)
			n.wantExpansions("unused", "controller 2")
			for i, use := range []wish{readOnly, {}} {
				n.up(registry.AllocID(fmt.Sprint("a", i)), use)
				n.wantExpansions(fmt.Sprintf("%q", use.options), strings.FieldsFunc(steps[i],
					func(rune) bool { return false })...)
			}
			n.wantExpanded(2 * gib)
		})
	}
}

// A refusal of the node plugin is shown, and is no error for users of the volume. The plugin is asked again at the next
// mount, also at the first one after a reboot. Before that it is asked again only if a person asks. After
// FAILED_PRECONDITION it is not, even for a larger size.
func TestNodeRefusesToExpand(t *testing.T) {
	for _, c := range []struct {
		caps, code, where string
		again             []string // if a person asks for 3 GiB
		next              func(n *env)
	}{
		{stages, "FAILED_PRECONDITION", "staging", []string{"controller 3"},
			func(n *env) { n.down("a1"); n.down("a2") }},
		{stages, "INTERNAL", "staging", []string{"staging 2"}, func(n *env) { n.down("a1"); n.down("a2") }},
		{"", "FAILED_PRECONDITION", "target", []string{"controller 3"}, (*env).reboot},
	} {
		t.Run(c.caps+c.code, func(t *testing.T) {
			inEnv(t, c.caps+expands, func(t *testing.T, n *env) {
				n.mustExpand(2 * gib)
				n.fails(expandOnNode, c.code)
				n.up("a1", wish{})
				n.wantExpansions("first mount", "controller 2", c.where+" 2")
				if e := n.expansion().Expansion; !e.Pending() || e.Refused != c.code || e.RPC != expandOnNode {
					t.Errorf("recorded: %+v", e)
				}
				n.restart()
				n.up("a2", wish{})
				n.wantExpansions("second user")
				_ = n.expand(3 * gib)
				n.wantExpansions("a person asks", c.again...)
				n.script()
				size := n.expansion().Capacity / gib
				c.next(n)
				n.up("a2", wish{})
				n.wantExpansions("next mount", fmt.Sprintf("%s %d", c.where, size))
				n.wantExpanded(size * gib)
			})
		})
	}
}

// An open call of a killed shim is sent again by whatever comes next: a use, a release, another expansion, or the next
// shim itself. After a reboot, the node has nothing to expand before the next mount.
func TestLostExpansionIsResumed(t *testing.T) {
	next := map[string]func(n *env){
		"use":       func(n *env) { n.up("a2", wish{}) },
		"release":   func(n *env) { n.down("a1") },
		"expansion": func(n *env) { n.mustExpand(2 * gib) },
		"nothing":   func(n *env) { time.Sleep(time.Minute) },
		"reboot": func(n *env) {
			n.reboot()
			time.Sleep(time.Minute)
			n.up("a1", wish{})
		},
	}
	for rpc, calls := range map[registry.RPC][]string{
		expand: {"controller 2", "staging 2"}, expandOnNode: {"staging 2"},
	} {
		for what, happens := range next {
			t.Run(string(rpc)+" "+what, func(t *testing.T) {
				inEnv(t, stages+expands, func(t *testing.T, n *env) {
					n.up("a1", wish{})
					n.script(csifake.Rule{RPC: string(rpc), When: csifake.After, Hang: csifake.UntilCancelled})
					n.async(func() { _ = n.expand(2 * gib) })
					n.crash()
					n.script()
					n.journaled()
					n.startShim()
					n.introduce()
					happens(n)
					if what == "release" { // the release may end the node's part
						return
					}
					n.wantExpansions(what, calls...)
					n.wantExpanded(2 * gib)
				})
			})
		}
	}
}

// If only the node expands volumes, an impossible size is an error, and is not requested again. Another size replaces a
// pending one. The capacity is the size that the node plugin has made.
func TestNodeAloneAndAnotherSize(t *testing.T) {
	inEnv(t, stages+alone, func(t *testing.T, n *env) {
		n.up("a1", wish{})
		n.fails(expandOnNode, "OUT_OF_RANGE")
		wantErr(t, n.expand(5000*gib), registry.ErrInvalid, "OUT_OF_RANGE")
		n.wantExpansions("impossible", "staging 5000")
		n.script()
		n.down("a1")
		for _, size := range []int64{9, 3} {
			n.mustExpand(size * gib)
		}
		n.up("a1", wish{})
		n.wantExpansions("next mount", "staging 3")
		n.wantExpanded(3 * gib)
	})
}

// expandElsewhere expands volume v0 at its controller, records that another node has expanded it too, and waits a
// minute.
func (n *env) expandElsewhere(size int64) {
	n.t.Helper()
	at := registry.InstanceKey{Role: registry.RoleController, Plugin: pluginID, Alloc: n.task.Alloc, Task: n.task.Task}
	request := csi.ExpandRequest{VolumeID: "x-v0", Range: registry.CapacityRange{Required: size}}
	if _, err := n.shim.fleet.Expand(n.t.Context(), at, request); err != nil {
		n.t.Fatal(err)
	}
	v := n.expansion()
	v.Capacity, v.Expansion = size, registry.Expansion{Done: size, NodeDone: size}
	n.put(v)
	n.shim.volumes.Wake()
	time.Sleep(time.Minute)
}

// A volume that another node has expanded is expanded here too if it has been mounted since before, once. If the plugin
// refuses, the volume's status on this node says so.
func TestExpansionFinishedByAnotherNode(t *testing.T) {
	for caps, where := range map[string]string{stages: "staging", "": "target"} {
		inEnv(t, caps+expands, func(t *testing.T, n *env) {
			n.expandElsewhere(2 * gib)
			n.up("a1", wish{})
			n.restart()
			n.wantExpansions("mounted since then", "controller 2")
			n.expandElsewhere(3 * gib)
			n.wantExpansions("mounted before", "controller 3", where+" 3")
			n.up("a2", wish{})
			n.down("a1")
			n.restart()
			n.wantExpansions("expanded")
			n.fails(expandOnNode, "INTERNAL")
			n.expandElsewhere(4 * gib)
			n.wantExpansions("refused", "controller 4", where+" 4")
			if e := n.expansion().Expansion; !e.Pending() || e.Refused != "INTERNAL" {
				t.Errorf("the status shows %+v", e)
			}
			n.script()
			n.mustExpand(4 * gib)
			n.wantExpansions("a person asks", where+" 4")
			n.wantExpanded(4 * gib)
		})
	}
}

// A stage or publish that is repeated may have made its mount before another node expanded the volume, and so may a
// mount that was lost. The volume is expanded here too.
func TestExpansionFinishedDuringAMount(t *testing.T) {
	for caps, where := range map[string]string{stages: "staging", "": "target"} {
		mounts := map[string]registry.RPC{stages: stage, "": publish}[caps]
		for what, before := range map[string]func(n *env){
			"unknown outcome": func(n *env) {
				n.script(csifake.Rule{RPC: string(mounts), When: csifake.After, Code: "ABORTED"})
				if err := n.tryUp("a1", wish{}); err == nil {
					n.t.Error("it was mounted")
				}
			},
			"lost": func(n *env) {
				n.up("a1", wish{})
				for _, path := range []string{stagingPath, targetOf("a1")} {
					n.machine.unmount(path)
				}
			},
		} {
			t.Run(string(mounts)+" "+what, func(t *testing.T) {
				inEnv(t, caps+expands, func(t *testing.T, n *env) {
					before(n)
					n.expandElsewhere(2 * gib)
					n.wantExpansions("not mounted", "controller 2")
					n.script()
					n.up("a1", wish{})
					n.wantExpansions("mounted", where+" 2")
					n.wantExpanded(2 * gib)
					n.up("a2", wish{})
					n.restart()
					n.wantExpansions("expanded")
				})
			})
		}
	}
}

// An alloc is not ready before the volume is expanded for it, even if another node has finished the expansion.
func TestNotReadyBeforeItsVolumeIsExpanded(t *testing.T) {
	inEnv(t, expands, func(t *testing.T, n *env) {
		n.up("a1", readOnly)
		n.expandElsewhere(2 * gib)
		n.wantExpansions("read-only", "controller 2")
		n.fails(expandOnNode, "UNAVAILABLE")
		if err := n.tryUp("a2", wish{}); err == nil || n.status("a2").State == registry.AllocReady {
			t.Errorf("a2 is %s: %v", n.status("a2").State, err)
		}
		n.script()
		n.up("a2", wish{})
		n.wantExpansions("writer", "target 2")
		n.wantExpanded(2 * gib)
	})
}

// The node plugin is asked only at a path with a mount. Elsewhere it would expand the file system below.
func TestNothingGrowsWhereNothingIsMounted(t *testing.T) {
	for caps, where := range map[string]string{stages: "staging", "": "target"} {
		inEnv(t, caps+expands, func(t *testing.T, n *env) {
			n.up("a1", wish{})
			for _, path := range []string{stagingPath, targetOf("a1")} {
				n.machine.unmount(path)
			}
			n.mustExpand(2 * gib)
			time.Sleep(time.Minute)
			n.wantExpansions("not mounted", "controller 2")
			n.wantPending()
			n.up("a1", wish{})
			n.wantExpansions("mounted again", where+" 2")
			n.wantExpanded(2 * gib)
		})
	}
}

// If the shim dies after the node has stored its result and before the volume has it, the next shim reports the result
// without another call, whatever happens to the volume first.
func TestNodesResultIsReportedAfterADeath(t *testing.T) {
	for what, next := range map[string]func(n *env){
		"nothing":   func(*env) { time.Sleep(time.Minute) },
		"expansion": func(n *env) { n.mustExpand(2 * gib) },
		"use":       func(n *env) { n.up("a2", wish{}) },
	} {
		for _, caps := range []string{expands, alone} {
			inEnv(t, stages+caps, func(t *testing.T, n *env) {
				n.up("a1", wish{})
				died := errors.New("died")
				volumes := controller.New(n.shim.stager.Calls, n.shim.fleet, dyingNode{n.shim.stager, died},
					hclog.NewNullLogger())
				_, err := volumes.Expand(t.Context(), registry.Call{}, v0Name,
					registry.CapacityRange{Required: 2 * gib})
				if !errors.Is(err, died) {
					t.Errorf("%s: %v", what, err)
				}
				n.wantPending()
				n.journaled()
				n.restart()
				next(n)
				n.wantExpansions(what)
				n.wantExpanded(2 * gib)
			})
		}
	}
}

// dyingNode dies after it has stored the result of an expansion.
type dyingNode struct {
	*Stager
	err error
}

func (d dyingNode) Grow(
	ctx context.Context, by intent.Caller, key registry.VolumeKey, again bool,
) (registry.NodeExpansion, error) {
	n, err := d.Stager.Grow(ctx, by, key, again)
	if err == nil && n.Done > 0 {
		err = d.err
	}
	return n, err
}
