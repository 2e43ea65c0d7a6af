package mount

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// sh runs a shell script in the space and returns its output.
func sh(t *testing.T, s Space, script string) string {
	t.Helper()
	out, err := try(t, s, script)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return out
}

func try(t *testing.T, s Space, script string) (string, error) {
	t.Helper()
	f, err := os.CreateTemp("", "h-out-")
	must(t, err)
	defer os.Remove(f.Name())
	defer f.Close()
	if s.Scratch == "" {
		s.Scratch = t.TempDir()
	}
	var p *os.Process
	err = s.Run(func() error {
		cmd := exec.Command("/bin/sh", "-euc", script)
		cmd.Stdout, cmd.Stderr, cmd.Dir = f, f, "/"
		defer func() { p = cmd.Process }()
		return cmd.Start()
	})
	if err != nil {
		return "", err
	}
	state, err := p.Wait()
	must(t, err)
	out, _ := os.ReadFile(f.Name())
	if !state.Success() {
		return string(out), fmt.Errorf("the script failed: %v", state)
	}
	return string(out), nil
}

func sharedDir(t *testing.T) string {
	t.Helper()
	dir := tempDir(t)
	must(t, MakeShared(dir))
	return dir
}

// mentions counts the host's mounts whose lines contain the unique name of dir.
func mentions(t *testing.T, dir string) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	n := 0
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, filepath.Base(dir)) {
			n++
		}
	}
	return n
}

func TestBidirectionalMountsStayOnTheHost(t *testing.T) {
	dir := sharedDir(t)
	root := mkdir(t, dir, "a root")
	s := Space{Layers: []Layer{Bind{Source: root, Target: "/local/csi", Propagation: Bidirectional}}}
	sh(t, s, `mkdir /local/csi/vol; mount -t tmpfs plugin /local/csi/vol; echo data > /local/csi/vol/file`)
	if b, err := os.ReadFile(root + "/vol/file"); err != nil || string(b) != "data\n" {
		t.Errorf("the host reads %q, %v", b, err)
	}
	if m, found, _ := At(root + "/vol"); !found || m.Source != "plugin" {
		t.Errorf("the host has %v, %t", m, found)
	}
	must(t, os.Symlink(root, dir+"/link"))
	s.Layers = []Layer{Bind{Source: dir + "/link", Target: "/local/csi", Propagation: Bidirectional}}
	// A later run of the task sees the mount and unmounts it, also on the host.
	sh(t, s, `grep -q data /local/csi/vol/file; umount /local/csi/vol; rmdir /local/csi/vol`)
	if points := raw(t, root); len(points) != 0 {
		t.Errorf("the host still has %q", points)
	}
}

func TestPrivateAndSlaveMountsStayInside(t *testing.T) {
	dir := sharedDir(t)
	before := mentions(t, dir)
	for _, p := range []Propagation{Private, Slave} {
		source := mkdir(t, dir, fmt.Sprint(p), "vol")
		sh(t, Space{Layers: []Layer{Bind{Source: dir + "/" + fmt.Sprint(p), Target: "/data", Propagation: p}}}, `
			mount -t tmpfs `+filepath.Base(dir)+`-inner /data/vol; echo x > /data/vol/file
			grep -q " /data/vol " /proc/self/mountinfo`)
		if exists(t, source+"/file") {
			t.Errorf("propagation %d: the host sees the task's mount", p)
		}
	}
	if after := mentions(t, dir); after != before {
		t.Errorf("the host had %d such mounts and has %d", before, after)
	}
}

