package mount

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// At returns the top of a stack. It does not return a mount that another mount at a parent directory hides.
func TestAtReturnsTheVisibleMount(t *testing.T) {
	dir := tempDir(t)
	mountTmpfs(t, mkdir(t, dir, "a b"))
	mountTmpfs(t, dir)
	must(t, unix.Mount("second", dir, "tmpfs", unix.MS_RDONLY, ""))
	if m, found, err := At(dir); err != nil || !found || m.Source != "second" || !m.ReadOnly() {
		t.Errorf("At = %v, %t, %v", m, found, err)
	}
	if m, found, err := At(dir + "/a b"); err != nil || found {
		t.Errorf("At of a hidden mount = %v, %t, %v", m, found, err)
	}
	ms, err := Table(os.Getpid())
	if err != nil || len(ms.Stack(dir)) != 2 || len(ms.Stack(dir+"/a b")) != 1 || len(ms.Below(dir)) != 3 {
		t.Errorf("Below = %v, %v", ms.Below(dir), err)
	}
	must(t, unix.Unmount(dir, 0))
	must(t, unix.Unmount(dir, 0))
	if m, found, _ := At(dir + "/a b"); !found || m.Point != dir+"/a b" {
		t.Errorf("At of an uncovered mount = %v, %t", m, found)
	}
}

// The order of the lines does not show which mount is on top. The parents do.
func TestTableReadsMountinfo(t *testing.T) {
	text := strings.Join([]string{
		`31 30 0:44 /deep//deleted /mnt/x\040y rw,nosuid shared:7 master:3 propagate_from:2 unbindable ` +
			`- fuse.some\011thing a\134b rw,size=4k`,
		`30 21 8:1 / / rw - ext4 /dev/root rw`,
		`40 30 0:50 / /mnt rw - tmpfs upper rw`,
		`35 30 0:51 / /srv ro master:9 - tmpfs none rw`,
		`36 37 0:52 / /srv rw shared:4 - tmpfs top rw`,
		`37 35 0:53 / /srv rw - tmpfs middle rw`,
		`38 30 0:54 / /srv-2 rw - tmpfs other rw`,
	}, "\n")
	infos, err := mountinfo.GetMountsFromReader(strings.NewReader(text), nil)
	must(t, err)
	ms := mountsOf(infos)
	want := Mount{
		ID: 31, Parent: 30, Major: 0, Minor: 44, Root: "/deep//deleted", Point: "/mnt/x y", FSType: "fuse.some\tthing",
		Source: `a\b`, Flags: "rw,nosuid", Super: "rw,size=4k", Group: 7, Master: 3,
	}
	if ms[0] != want {
		t.Errorf("got %+v, want %+v", ms[0], want)
	}
	for path, want := range map[string]string{
		"/srv": "top", "/mnt": "upper", "/mnt/x y": "", "/": "/dev/root", "srv": "", "/srv-2": "other", "/srv/deep": "",
	} {
		if m, found := ms.At(path); found != (want != "") || found && m.Source != want {
			t.Errorf("At(%s) = %v, %t, want %q", path, m, found, want)
		}
	}
	if m, found := ms.Holding("/srv/deep/file"); !found || m.Source != "top" {
		t.Errorf("Holding = %v, %t", m, found)
	}
	if below := ms.Below("/srv"); len(below) != 3 {
		t.Errorf("Below = %v", below)
	}
	var got []string
	for _, m := range ms[:5] {
		got = append(got, m.Propagation())
	}
	if !slices.Equal(got, []string{"shared and slave", "private", "private", "slave", "shared"}) {
		t.Errorf("propagations: %q", got)
	}
}
