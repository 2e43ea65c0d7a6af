package mount

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// The node has its own mode and owner, and nodev of the host's mount has no effect on it.
func TestSpaceHasItsOwnDeviceNodes(t *testing.T) {
	if os.Getenv(inside) != "" {
		t.Skip("a user namespace makes no nodes; TestDevicesAreBoundWhereNoNodeCanBeMade runs there")
	}
	dir := tempDir(t)
	must(t, unix.Mount("nodev", dir, "tmpfs", unix.MS_NODEV, "size=64k"))
	source := dir + "/zero"
	err := errors.Join(unix.Mknod(source, unix.S_IFCHR, int(unix.Mkdev(1, 5))), unix.Chmod(source, 0o660),
		unix.Chown(source, 0, 6))
	must(t, err)
	if _, err := os.Open(source); !errors.Is(err, unix.EACCES) {
		t.Fatalf("the source can be opened: %v", err)
	}
	scratch := mkdir(t, tempDir(t), "scratch")
	out := sh(t, Space{Scratch: scratch, Layers: []Layer{
		Device{Source: source, Target: "/dev/mine/zero", UID: 1234},
		Device{Source: source, Target: "/data/zero", ReadOnly: true},
	}}, `
		stat -c "%F %t:%T %a %u:%g" /dev/mine/zero /data/zero
		head -c 2 /dev/mine/zero | od -An -tx1
		chmod 600 /dev/mine/zero
		grep -c " `+scratch+` " /proc/self/mountinfo || true`)
	if out != "character special file 1:5 660 1234:6\ncharacter special file 1:5 440 0:6\n 00 00\n0\n" {
		t.Errorf("the task says %q", out)
	}
	var st unix.Stat_t
	if err := unix.Stat(source, &st); err != nil || st.Mode&0o777 != 0o660 || st.Uid != 0 {
		t.Errorf("the host's node is %o of %d, %v", st.Mode, st.Uid, err)
	}
	if names, err := os.ReadDir(scratch); err != nil || len(names) > 0 || exists(t, "/dev/mine") ||
		mentions(t, scratch) > 0 {
		t.Errorf("the host has something of it: %v, %v", names, err)
	}
}

func TestDevicesAreBoundWhereNoNodeCanBeMade(t *testing.T) {
	if os.Getenv(inside) == "" {
		t.Skip("nodes can be made here; TestMountsInAUserNamespaceOfTheTest runs this test where they cannot")
	}
	out := sh(t, Space{Layers: []Layer{
		Device{Source: "/dev/null", Target: "/dev/mine/null"},
		Device{Source: "/dev/zero", Target: "/data/zero", ReadOnly: true},
	}}, `stat -c "%t:%T" /dev/mine/null /data/zero; echo x > /dev/mine/null; if chmod 600 /data/zero; then exit 1; fi`)
	if out != "1:3\n1:5\nchmod: changing permissions of '/data/zero': Read-only file system\n" {
		t.Errorf("the task says %q", out)
	}
}

// A bound /dev/ptmx would find no terminals, because it looks for them in its own directory.
func TestTerminalsWorkBesideADeviceOfTheSpace(t *testing.T) {
	if os.Getenv(inside) != "" {
		t.Skip("a user namespace makes no nodes, and without a node there are no terminals")
	}
	f, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("the host has no terminals: %v", err)
	}
	f.Close()
	out := sh(t, Space{Layers: []Layer{Device{Source: "/dev/null", Target: "/dev/mine/null"}}}, `
		: 3<> /dev/ptmx; echo open; stat -c "%t:%T %a %u:%g" /dev/ptmx; 
		if mknod /dev/more c 1 3 2> /dev/null; then echo more; fi`)
	if want := "open\n" + sh(t, Space{}, `stat -c "%t:%T %a %u:%g" /dev/ptmx`); out != want {
		t.Errorf("the task says %q, want %q", out, want)
	}
}

func TestNumberOf(t *testing.T) {
	dir := tempDir(t)
	write(t, "", dir, "file")
	must(t, os.Symlink("/dev/full", dir+"/link"))
	for name, want := range map[string]error{"link": nil, "file": ErrNoDevice, "none": unix.ENOENT} {
		n, err := NumberOf(dir + "/" + name)
		if !errors.Is(err, want) || want == nil && n != (Number{Major: 1, Minor: 7}) {
			t.Errorf("NumberOf(%s) = %+v, %v", name, n, err)
		}
	}
}
