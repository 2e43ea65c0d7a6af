package controller

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"holdfast/registry"
)

func TestAttachAndDetach(t *testing.T) {
	d := open(t, of(registry.AttachDetach), ready(), claimed())
	d.publish = map[string]string{"device": "/dev/x"}
	for range 2 { // the second attach finds the volume attached
		noErr(t, "", d.Controller.Attach(t.Context(), by, ready(), usage(), here("i-1")))
		d.crash()
	}
	d.expect("ControllerPublishVolume vol-data i-1")
	p := d.attachment()
	if p.State != registry.MarkDone || p.NodeID != "i-1" || !maps.Equal(p.PublishContext, d.publish) ||
		p.Usage != usage() {
		t.Errorf("%+v", p)
	}
	noErr(t, "", d.Controller.Detach(t.Context(), by, key, "n1"))
	d.expect("ControllerUnpublishVolume vol-data i-1")
	if p := d.attachment(); p.State != registry.MarkNone || len(d.attached) != 0 {
		t.Errorf("%+v, %v", p, d.attached)
	}
	noErr(t, "", d.Controller.Detach(t.Context(), by, key, "n1"))
	d.expect()
	if kinds := d.kinds(); !slices.Equal(kinds, []registry.EventKind{registry.EventAttached, registry.EventDetached}) {
		t.Errorf("events %v", kinds)
	}
	if want := []string{"ControllerPublishVolume " + canary, "ControllerUnpublishVolume " +
		canary}; !slices.Equal(d.plugin.secrets, want) {
		t.Errorf("secrets were sent with %q", d.plugin.secrets)
	}
}

func TestAttachOnlyIfThePluginAttaches(t *testing.T) {
	node := with()
	node.Role = registry.RoleNode
	for what, plugins := range map[string]table{"a controller that does not": of(registry.CreateDelete),
		"no controller": {registry.RoleNode: node}} {
		v := ready()
		v.Created = false
		d := open(t, plugins, v, claimed())
		noErr(t, what, d.Controller.Attach(t.Context(), by, v, usage(), here("")))
		noErr(t, what, d.Controller.Detach(t.Context(), by, key, "n1"))
		d.expect()
	}
}

func TestAttachReadOnly(t *testing.T) {
	reading := registry.Usage{Access: registry.MultiNodeReaderOnly, Attachment: registry.FileSystem, ReadOnly: true}
	writing := registry.Usage{Access: registry.MultiNodeMultiWriter, Attachment: registry.FileSystem, ReadOnly: true}
	for _, c := range []struct {
		name  string
		usage registry.Usage
		caps  []registry.Capability
		want  bool
	}{
		{"a reader's mode", reading, []registry.Capability{registry.AttachDetach, registry.AttachReadOnly}, true},
		{"not announced", reading, []registry.Capability{registry.AttachDetach}, false},
		{"a reader among writers", writing, []registry.Capability{registry.AttachDetach, registry.AttachReadOnly},
			false},
	} {
		d := open(t, of(c.caps...), ready(), claimed())
		if err := d.Controller.Attach(t.Context(), by, ready(), c.usage, here("i-1")); err != nil ||
			d.last.attach.Usage.ReadOnly != c.want {
			t.Errorf("%s: %+v, %v", c.name, d.last.attach.Usage, err)
		}
		if err := d.Controller.Attach(t.Context(), by, ready(), c.usage, here("i-1")); err != nil ||
			len(d.journal) != 1 {
			t.Errorf("%s, again: %v, %v", c.name, d.journal, err)
		}
	}
}

func TestAttachRefuses(t *testing.T) {
	there := registry.Attachment{Volume: key, Name: name, Node: "n1", NodeID: "i-9", State: registry.MarkDone,
		Usage: usage()}
	other := there
	other.NodeID, other.Usage.FSType = "i-1", "xfs"
	for _, c := range []struct {
		name    string
		records []registry.Record
		node    registry.NodeID
		kind    error
		says    string
	}{
		{"no claim", []registry.Record{ready()}, "i-1", registry.ErrConflict, "no claim"},
		{"no node id", []registry.Record{ready(), claimed()}, "", registry.ErrInvalid, "did not report"},
		{"another node", []registry.Record{ready(), claimed(), there}, "i-1", registry.ErrConflict, "i-9"},
		{"another usage", []registry.Record{ready(), claimed(), other}, "i-1", registry.ErrConflict, "another usage"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := open(t, of(registry.AttachDetach), c.records...)
			err := d.Controller.Attach(t.Context(), by, ready(), usage(), here(c.node))
			wantErr(t, "", err, c.kind, c.says)
			d.expect()
		})
	}
}

// Whatever the outcome of an attach, it is undone on the node that was recorded before it was sent.
func TestAttachIsUndoneWhateverItsOutcome(t *testing.T) {
	for _, f := range []fault{failed("INVALID_ARGUMENT"), uncertain("ALREADY_EXISTS", true),
		uncertain("ALREADY_EXISTS", false)} {
		d := open(t, of(registry.AttachDetach), ready(), claimed())
		d.faults = []fault{f}
		if err := d.Controller.Attach(t.Context(), by, ready(), usage(), here("i-1")); err == nil {
			t.Error("no error")
		}
		d.crash()
		// The restarted plugin no longer declares that it attaches. The record decides.
		d.use(of())
		noErr(t, "", d.Controller.Detach(t.Context(), by, key, "n1"))
		d.expect("ControllerPublishVolume vol-data i-1", "ControllerUnpublishVolume vol-data i-1")
		if len(d.attached) != 0 || d.attachment().State != registry.MarkNone {
			t.Errorf("%v, %+v", d.attached, d.attachment())
		}
	}
}

func TestLargePublishContextIsRefused(t *testing.T) {
	d := open(t, of(registry.AttachDetach), ready(), claimed())
	d.publish = map[string]string{"k": strings.Repeat("x", maxMap)}
	wantErr(t, "", d.Controller.Attach(t.Context(), by, ready(), usage(), here("i-1")), registry.ErrInternal, "")
	if p := d.attachment(); p.State != registry.MarkSent || p.PublishContext != nil {
		t.Errorf("%+v", p)
	}
}

// A detach without the node's id is not sent, because it would detach the volume from all nodes.
func TestDetachNeedsTheRecordedNode(t *testing.T) {
	nowhere := registry.Attachment{Volume: key, Name: name, Node: "n1", State: registry.MarkDone, Usage: usage()}
	d := open(t, of(registry.AttachDetach), nowhere, ready(), claimed())
	wantErr(t, "", d.Controller.Detach(t.Context(), by, key, "n1"), registry.ErrDamaged, "")
	d.expect()
	if d.attachment().State != registry.MarkDone {
		t.Errorf("%+v", d.attachment())
	}
}

func TestDetachNotFoundIsNotSuccess(t *testing.T) {
	d := open(t, of(registry.AttachDetach), ready(), claimed())
	noErr(t, "", d.Controller.Attach(t.Context(), by, ready(), usage(), here("i-1")))
	d.faults = []fault{failed("NOT_FOUND")}
	if err := d.Controller.Detach(t.Context(), by, key, "n1"); err == nil {
		t.Error("the spec wants the caller to verify, not to assume")
	}
	if p := d.attachment(); p.State != registry.MarkSent || p.NodeID != "i-1" {
		t.Errorf("%+v", p)
	}
}