// A slave bind follows the host's mounts and unmounts, and a private bind does not. The script waits at a fifo.
func TestSlaveFollowsTheHost(t *testing.T) {
	for p, follows := range map[Propagation]bool{Slave: true, Private: false} {
		dir := sharedDir(t)
		mkdir(t, dir, "new")
		mountTmpfs(t, mkdir(t, dir, "old"))
		fifos := mkdir(t, t.TempDir(), "f")
		for _, name := range []string{"ready", "go"} {
			must(t, unix.Mkfifo(fifos+"/"+name, 0o600))
		}
		out := make(chan string)
		go func() {
			binds := []Layer{Bind{Source: dir, Target: "/data", Propagation: p}, Bind{Source: fifos, Target: "/fifos"}}
			text, err := try(t, Space{Layers: binds}, `
				echo > /fifos/ready; cat /fifos/go; grep -o " /data/[a-z]* " /proc/self/mountinfo || true
				echo old in the host\'s view: $(grep -c "`+dir+`/old " /proc/self/mountinfo || true)`)
			out <- fmt.Sprint(text, err)
		}()
		if _, err := os.ReadFile(fifos + "/ready"); err != nil {
			t.Fatal(err)
		}
		mountTmpfs(t, dir+"/new")
		must(t, unix.Unmount(dir+"/old", 0))
		write(t, "", fifos, "go")
		text := <-out
		if got := strings.Contains(text, "/data/new") && !strings.Contains(text, "/data/old"); got != follows {
			t.Errorf("propagation %d: the task has %q", p, text)
		}
		// A copy that stayed in the space would keep the device busy after the host has unmounted it.
		if !strings.Contains(text, "view: 0") {
			t.Errorf("propagation %d: the host's unmount did not reach the task: %q", p, text)
		}
	}
}

func TestReadOnlyBind(t *testing.T) {
	dir := sharedDir(t)
	write(t, "kept", dir, "file")
	mountTmpfs(t, mkdir(t, dir, "sub"))
	for _, p := range []Propagation{Private, Slave, Bidirectional} {
		sh(t, Space{Layers: []Layer{Bind{Source: dir, Target: "/data", ReadOnly: true, Propagation: p}}}, `
			grep -q kept /data/file
			if echo x > /data/file; then exit 1; fi
			if touch /data/new; then exit 1; fi
			if touch /data/sub/new; then exit 1; fi`)
	}
	write(t, "the host may write", dir, "sub", "new")
}

// A target that the host lacks appears neither in the host's file system nor in its mount table.
func TestTheTasksOwnPathsNeverAppearOnTheHost(t *testing.T) {
	dir := tempDir(t)
	write(t, "in the bind", mkdir(t, dir, "src"), "file")
	view := mkdir(t, dir, "view", "inner")
	write(t, "host's", dir, "view", "inner", "there")
	only := "/" + filepath.Base(dir)
	sh(t, Space{Layers: []Layer{
		Bind{Source: dir + "/src", Target: view + "/deep/target"},
		Bind{Source: dir + "/src", Target: only + "/here"},
		Bind{Source: dir + "/src/file", Target: only + "/deep/config"},
		Dir{Path: only + "/own/dir", Mode: 0o1777},
		Tmpfs{Path: only + "/secrets", Mode: 0o700},
	}}, `
		cat `+view+`/deep/target/file `+view+`/there `+only+`/here/file `+only+`/deep/config >&2
		test "$(stat -c %a `+only+`/own/dir)" = 1777
		touch `+only+`/secrets/key
		if touch /new; then exit 1; fi
		if touch `+view+`/new; then exit 1; fi`)
	if n := mentions(t, dir); n != 0 {
		t.Errorf("the host has %d of the task's mounts", n)
	}
	for _, path := range []string{view + "/deep", only} {
		if exists(t, path) {
			t.Errorf("%s is on the host", path)
		}
	}
}

func TestLinksOfTheTaskAreNotFollowed(t *testing.T) {
	dir := tempDir(t)
	local, outside := mkdir(t, dir, "local"), mkdir(t, dir, "outside")
	must(t, os.Symlink(outside, local+"/csi"))
	_, err := try(t, Space{Layers: []Layer{Bind{Source: local, Target: "/local"},
		Dir{Path: "/local/csi/made", Mode: 0o755}}}, `true`)
	wantErr(t, err, nil, "symbolic link")
	if names, _ := os.ReadDir(outside); len(names) > 0 {
		t.Errorf("made outside: %v", names)
	}
	// The host's own links are followed: /bin is a link on most machines.
	must(t, os.Symlink(outside, dir+"/link"))
	sh(t, Space{Layers: []Layer{Tmpfs{Path: dir + "/link/inner", Mode: 0o755}}}, `touch `+outside+`/inner/file`)
	if names, _ := os.ReadDir(outside); len(names) > 0 {
		t.Errorf("made outside: %v", names)
	}
}

