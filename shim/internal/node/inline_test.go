package node

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"holdfast/config"
	"holdfast/hooks"
	"holdfast/registry"
)

// inlineGroup is an alloc with an inline volume.
func inlineGroup(t *testing.T, alloc registry.AllocID) hooks.AllocGroup {
	t.Helper()
	job, diags := config.ParseJob(config.Source{Name: "j.hcl", Text: []byte(`
job "j" {
  group "g" {
    volume "scratch" {
      type = "csi"
      ephemeral { plugin_id = "p" }
    }
    task "t" {
      driver = "exec"
      volume_mount {
        volume      = "scratch"
        destination = "/scratch"
      }
    }
  }
}`)}, config.Options{})
	if err := diags.Err(); err != nil {
		t.Fatal(err)
	}
	return hooks.AllocGroup{Alloc: alloc, Namespace: "default", Sealed: job.Groups[0].Sealed,
		Isolated: map[string]bool{"t": true}}
}

// A volume that somebody has registered is never taken for an inline one, whatever it is called.
func TestInlineVolumeIsNobodyElses(t *testing.T) {
	p := newParts(t)
	p.volume("scratch@alloc-1")
	a, end := p.allocs()
	defer end()
	if _, err := a.Prepare(t.Context(), registry.Call{}, inlineGroup(t, "alloc-1")); !errors.Is(err,
		registry.ErrConflict) {
		t.Errorf("%v", err)
	}
	expect(t, p.said())
	if err := a.Release(t.Context(), registry.Call{}, "alloc-1"); err != nil {
		t.Fatal(err)
	}
	expect(t, p.volumes(), "scratch@alloc-1")
}

// An inline volume goes with its alloc, also one that was recorded and not claimed, and one that the alloc's group does
// not name now.
func TestInlineVolumesGoWithTheirAlloc(t *testing.T) {
	for _, what := range []string{"published", "recorded only", "unreadable"} {
		t.Run(what, func(t *testing.T) {
			p := newParts(t)
			p.volume("shared")
			a, end := p.allocs()
			defer end()
			g := inlineGroup(t, "alloc-1")
			if what == "published" {
				if _, err := a.Prepare(t.Context(), registry.Call{}, g); err != nil {
					t.Fatal(err)
				}
			} else {
				spec, err := config.OpenGroup(g.Sealed)
				if err != nil {
					t.Fatal(err)
				}
				al := registry.Alloc{ID: g.Alloc, Namespace: g.Namespace, Sealed: g.Sealed,
					State: registry.AllocPreparing}
				if what == "unreadable" {
					al.Sealed = []byte("?")
				}
				if err := p.commit([]registry.Record{al, inlineVolume(g, spec.Volumes[0])}); err != nil {
					t.Fatal(err)
				}
			}
			expect(t, p.volumes(), "scratch@alloc-1", "shared")
			if err := a.Release(t.Context(), registry.Call{}, "alloc-1"); err != nil {
				t.Fatal(err)
			}
			expect(t, p.volumes(), "shared")
		})
	}
}

func (p *parts) volumes() (names []string) {
	err := p.log.View(p.t.Context(), func(v registry.View) error {
		for _, vol := range v.Volumes() {
			names = append(names, fmt.Sprint(vol.ID))
		}
		return nil
	})
	if err != nil {
		p.t.Error(err)
	}
	slices.Sort(names)
	return names
}
