package mount

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

func TestAtResolvesEscapes(t *testing.T) {
	dir := tempDir(t)
	for _, name := range []string{"with space", "with\ttab", "with\nnewline", `with\backslash`, `with\040octal`,
		"with#hash", "ümlaut"} {
		at := mkdir(t, dir, name)
		mountTmpfs(t, at)
		m, found, err := At(at)
		if err != nil || !found || m.Point != at || m.FSType != "tmpfs" || m.Source != "test" {
			t.Errorf("At(%q) = %+v, %t, %v", at, m, found, err)
		}
		if _, found, _ := At(at + "/below"); found {
			t.Errorf("At(%q/below) found a mount", at)
		}
	}
	ms, err := Below(dir)
	if err != nil || len(ms) != len(raw(t, dir)) || len(ms) != 7 {
		t.Errorf("Below = %v, %v, the kernel says %q", ms, err, raw(t, dir))
	}
}

func TestAtSeesTheTopOfAStack(t *testing.T) {
	dir := tempDir(t)
	mountTmpfs(t, dir)
	must(t, unix.Mount("second", dir, "tmpfs", unix.MS_RDONLY, ""))
	if m, found, err := At(dir); err != nil || !found || m.Source != "second" || !m.ReadOnly() {
		t.Errorf("At = %v, %t, %v", m, found, err)
	}
	ms, _ := Table(os.Getpid())
	if stack := ms.Stack(dir); len(stack) != 2 {
		t.Errorf("Stack = %v", stack)
	}
}

func TestAtDoesNotSeeWhatIsHidden(t *testing.T) {
	dir := tempDir(t)
	mountTmpfs(t, mkdir(t, dir, "a"))
	mountTmpfs(t, dir)
	if m, found, err := At(dir + "/a"); err != nil || found {
		t.Errorf("At = %v, %t, %v; a mount at the parent hides it", m, found, err)
	}
	ms, _ := Below(dir)
	if len(ms.Stack(dir+"/a")) != 1 || len(ms) != 2 {
		t.Errorf("Below = %v", ms)
	}
	must(t, unix.Unmount(dir, 0))
	if _, found, _ := At(dir + "/a"); !found {
		t.Error("At does not see it once it is uncovered")
	}
}

func TestBelowIsByElements(t *testing.T) {
	dir := tempDir(t)
	mountTmpfs(t, mkdir(t, dir, "vol"))
	mountTmpfs(t, mkdir(t, dir, "vol-2"))
	if ms, err := Below(dir + "/vol"); err != nil || len(ms) != 1 {
		t.Errorf("Below = %v, %v", ms, err)
	}
}

// The order of the lines says nothing about what is on top: the parents do.
func TestTableReadsWhatOthersWrote(t *testing.T) {
	text := strings.Join([]string{
		`31 30 0:44 /deep//deleted /mnt/x\040y rw,nosuid shared:7 master:3 propagate_from:2 unbindable - fuse.some\011thing a\134b rw,size=4k`,
		`30 21 8:1 / / rw - ext4 /dev/root rw`,
		`40 30 0:50 / /mnt rw - tmpfs upper rw`,
		`35 30 0:51 / /srv ro master:9 - tmpfs none rw`,
		`36 37 0:52 / /srv rw shared:4 - tmpfs top rw`,
		`37 35 0:53 / /srv rw - tmpfs middle rw`,
	}, "\n")
	infos, err := mountinfo.GetMountsFromReader(strings.NewReader(text), nil)
	must(t, err)
	ms := mountsOf(infos)
	want := Mount{
		ID: 31, Parent: 30, Major: 0, Minor: 44, Root: "/deep//deleted", Point: "/mnt/x y", FSType: "fuse.some\tthing",
		Source: `a\b`,
		Flags:  "rw,nosuid", Super: "rw,size=4k", Group: 7, Master: 3,
	}
	if ms[0] != want || ms[0].Propagation() != "shared and slave" {
		t.Errorf("got %+v, want %+v", ms[0], want)
	}
	if m, found := ms.At("/srv"); !found || m.Source != "top" {
		t.Errorf("At(/srv) = %v, %t", m, found)
	}
	if m, found := ms.At("/mnt/x y"); found {
		t.Errorf("At(/mnt/x y) = %v, it is hidden by /mnt", m)
	}
	if m, found := ms.At("/"); !found || m.ID != 30 {
		t.Errorf("At(/) = %v, %t", m, found)
	}
	if m, found := ms.Holding("/srv/deep/file"); !found || m.Source != "top" {
		t.Errorf("Holding = %v, %t", m, found)
	}
	if _, found := ms.At("srv"); found {
		t.Error("At takes a relative path")
	}
	var got []string
	for _, m := range ms {
		got = append(got, m.Propagation())
	}
	if !slices.Equal(got[1:], []string{"private", "private", "slave", "shared", "private"}) {
		t.Errorf("propagations: %q", got)
	}
}
