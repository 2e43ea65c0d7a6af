package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"

	"holdfast/host"
	"holdfast/internal/csifake"
)

// partsGroup is an alloc whose task mounts four parts of a volume.
func (w *world) partsGroup(alloc, volume string) host.AllocGroup {
	w.t.Helper()
	text := fmt.Sprintf(`
job "user" {
  group "g" {
    volume "data" {
      type            = "csi"
      source          = %q
      access_mode     = "multi-node-multi-writer"
      attachment_mode = "file-system"
    }
    task "t" {
      driver = "exec"
      dynamic "volume_mount" {
        for_each = range(4)
        content {
          volume      = "data"
          destination = "/data/${volume_mount.value}"
          sub_path    = "parts/${NOMAD_ALLOC_ID}/${volume_mount.value}"
        }
      }
    }
  }
}
`, volume)
	job, _, err := w.host.Parse(w.ctx(), host.Source{Name: "user.hcl", Text: []byte(text)}, host.ParseOptions{})
	w.must(err)
	return host.AllocGroup{
		Alloc: host.AllocID(alloc), Job: "user", Group: "g", Namespace: "default", Sealed: job.Groups[0].Sealed,
		Isolated: map[string]bool{"t": true},
	}
}

// parts are the mounts of parts of volumes, by the kernel's account.
func (w *world) parts() (points []string) {
	dir := filepath.Join(w.config.StateDir, "mnt", "parts")
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	w.must(err)
	for _, m := range mounts {
		points = append(points, m.Mountpoint)
	}
	return points
}

// Killed whenever one of four parts has come or gone, whichever, the shim's successor ends what was begun: each part is mounted once, of
// the place that it is called by, and at the end nothing is left.
func TestShimKilledAmongParts(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	for kill := range 5 {
		alloc := fmt.Sprint("alloc-", kill)
		plans := make(chan map[string]host.Plan, 1)
		go func() {
			got, err := w.host.PrepareAlloc(w.ctx(), w.partsGroup(alloc, "vol"))
			if err != nil {
				t.Error(err)
			}
			plans <- got
		}()
		w.killedWhen(func() bool { return len(w.parts()) >= kill })
		binds := (<-plans)["t"].Binds
		if points := w.parts(); len(points) != 4 || len(binds) != 4 {
			t.Fatalf("killed at %d: %d are mounted, the plan has %v", kill, len(points), binds)
		}
		for i, b := range binds {
			w.must(os.WriteFile(filepath.Join(b.Source, "name"), []byte(b.Target), 0o600))
			want := fmt.Sprintf("/parts/%s/%d", alloc, i)
			info, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(b.Source))
			if err != nil || len(info) != 1 || !strings.HasSuffix(info[0].Root, want) || b.Target != fmt.Sprintf("/data/%d", i) {
				t.Errorf("%s is of %v, want %s: %v", b.Target, info, want, err)
			}
		}
		released := make(chan error, 1)
		go func() { released <- w.release(alloc) }()
		w.killedWhen(func() bool { return len(w.parts()) <= 4-kill })
		w.must(<-released)
		if points := w.parts(); len(points) > 0 {
			t.Errorf("killed at %d: left are %v", kill, points)
		}
	}
	w.must(w.delete("vol"))
	w.exit(p)
}

// killedWhen kills the shim when something is so.
func (w *world) killedWhen(is func() bool) {
	w.t.Helper()
	for end := time.Now().Add(patience); !is(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(end) {
			w.t.Fatal("waited in vain")
		}
	}
	w.killShim()
}
