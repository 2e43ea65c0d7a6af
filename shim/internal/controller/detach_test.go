package controller

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

// attachedTo returns an attachment of the volume to a node. The node's id at the plugin is its name with the prefix
// "i-".
func attachedTo(node registry.NodeName) registry.Attachment {
	return registry.Attachment{Volume: key, Name: name, Node: node, NodeID: registry.NodeID("i-" + node),
		State: registry.MarkDone, Usage: usage()}
}

// An attachment is taken down only with evidence that the node does not use the volume. For this node the evidence is
// in the records. For another node it is a fence or a confirmation.
func TestDetachNeedsEvidence(t *testing.T) {
	unfenced := errors.New("the power switch does not answer")
	old := attachedTo("old")
	users := claimed()
	users.Node = "old"
	sent := []string{"ControllerUnpublishVolume vol-data i-old"}
	has := of(registry.AttachDetach)
	ada, sure := registry.Force{By: "ada"}, registry.Force{By: "ada", Confirm: "data"}
	type records = []registry.Record
	own, foreign, no := records{attachedTo("n1")}, records{old}, registry.ErrUnsupported
	for what, c := range map[string]struct {
		records records
		plugins table
		fence   error // the result of the fence
		force   registry.Force
		local   local
		err     error
		says    string
		calls   []string
		kind    registry.EventKind // the kind of the last event
	}{
		"this node": {own, has, no, ada, local{}, nil, "", []string{"ControllerUnpublishVolume vol-data i-n1"},
			registry.EventDetached},
		"this node, in use": {own, has, nil, sure, local{uses: []string{"staged at /s"}}, registry.ErrConflict,
			"staged at /s", nil, ""},
		"nothing": {nil, has, nil, ada, local{}, registry.ErrNotFound, "not attached", nil, ""},
		"no operator": {foreign, has, nil, registry.Force{Confirm: "data"}, local{},
			registry.ErrInvalid, "operator", nil, ""},
		"fenced": {foreign, has, nil, ada, local{}, nil, "", sent, registry.EventDetached},
		"claimed there": {records{old, users}, has, nil, sure, local{}, registry.ErrConflict, "claimed by alloc", nil,
			""},
		"in use on one of two nodes": {
			records{attachedTo("a"), attachedTo("n1"), claimed()}, has, unfenced, sure, local{},
			registry.ErrConflict, "claimed by alloc", nil, ""},
		"the fence fails":    {foreign, has, unfenced, sure, local{}, unfenced, "fence node old", nil, ""},
		"neither":            {foreign, has, no, ada, local{}, registry.ErrDenied, "--force --confirm data", nil, ""},
		"confirmed":          {foreign, has, no, sure, local{}, nil, "", sent, registry.EventDetached},
		"the plugin is gone": {foreign, table{}, no, sure, local{}, nil, "", nil, registry.EventAbandoned},
		"only asked":         {foreign, table{}, unfenced, registry.Force{DryRun: true}, local{}, nil, "", nil, ""},
	} {
		d := open(t, c.plugins, append(c.records, ready())...)
		d.node = c.local
		d.Fence = func(context.Context, registry.NodeName) error { return c.fence }
		_, err := d.DetachVolume(t.Context(), call, name, "", c.force)
		if !errors.Is(err, c.err) || c.err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", what, err)
		}
		d.expect(c.calls...)
		d.view(func(v registry.View) {
			events, _ := v.Events(0, 100)
			last := registry.EventKind("")
			for _, e := range events {
				last = e.Kind
				if e.Kind == registry.EventForced && !strings.Contains(e.Detail, "by ada") {
					t.Errorf("%s: %s", what, e)
				}
			}
			if left := len(v.Attachments(key)); last != c.kind || (left == 0) != (c.kind != "" || c.records == nil) {
				t.Errorf("%s: %d attachments, last event %q", what, left, last)
			}
		})
	}
}

