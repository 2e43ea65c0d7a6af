package controller

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/intent"
)

// volume returns a volume that supports every pair of modes.
func volume() registry.Volume {
	v := registry.Volume{State: registry.VolumeReady, VolumeSpec: registry.VolumeSpec{
		Namespace: name.Namespace, ID: name.ID, Plugin: key.Plugin, External: key.External,
		FSType: "xfs", MountFlags: "noatime", MountGroup: "2000",
	}}
	for _, m := range registry.AccessModes {
		for _, a := range []registry.AttachmentMode{registry.FileSystem, registry.BlockDevice} {
			v.Capabilities = append(v.Capabilities, registry.VolumeCapability{Access: m, Attachment: a})
		}
	}
	return v
}

// wanted returns a claim of the alloc.
func wanted(alloc registry.AllocID, m registry.AccessMode) registry.Claim {
	return registry.Claim{
		Volume: key, Alloc: alloc, Request: "r", Node: "n1",
		Usage: registry.Usage{Access: m, Attachment: registry.FileSystem, ReadOnly: m.ReaderOnly()},
	}
}

func (d *desk) claims() (claims []registry.Claim, events []registry.Event) {
	d.view(func(v registry.View) {
		claims = v.AllClaims()
		events, _ = v.Events(0, 1000)
	})
	return claims, events
}

func TestClaimTakesOptionsFromTheVolumeAndRepeats(t *testing.T) {
	l := open(t, table{}, volume())
	first, err := l.Controller.Claim(t.Context(), wanted("a1", registry.SingleNodeWriter))
	noErr(t, "", err)
	u := first.Usage
	if u.FSType != "xfs" || u.MountFlags != "noatime" || u.MountGroup != "2000" || first.Name != name ||
		first.Since.IsZero() || first.CreateIndex == 0 {
		t.Errorf("taken: %+v", first)
	}
	again, err := l.Controller.Claim(t.Context(), wanted("a1", registry.SingleNodeWriter))
	if err != nil || again.CreateIndex != first.CreateIndex || again.Usage != first.Usage {
		t.Errorf("again: %+v, %v", again, err)
	}
	claims, events := l.claims()
	if len(claims) != 1 || claims[0].Usage != first.Usage || len(events) != 1 ||
		events[0].Kind != registry.EventClaimed {
		t.Errorf("stored: %v, %v", claims, events)
	}
}

func TestOwnMountOptionsStay(t *testing.T) {
	l := open(t, table{}, volume())
	c := wanted("a1", registry.SingleNodeWriter)
	c.Usage.FSType, c.Usage.MountFlags, c.Usage.MountGroup = "ext4", "sync", "0"
	if got, err := l.Controller.Claim(t.Context(), c); err != nil || got.Usage != c.Usage {
		t.Errorf("%+v, %v", got.Usage, err)
	}
	l = open(t, table{}, volume())
	c = wanted("a1", registry.SingleNodeWriter)
	c.Usage.Attachment = registry.BlockDevice
	if got, err := l.Controller.Claim(t.Context(), c); err != nil || got.Usage != c.Usage {
		t.Errorf("a block device has mount options: %+v, %v", got.Usage, err)
	}
}

func TestConflictNamesTheHolder(t *testing.T) {
	l := open(t, table{}, volume())
	noErr(t, "", errOf(l.Controller.Claim(t.Context(), wanted("a1", registry.SingleNodeWriter))))
	_, err := l.Controller.Claim(t.Context(), wanted("a2", registry.SingleNodeWriter))
	if !errors.Is(err, registry.ErrConflict) {
		t.Fatalf("%v", err)
	}
	for _, part := range []string{"data", "alloc a1", "node n1", "single-node-writer", "since 20",
		"one user at a time"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not in: %v", part, err)
		}
	}
}

func TestClaimIsRefusedWithTheReason(t *testing.T) {
	deleting, creating, narrow := volume(), volume(), volume()
	deleting.State, creating.State = registry.VolumeDeleting, registry.VolumeCreating
	narrow.Capabilities = []registry.VolumeCapability{{Access: registry.MultiNodeReaderOnly,
		Attachment: registry.FileSystem}}
	ok := wanted("a1", registry.SingleNodeWriter)
	anonymous, homeless, held := ok, ok, ok
	anonymous.Alloc, homeless.Node, held.Usage.ReadOnly = "", "", true
	for _, c := range []struct {
		name    string
		records []registry.Record
		claim   registry.Claim
		kind    error
		says    string
	}{
		{"no volume", nil, ok, registry.ErrNotFound, "create or register"},
		{"being deleted", []registry.Record{deleting}, ok, registry.ErrConflict, "deleting"},
		{"being created", []registry.Record{creating}, ok, registry.ErrConflict, "creating"},
		{"other capability", []registry.Record{narrow}, ok, registry.ErrUnsupported,
			"multi-node-reader-only as file-system"},
		{"no alloc", []registry.Record{volume()}, anonymous, registry.ErrInvalid, "alloc"},
		{"no node", []registry.Record{volume()}, homeless, registry.ErrInvalid, "node"},
		{"another usage", []registry.Record{volume(), held}, ok, registry.ErrConflict, "with another usage"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := open(t, table{}, c.records...)
			before, _ := l.claims()
			_, err := l.Controller.Claim(t.Context(), c.claim)
			wantErr(t, "", err, c.kind, c.says)
			if after, events := l.claims(); !slices.Equal(after, before) || len(events) != 0 {
				t.Errorf("stored: %v, %v", after, events)
			}
		})
	}
}

