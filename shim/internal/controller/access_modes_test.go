package controller

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"holdfast/registry"
)

func claimOf(m registry.AccessMode, a registry.AttachmentMode, readOnly bool, node registry.NodeName) registry.Claim {
	return registry.Claim{Node: node, Usage: registry.Usage{Access: m, Attachment: a, ReadOnly: readOnly}}
}

// matrix is the whole matrix for two users with one mode, written by hand from the CSI spec
// (VolumeCapability.AccessMode). It says which of (writer, writer), (writer, reader) and (reader, reader) may use a
// volume together, on one node and on two nodes.
var matrix = map[registry.AccessMode]struct{ words, one, two string }{
	registry.SingleNodeWriter: {"Can only be published once as read/write on a single node, at any given time.",
		"no no no", "no no no"},
	registry.SingleNodeReaderOnly: {"Can only be published once as readonly on a single node, at any given time.",
		"- - no", "- - no"},
	registry.SingleNodeSingleWriter: {"Can only be published once as read/write at a single workload on a single " +
		"node, at any given time.", "no no no", "no no no"},
	registry.SingleNodeMultiWriter: {
		"Can be published as read/write at multiple workloads on a single node simultaneously.",
		"ok ok ok", "no no no"},
	registry.MultiNodeReaderOnly: {"Can be published as readonly at multiple nodes simultaneously.",
		"- - ok", "- - ok"},
	registry.MultiNodeSingleWriter: {"Can be published at multiple nodes simultaneously. Only one of the node can be " +
		"used as read/write. The rest will be readonly.", "no ok ok", "no ok ok"},
	registry.MultiNodeMultiWriter: {"Can be published as read/write at multiple nodes simultaneously.",
		"ok ok ok", "ok ok ok"},
}

func TestMatrix(t *testing.T) {
	attachments := []registry.AttachmentMode{registry.FileSystem, registry.BlockDevice}
	for _, mode := range registry.AccessModes {
		for node, same := range map[registry.NodeName]string{"n1": matrix[mode].one, "n2": matrix[mode].two} {
			for _, x := range attachments {
				for _, y := range attachments {
					got, want := together(mode, x, y, node), same
					if x != y { // either both as a block device or both as a file system
						want = strings.ReplaceAll(same, "ok", "no")
					}
					if got != want {
						t.Errorf("%s as %s on n1 and as %s on %s: %s, want %s: %q",
							mode, x, y, node, got, want, matrix[mode].words)
					}
				}
			}
		}
	}
}

// together returns the entry of matrix for a user on n1 and another user on node.
func together(mode registry.AccessMode, x, y registry.AttachmentMode, node registry.NodeName) string {
	var got []string
	for _, readers := range [][2]bool{{false, false}, {false, true}, {true, true}} {
		a, b := claimOf(mode, x, readers[0], "n1"), claimOf(mode, y, readers[1], node)
		switch {
		case Check(a.Usage) != nil || Check(b.Usage) != nil:
			got = append(got, "-")
		case Compatible(a, b) == "" && Compatible(b, a) == "":
			got = append(got, "ok")
		default:
			got = append(got, "no")
		}
	}
	return strings.Join(got, " ")
}

func anyClaim() *rapid.Generator[registry.Claim] {
	return rapid.Custom(func(t *rapid.T) registry.Claim {
		return registry.Claim{
			Node: rapid.SampledFrom([]registry.NodeName{"n1", "n2"}).Draw(t, "node"),
			Usage: registry.Usage{
				Access: rapid.SampledFrom(registry.AccessModes).Draw(t, "mode"),
				Attachment: rapid.SampledFrom([]registry.AttachmentMode{registry.FileSystem,
					registry.BlockDevice}).Draw(t, "attachment"),
				ReadOnly: rapid.Bool().Draw(t, "read-only"),
				FSType:   rapid.SampledFrom([]string{"", "ext4"}).Draw(t, "fs type"),
			},
		}
	})
}

func TestMatrixIsSymmetricAndSafe(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := anyClaim().Draw(t, "a"), anyClaim().Draw(t, "b")
		ab, ba := Compatible(a, b), Compatible(b, a)
		if ab != ba {
			t.Fatalf("%q one way, %q the other", ab, ba)
		}
		if ab != "" {
			return
		}
		u, v := a.Usage, b.Usage
		switch {
		case u.Access != v.Access || u.Attachment != v.Attachment:
			t.Fatal("modes are mixed")
		case a.Node != b.Node && strings.HasPrefix(string(u.Access), "single-node"):
			t.Fatal("a single-node mode is on two nodes")
		case a.Node == b.Node && u.FSType != v.FSType:
			t.Fatal("two staging mounts on one node")
		case !u.ReadOnly && !v.ReadOnly && !strings.Contains(string(u.Access), "multi-writer"):
			t.Fatal("two writers")
		}
	})
}

func TestReaderModesNeedReadOnly(t *testing.T) {
	for _, mode := range registry.AccessModes {
		err := Check(registry.Usage{Access: mode, Attachment: registry.FileSystem})
		if refused := errors.Is(err, registry.ErrInvalid); refused != mode.ReaderOnly() {
			t.Errorf("%s for writing: %v", mode, err)
		}
		if err := Check(registry.Usage{Access: mode, Attachment: registry.BlockDevice,
			ReadOnly: true}); err != nil {
			t.Errorf("%s for reading: %v", mode, err)
		}
	}
	for _, u := range []registry.Usage{{Access: "any", Attachment: registry.FileSystem},
		{Access: registry.SingleNodeWriter}} {
		wantErr(t, u.String(), Check(u), registry.ErrInvalid, "")
	}
}

// Two users of a volume cannot have different owners for its files, because they would change the owner in turn.
func TestRecursiveOwnershipsExcludeEachOther(t *testing.T) {
	own := func(owner string, recursive, readOnly bool) registry.Claim {
		c := claimOf(registry.MultiNodeMultiWriter, registry.FileSystem, readOnly, "n1")
		c.Usage.Ownership = registry.Ownership{Owner: owner, Recursive: recursive}
		return c
	}
	for what, c := range map[string]struct {
		a, b     registry.Claim
		excluded bool
	}{
		"both recursive":          {own("1", true, false), own("2", true, false), true},
		"one recursive":           {own("1", false, false), own("2", true, false), true},
		"none recursive":          {own("1", false, false), own("2", false, false), false},
		"the same":                {own("1", true, false), own("1", false, false), false},
		"one without ownership":   {own("1", true, false), own("", false, false), false},
		"one that does not write": {own("1", true, false), own("2", true, true), false},
	} {
		if ab, ba := Compatible(c.a, c.b), Compatible(c.b, c.a); ab != ba || (ab != "") != c.excluded {
			t.Errorf("%s: %q, %q", what, ab, ba)
		}
	}
}

func ExampleCompatible() {
	writer := claimOf(registry.MultiNodeSingleWriter, registry.FileSystem, false, "n1")
	reader := claimOf(registry.MultiNodeSingleWriter, registry.FileSystem, true, "n2")
	fmt.Printf("%q\n", Compatible(writer, reader))
	fmt.Printf("%q\n", Compatible(writer, writer))
	// Output:
	// ""
	// "multi-node-single-writer allows one user that writes at a time"
}