func TestImpossibleSpacesAreRefused(t *testing.T) {
	dir := sharedDir(t)
	private := tempDir(t)
	mountTmpfs(t, private)
	must(t, unix.Mount("", private, "", unix.MS_PRIVATE, ""))
	write(t, "", dir, "file")
	both := Bind{Source: dir, Target: "/csi", Propagation: Bidirectional}
	null := Device{Source: "/dev/null", Target: "/x"}
	for what, c := range map[string]struct {
		layers []Layer
		want   string
	}{
		"below a bidirectional bind":   {[]Layer{both, Bind{Source: private, Target: "/csi/sub"}}, "would appear on"},
		"on a bidirectional bind":      {[]Layer{both, Tmpfs{Path: "/csi"}}, "would appear on the host"},
		"bind to the root":             {[]Layer{Bind{Source: dir, Target: "/"}}, "below /"},
		"bind to a relative target":    {[]Layer{Bind{Source: dir, Target: "csi"}}, "below /"},
		"bind of a missing source":     {[]Layer{Bind{Source: dir + "/none", Target: "/csi"}}, "no such file"},
		"two binds of one target":      {[]Layer{both, Bind{Source: private, Target: "/csi"}}, "two binds"},
		"bind of a file to a dir":      {[]Layer{Bind{Source: "/dev/null", Target: private}}, "directory"},
		"directory below a file":       {[]Layer{Dir{Path: "/dev/null/x", Mode: 0o755}}, "not a directory"},
		"device that is a directory":   {[]Layer{Device{Source: dir, Target: "/x"}}, ErrNoDevice.Error()},
		"device that is a file":        {[]Layer{Device{Source: dir + "/file", Target: "/x"}}, ErrNoDevice.Error()},
		"missing device":               {[]Layer{Device{Source: dir + "/none", Target: "/x"}}, "no such file"},
		"two devices of one target":    {[]Layer{null, Device{Source: "/dev/zero", Target: "/x"}}, "target of two"},
		"device at the target of bind": {[]Layer{null, Bind{Source: dir, Target: "/x"}}, "target of two"},
		"device at a directory":        {[]Layer{Device{Source: "/dev/null", Target: dir}}, "directory"},
		"device at a relative target":  {[]Layer{Device{Source: "/dev/null", Target: "x"}}, "absolute"},
		"device below a device":        {[]Layer{null, Device{Source: "/dev/null", Target: "/x/y"}}, "not a directory"},
		"bidirectional private mount": {[]Layer{Bind{Source: private, Target: "/csi", Propagation: Bidirectional}},
			ErrNotShared.Error()},
	} {
		if _, err := try(t, Space{Layers: c.layers}, `true`); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", what, err, c.want)
		}
	}
	if points := raw(t, dir); len(points) != 1 {
		t.Errorf("the host has %q", points)
	}
	wantErr(t, (Space{Scratch: dir + "/none"}).Run(func() error { return nil }), unix.ENOENT, "")
}

// The other threads of the calling process keep their namespace.
func TestRunLeavesTheProcessWhereItIs(t *testing.T) {
	dir := tempDir(t)
	host, _ := os.Readlink("/proc/self/ns/mnt")
	var inner string
	err := Space{Scratch: dir}.Run(func() (err error) {
		inner, err = os.Readlink("/proc/thread-self/ns/mnt")
		return err
	})
	if err != nil || inner == host {
		t.Fatalf("inside %s, outside %s, %v", inner, host, err)
	}
	for range 8 {
		if err := OnThread(func() error {
			if now, _ := os.Readlink("/proc/thread-self/ns/mnt"); now != host {
				return fmt.Errorf("a thread is in %s", now)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
}