// After a crash, a detach without a certain answer is repeated as the same call. By force it is abandoned.
func TestDetachIsResumedOrAbandoned(t *testing.T) {
	force := registry.Force{By: "ada"}
	for what, confirm := range map[string]string{"resumed": "", "abandoned": "data"} {
		d := open(t, of(registry.AttachDetach), ready(), attachedTo("n1"))
		for range 100 {
			d.faults = append(d.faults, uncertain("INTERNAL", true))
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := d.DetachVolume(ctx, call, name, "n1", force); err == nil {
			t.Errorf("%s: no error", what)
		}
		d.crash()
		d.journal = nil
		if force.Confirm = confirm; confirm == "" {
			d.faults = nil
		}
		noErr(t, what, errOf(d.DetachVolume(t.Context(), call, name, "n1", force)))
		if len(d.journal) == 0 || d.journal[0] != "ControllerUnpublishVolume vol-data i-n1" {
			t.Errorf("%s: %q", what, d.journal)
		}
		d.view(func(v registry.View) {
			if len(v.Attachments(key)) > 0 || len(v.Intents()) > 0 {
				t.Errorf("%s: left %v, %v", what, v.Attachments(key), v.Intents())
			}
		})
	}
}

// A detach continues after its caller has gone, and after a crash. It ends once it has certainly ended for every
// requested node, or once the volume is used again. Another node is fenced again before each try.
func TestDetachGoesOnWithoutItsCaller(t *testing.T) {
	const own, old = "ControllerUnpublishVolume vol-data i-n1", "ControllerUnpublishVolume vol-data i-old"
	for what, c := range map[string]struct {
		confirm  string
		faults   []fault
		claim    bool // the volume is claimed before the next process starts
		unfenced int  // how often the fence fails in the next process
		calls    []string
		left     int
	}{
		"done":     {"", nil, false, 0, []string{own, own, old}, 0},
		"repeated": {"", []fault{uncertain("UNAVAILABLE", false)}, false, 0, []string{own, own, own, old}, 0},
		"refused": {"", []fault{failed("NOT_FOUND"), failed("INVALID_ARGUMENT")}, false, 0, []string{own, own, old},
			2},
		"used":           {"", nil, true, 0, []string{own}, 2}, // own comes before old
		"fenced later":   {"", nil, false, 5, []string{own, own, old}, 0},
		"never fenced":   {"", nil, false, 10000, []string{own, own}, 1},
		"confirmed":      {"data", slices.Repeat([]fault{uncertain("INTERNAL", false)}, 3), false, 0, nil, 0},
		"confirmed only": {"data", nil, false, 5, []string{own, own, old}, 0},
	} {
		runInBubble(t, what, func(t *testing.T) {
			d := open(t, of(registry.AttachDetach), ready(), attachedTo("n1"), attachedTo("old"))
			d.Fence = func(context.Context, registry.NodeName) error { return nil }
			d.faults = []fault{uncertain("DEADLINE_EXCEEDED", true)}
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			_, err := d.DetachVolume(ctx, call, name, "", registry.Force{By: "ada", Confirm: c.confirm})
			if err == nil {
				t.Error("no error")
			}
			d.crash()
			fences := 0
			d.Fence = func(context.Context, registry.NodeName) error {
				if fences++; fences <= c.unfenced {
					return errors.New("the power switch does not answer")
				}
				return nil
			}
			if d.faults = c.faults; c.claim {
				d.put(claimed())
			}
			d.runFor(time.Hour)
			if fenced := fences > c.unfenced; fenced != slices.Contains(d.journal, old) {
				t.Errorf("fenced: %t, and the calls are %q", fenced, d.journal)
			}
			if c.calls != nil {
				d.expect(c.calls...)
			}
			d.view(func(v registry.View) {
				list := v.AllAttachments()
				if len(list) != c.left || c.left == 2 && list[0].Detaching != (registry.Detaching{}) {
					t.Errorf("left: %+v, %+v", list, v.Intents())
				}
			})
		})
	}
}

// A detach waits until an open expansion of its volume has an outcome. By force it does not wait.
func TestDetachFollowsAnExpansion(t *testing.T) {
	const detach = "ControllerUnpublishVolume vol-data i-n1"
	for what, c := range map[string]struct {
		confirm string
		faults  []fault
		left    bool
	}{
		"settled": {"", nil, false}, "settled by force": {"data", nil, false},
		"unknown":          {"", slices.Repeat([]fault{uncertain("INTERNAL", false)}, 100), true},
		"unknown by force": {"data", []fault{uncertain("FAILED_PRECONDITION", false)}, false},
	} {
		runInBubble(t, what, func(t *testing.T) {
			d := open(t, of(registry.AttachDetach, registry.ControllerExpand), ready(), attachedTo("n1"))
			d.faults = slices.Repeat([]fault{uncertain("INTERNAL", false)}, 100)
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			_, err := d.Controller.Expand(ctx, call, name, registry.CapacityRange{Required: 2 << 30})
			if err == nil {
				t.Fatal("no error")
			}
			d.crash()
			d.journal, d.faults = nil, c.faults
			_, err = d.DetachVolume(t.Context(), call, name, "n1", registry.Force{By: "ada", Confirm: c.confirm})
			if len(d.journal) == 0 {
				t.Fatal(err)
			}
			last := d.journal[len(d.journal)-1]
			if (err != nil) != c.left || (last != detach) != c.left ||
				!strings.HasPrefix(d.journal[0], "ControllerExpand") {
				t.Errorf("%v, %q", err, d.journal)
			}
			d.view(func(v registry.View) {
				if left := len(v.Attachments(key)) > 0; left != c.left {
					t.Errorf("left: %v", v.Attachments(key))
				}
			})
			for _, kind := range d.kinds() {
				if kind == registry.EventAbandoned {
					t.Error("abandoned")
				}
			}
		})
	}
}

// An open call for another node is not mistaken for a call of this attachment.
func TestDetachWaitsForACallForAnotherNode(t *testing.T) {
	other := attachedTo("n1")
	other.State = registry.MarkSent
	d := open(t, of(registry.AttachDetach), ready(), other, attachedTo("old"), registry.Intent{Volume: key, Name: name,
		RPC: registry.ControllerPublishRPC, Node: "i-n1", Outcome: registry.OutcomePending, Attempt: 1})
	_, err := d.DetachVolume(t.Context(), call, name, "old", registry.Force{By: "ada", Confirm: "data"})
	wantErr(t, "", err, registry.ErrConflict, "ControllerPublishVolume")
	d.expect()
}

// While this node uses the volume, the record of its attachment stays, even by force.
func TestAttachmentInUseIsNotAbandoned(t *testing.T) {
	d := open(t, table{}, ready(), attachedTo("n1"))
	d.node = local{uses: []string{"staged at /s"}}
	err := d.DetachOrAbandon(t.Context(), intent.Caller{}, attachedTo("n1").AttachmentKey(), registry.Forced{By: "ada"})
	wantErr(t, "", err, registry.ErrConflict, "staged at /s")
	d.view(func(v registry.View) {
		if len(v.Attachments(key)) != 1 {
			t.Error("the record is gone")
		}
	})
}

// If a name was registered again, it may have attachments of two volumes. Each is detached under the lock of its
// volume.
func TestDetachLocksEachVolume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		earlier := attachedTo("n1")
		earlier.Volume.External = "vol-earlier"
		d := open(t, of(registry.AttachDetach), ready(), attachedTo("n1"), earlier)
		unlock, err := d.Locks.Lock(t.Context(), earlier.Volume, "a test")
		noErr(t, "", err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := d.DetachVolume(ctx, call, name, "", registry.Force{By: "ada"}); err == nil {
			t.Error("a volume was detached during another operation")
		}
		unlock()
		noErr(t, "", errOf(d.DetachVolume(t.Context(), call, name, "", registry.Force{By: "ada"})))
		d.expect("ControllerUnpublishVolume vol-data i-n1", "ControllerUnpublishVolume vol-earlier i-n1")
	})
}