// The last claim of a node is kept until the volume is detached from it.
func TestClaimKeptUntilDetached(t *testing.T) {
	l := open(t, table{}, volume())
	c, err := l.Controller.Claim(t.Context(), wanted("a1", registry.SingleNodeWriter))
	noErr(t, "", err)
	at := registry.Attachment{Volume: key, Node: "n1", NodeID: "i-1", State: registry.MarkSent}
	l.put(at)
	for says, last := range map[string]bool{"attached": true, "last user": false} {
		existed, err := l.Controller.Unclaim(t.Context(), c.ClaimKey(), last)
		if existed || !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(), says) {
			t.Errorf("released %v: %v", existed, err)
		}
		if claims, _ := l.claims(); len(claims) != 1 {
			t.Fatal("the claim is gone")
		}
	}
	l.drop(at.Key())
	if existed, err := l.Controller.Unclaim(t.Context(), c.ClaimKey(), true); !existed || err != nil {
		t.Errorf("%v, %v", existed, err)
	}
	if existed, err := l.Controller.Unclaim(t.Context(), c.ClaimKey(), true); existed || err != nil {
		t.Errorf("again: %v, %v", existed, err)
	}
	if claims, events := l.claims(); len(claims) != 0 || events[len(events)-1].Kind != registry.EventReleased {
		t.Errorf("%v, %v", claims, events)
	}
}

// If a node has two users, the first one may leave while the volume stays attached for the second. A user on another
// node does not count.
func TestOnlyTheLastUserWaitsForDetach(t *testing.T) {
	l := open(t, table{}, volume())
	far := wanted("a3", registry.MultiNodeMultiWriter)
	far.Node = "n2"
	for _, c := range []registry.Claim{wanted("a1", registry.MultiNodeMultiWriter),
		wanted("a2", registry.MultiNodeMultiWriter), far} {
		noErr(t, "", errOf(l.Controller.Claim(t.Context(), c)))
	}
	l.put(registry.Attachment{Volume: key, Node: "n1", State: registry.MarkDone})
	if existed, err := l.Controller.Unclaim(t.Context(), wanted("a1", "").ClaimKey(), false); !existed || err != nil {
		t.Errorf("%v, %v", existed, err)
	}
	_, err := l.Controller.Unclaim(t.Context(), wanted("a2", "").ClaimKey(), true)
	wantErr(t, "", err, registry.ErrConflict, "")
}

// After any sequence of claims and releases, with a reopen after each step, no two stored claims exclude each other,
// and the answers match the stored claims.
func TestModelOfClaims(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		log := registrytest.NewLog(time.Now)
		_, err := log.Commit(context.Background(), func(registry.View) (registry.Change, error) {
			return registry.Change{Put: []registry.Record{volume()}}, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		held := map[registry.ClaimKey]registry.Claim{}
		modes := rapid.SliceOfN(rapid.SampledFrom(registry.AccessModes), 1, 2).Draw(t, "modes")
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			calls := intent.Calls{Sender: intent.Sender{State: log, Now: time.Now}, Plugins: table{}}
			l := desk{Controller: &Controller{Claims: NewClaims(calls)}}
			c := anyClaim().Draw(t, "claim")
			c.Volume, c.Request = key, "r"
			c.Alloc = rapid.SampledFrom([]registry.AllocID{"a1", "a2", "a3", "a4"}).Draw(t, "alloc")
			c.Usage.Access = rapid.SampledFrom(modes).Draw(t, "mode")
			if rapid.IntRange(0, 2).Draw(t, "release") == 0 {
				_, was := held[c.ClaimKey()]
				existed, err := l.Controller.Unclaim(context.Background(), c.ClaimKey(), true)
				if err != nil || existed != was {
					t.Fatalf("release: %v, %v; held: %v", existed, err, was)
				}
				delete(held, c.ClaimKey())
			} else if got, err := l.Controller.Claim(context.Background(), c); err == nil {
				held[c.ClaimKey()] = got
			}
			log = log.Reopen()
			checkClaims(t, log, held)
		}
	})
}

func checkClaims(t *rapid.T, log registry.State, held map[registry.ClaimKey]registry.Claim) {
	var claims []registry.Claim
	_ = log.View(context.Background(), func(v registry.View) error { claims = v.AllClaims(); return nil })
	if len(claims) != len(held) {
		t.Fatalf("%d claims stored, %d granted", len(claims), len(held))
	}
	for i, a := range claims {
		if h := held[a.ClaimKey()]; h.Usage != a.Usage || h.Node != a.Node {
			t.Fatalf("stored %+v, granted %+v", a, h)
		}
		for _, b := range claims[:i] {
			writers := 0
			for _, u := range []registry.Usage{a.Usage, b.Usage} {
				if !u.ReadOnly {
					writers++
				}
			}
			exclusive := a.Usage.Access == registry.SingleNodeWriter ||
				a.Usage.Access == registry.SingleNodeReaderOnly || a.Usage.Access == registry.SingleNodeSingleWriter
			switch {
			case a.Usage.Access != b.Usage.Access, exclusive, a.Usage.Access == registry.MultiNodeSingleWriter &&
				writers > 1,
				a.Usage.Access == registry.SingleNodeMultiWriter && a.Node != b.Node:
				t.Fatalf("held together: %+v and %+v", a, b)
			}
		}
	}
}
