package node

import (
	"errors"
	"slices"
	"testing"

	"holdfast/config"
	"holdfast/hooks"
	"holdfast/registry"
)

const partsJob = `
job "j" {
  group "g" {
    volume "a" {
      type            = "csi"
      source          = "a"
      access_mode     = "multi-node-multi-writer"
      attachment_mode = "file-system"
    }

    task "t" {
      driver = "exec"

      volume_mount {
        volume      = "a"
        destination = "/own"
        sub_path    = "allocs/${NOMAD_ALLOC_ID}-${NOMAD_ALLOC_INDEX}"
      }

      volume_mount {
        volume      = "a"
        destination = "/tools"
        sub_path    = "tools"
        read_only   = true
      }

      volume_mount {
        volume      = "a"
        destination = "/tools-too"
        sub_path    = "tools"
        read_only   = true
      }
    }
  }
}
`

// Parts come after the publish, each once, with the alloc's own references resolved; the plan has them and nothing else
// of the volume.
func TestPartsFollowThePublish(t *testing.T) {
	p := newParts(t)
	p.volume("a")
	a, end := p.allocs()
	defer end()
	job, diags := config.ParseJob(config.Source{Name: "j.hcl", Text: []byte(partsJob)}, config.Options{})
	if err := diags.Err(); err != nil {
		t.Fatal(err)
	}
	g := hooks.AllocGroup{
		Alloc: "alloc-1", Namespace: "default", Index: 7, Sealed: job.Groups[0].Sealed,
		Isolated: map[string]bool{"t": true},
	}
	p.fail["mount-part"] = 1
	if _, err := a.Prepare(t.Context(), registry.Call{}, g); !errors.Is(err, registry.ErrUnavailable) {
		t.Fatalf("%v", err)
	}
	st, _, err := a.Status(t.Context(), "alloc-1")
	if err != nil || len(st) != 1 || len(st[0].Waiting) != 1 || st[0].Waiting[0].Step != registry.StepPublish {
		t.Errorf("it waits for %+v, %v", st, err)
	}
	from := len(p.said())
	plans, err := a.Prepare(t.Context(), registry.Call{}, g)
	if err != nil {
		t.Fatal(err)
	}
	expect(t, p.said()[from:], "claim a alloc-1", "attach x-a n1", "stage x-a", "publish x-a alloc-1",
		"mount-part allocs/alloc-1-7 of x-a, read-only false", "mount-part tools of x-a, read-only true")
	want := []hooks.Bind{
		{Source: "/part/allocs/alloc-1-7", Target: "/own", Propagation: hooks.Private},
		{Source: "/part/tools", Target: "/tools", ReadOnly: true, Propagation: hooks.Private},
		{Source: "/part/tools", Target: "/tools-too", ReadOnly: true, Propagation: hooks.Private},
	}
	if got := plans["t"].Binds; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if err := a.Release(t.Context(), registry.Call{}, "alloc-1"); err != nil {
		t.Fatal(err)
	}
}
