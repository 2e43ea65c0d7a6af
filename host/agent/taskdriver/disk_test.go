package taskdriver

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/registry"
)

// disk is a block device over a file, as a plugin has published it: what is in the file is the oracle.
type disk struct {
	image  string
	dev    string // the loop device
	target string // where the plugin shows it
	number string // as the cgroup's files have it: 7:3
}

// publishes are the two ways that the CSI specification gives a plugin.
var publishes = map[string]func(dev, target string) error{
	"bind": func(dev, target string) error {
		if err := os.WriteFile(target, nil, 0o600); err != nil {
			return err
		}
		return unix.Mount(dev, target, "", unix.MS_BIND, "")
	},
	"node": func(dev, target string) error {
		var st unix.Stat_t
		if err := unix.Stat(dev, &st); err != nil {
			return err
		}
		return unix.Mknod(target, unix.S_IFBLK|0o600, int(st.Rdev))
	},
}

// newDisk skips where no loop device can be had at all: without root, or in a user namespace.
func newDisk(t *testing.T, how string) disk {
	t.Helper()
	needMounts(t)
	if os.Getuid() != 0 || os.Getenv(roleEnv) == inside {
		t.Skip("only root of the machine sets up loop devices")
	}
	dir := tempDir(t)
	d := disk{image: dir + "/image", target: dir + "/target"}
	if err := os.WriteFile(d.image, bytes.Repeat([]byte("of-the-host-----"), 1<<16), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("losetup", "--find", "--show", d.image).CombinedOutput()
	if err != nil {
		t.Fatalf("losetup: %v: %s", err, out)
	}
	d.dev = strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "--detach", d.dev).CombinedOutput(); err != nil {
			t.Errorf("losetup: %v: %s", err, out)
		}
	})
	if err := publishes[how](d.dev, d.target); err != nil {
		t.Fatal(err)
	}
	d.number = "7:" + strings.TrimPrefix(d.dev, "/dev/loop")
	return d
}

// begins is what the image begins with: 16 bytes, or what was written over them.
func (d disk) begins(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(d.image)
	if err != nil || len(b) < 16 {
		t.Fatalf("the image: %d bytes, %v", len(b), err)
	}
	return strings.Trim(string(b[:16]), "\x00\n")
}

// asShimMakesIt is the plan of a task that mounts the disk as /dev/data.
func (d disk) asShimMakesIt(t *testing.T, isolated, readOnly bool) hooks.Plan {
	t.Helper()
	use := registry.Usage{Access: registry.SingleNodeWriter, Attachment: registry.BlockDevice}
	n, err := mount.NumberOf(d.target)
	if err != nil {
		t.Fatal(err)
	}
	plans, err := hooks.Mounts(hooks.GroupSpec{
		Volumes: []hooks.VolumeRequest{{Name: "data", Usage: use}},
		Mounts:  map[string][]hooks.VolumeMount{"t": {{Volume: "data", Destination: "/dev/data", ReadOnly: readOnly}}},
	}, map[registry.RequestName]hooks.Published{
		"data": {Target: registry.Tree{Host: d.target}, Usage: use, Device: hooks.DeviceNumber{Major: int64(n.Major), Minor: int64(n.Minor)}},
	}, map[string]bool{"t": isolated})
	if err != nil {
		t.Fatal(err)
	}
	return plans["t"]
}

// tools are what the scripts of these tests use: each says what happened, and the test reads that.
const tools = `
	try() { what=$1; shift; if "$@" 2> /local/why; then echo "$what: yes"; else echo "$what: no, $(sed 's/.*: //' /local/why)"; fi; }
	reads() { dd if="$1" of=/dev/null bs=512 count=1 status=none; }
	opens() { true 3<> "$1"; }
	writes() { echo "$2" | dd of="$1" bs=16 count=1 conv=notrunc,sync,fsync status=none; }
	own() { mkdir "/local/$1"; mount -t tmpfs own "/local/$1"; mknod "/local/$1/node" $2 ${3%:*} ${3#*:}; }
`

func said(t *testing.T, out string, want ...string) {
	t.Helper()
	if got := strings.TrimSpace(out); got != strings.Join(want, "\n") {
		t.Errorf("the task says\n%s\nwant\n%s", got, strings.Join(want, "\n"))
	}
}
