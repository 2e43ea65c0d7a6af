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

// The whole matrix for two users of one mode, written by hand: which of (writer, writer), (writer, reader), (reader,
// reader) may be together on one node and on two.
func TestMatrix(t *testing.T) {
	want := map[registry.AccessMode]string{ //   one node: WW WR RR, two nodes: WW WR RR
		registry.SingleNodeWriter:       "no no no  no no no",
		registry.SingleNodeReaderOnly:   "-  -  no  -  -  no",
		registry.SingleNodeSingleWriter: "no no no  no no no",
		registry.SingleNodeMultiWriter:  "ok ok ok  no no no",
		registry.MultiNodeReaderOnly:    "-  -  ok  -  -  ok",
		registry.MultiNodeSingleWriter:  "no ok ok  no ok ok",
		registry.MultiNodeMultiWriter:   "ok ok ok  ok ok ok",
	}
	for _, mode := range registry.AccessModes {
		var got []string
		for _, node := range []registry.NodeName{"n1", "n2"} {
			for _, readers := range [][2]bool{{false, false}, {false, true}, {true, true}} {
				a, b := claimOf(mode, registry.FileSystem, readers[0], "n1"), claimOf(mode, registry.FileSystem, readers[1],
					node)
				switch {
				case Check(a.Usage) != nil || Check(b.Usage) != nil:
					got = append(got, "-")
				case Compatible(a, b) == "":
					got = append(got, "ok")
				default:
					got = append(got, "no")
				}
			}
		}
		if want := strings.Join(strings.Fields(want[mode]), " "); strings.Join(got, " ") != want {
			t.Errorf("%s: %s, want %s", mode, strings.Join(got, " "), want)
		}
	}
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
		if err := Check(u); !errors.Is(err, registry.ErrInvalid) {
			t.Errorf("%s: %v", u, err)
		}
	}
}

// Two users of one volume do not change the owner of its files in turn.
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
