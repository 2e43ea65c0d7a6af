package launch_test

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host/internal/launch"
)

// A mount in the socket directory of a dead shim is logged and keeps its content. Once it is unmounted, the next
// start removes the directory.
func TestDeadWhateverItLeaves(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("to mount something needs root")
	}
	for what, end := range map[string]func(*launch.Process) error{
		"killed":  func(p *launch.Process) error { return p.Kill(t.Context()) },
		"stopped": func(p *launch.Process) error { return p.Stop(t.Context(), patience) },
	} {
		log := newLog()
		opts := options(t, "plain")
		opts.Logger = log
		p := start(t, opts)
		dirs, err := filepath.Glob(filepath.Join(opts.RunDir, "shim-*"))
		if err != nil || len(dirs) != 1 {
			t.Fatal(dirs, err)
		}
		point := filepath.Join(dirs[0], "volume")
		if err := os.Mkdir(point, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("tmpfs", point, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		defer unix.Unmount(point, unix.MNT_DETACH)
		data := filepath.Join(point, "data")
		writeFile(t, data, "precious", 0o600)
		if err := end(p); err != nil {
			t.Errorf("%s: the shim is dead, and its end says %v", what, err)
		}
		if p.Err() == nil || alive(p.PID()) {
			t.Errorf("%s: it lives", what)
		}
		if text := log.text(); !strings.Contains(text, "cannot remove the files") ||
			!strings.Contains(text, point+" is mounted") {
			t.Errorf("%s: nothing tells of the mount: %s", what, text)
		}
		if text, err := os.ReadFile(data); err != nil || string(text) != "precious" {
			t.Errorf("%s: what was mounted holds %q, %v", what, text, err)
		}
		unmount(t, point)
		kill(t, start(t, opts))
		checkEmpty(t, opts.RunDir)
	}
}

// unmount waits for processes that are being forked: they have the files of this process open until they execute.
func unmount(t *testing.T, point string) {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		err := unix.Unmount(point, 0)
		if err == nil {
			return
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// The same for a directory that cannot be changed, while a process is being forked.
func TestDeadWhateverCannotBeRemoved(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("the test makes a directory read-only by a mount")
	}
	opts := options(t, "plain")
	p := start(t, opts)
	forked := copyOfOpen(t, opts.RunDir+"/shim-")
	defer unix.Close(forked)
	if err := unix.Mount(opts.RunDir, opts.RunDir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(opts.RunDir, unix.MNT_DETACH)
	if err := unix.Mount("", opts.RunDir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	kill(t, p)
	if alive(p.PID()) {
		t.Error("it lives")
	}
	unmount(t, opts.RunDir)
	kill(t, start(t, opts))
	checkEmpty(t, opts.RunDir)
}

// copyOfOpen duplicates the descriptor of the one open file whose path begins with prefix, as a fork does.
func copyOfOpen(t *testing.T, prefix string) int {
	t.Helper()
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range open {
		path, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err != nil || !strings.HasPrefix(path, prefix) {
			continue
		}
		number, err := strconv.Atoi(e.Name())
		if err != nil {
			t.Fatal(err)
		}
		fd, err := unix.FcntlInt(uintptr(number), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	t.Fatalf("nothing is open below %s", prefix)
	return -1
}

// T8: a shim leaves sockets, pipes, a closed directory, a tree deeper than the longest path. All is removed, and no
// link is followed.
func TestTrapT8OddThings(t *testing.T) {
	t.Parallel()
	opts := options(t, "plain")
	p := start(t, opts)
	precious := filepath.Join(shortDir(t), "precious")
	plant(t, privateDir(t, opts.RunDir), precious)
	kill(t, p)
	checkEmpty(t, opts.RunDir)
	checkFile(t, precious)

	precious = filepath.Join(shortDir(t), "precious")
	writeFile(t, precious, "precious", 0o600)
	_, err := startScript(t, patience, "cd $PLUGIN_UNIX_SOCKET_DIR", "ln -s "+filepath.Dir(precious)+" link",
		// which looks whether anything is left
		"mkdir -p closed/below", "mkfifo closed/fifo", "chmod 0 closed .", "exit 3")
	checkText(t, err, "exited with code 3")
	checkFile(t, precious)
}

// plant creates odd files in a directory, with links to precious.
func plant(t *testing.T, dir, precious string) {
	t.Helper()
	writeFile(t, precious, "precious", 0o600)
	socket, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "s"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	socket.SetUnlinkOnClose(false)
	closed := filepath.Join(dir, "closed")
	tree, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	errs := []error{
		err, socket.Close(), unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600),
		os.MkdirAll(filepath.Join(closed, "below"), 0o700),
		os.Symlink(
			filepath.Dir(precious), filepath.Join(dir, "link"),
		), os.Symlink(precious, filepath.Join(closed, "link")),
		os.Link(precious, filepath.Join(dir, "hard")), os.Chmod(closed, 0),
	}
	for range 2500 { // "deep/" so often is three times the longest path
		errs = append(errs, unix.Mkdirat(tree, "deep", 0o700))
		next, err := unix.Openat(tree, "deep", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		errs = append(errs, err, unix.Close(tree))
		tree = next
	}
	if err := errors.Join(append(errs, unix.Close(tree))...); err != nil {
		t.Fatal(err)
	}
}

func privateDir(t *testing.T, runDir string) string {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(runDir, "shim-*"))
	if err != nil || len(dirs) != 1 {
		t.Fatal(dirs, err)
	}
	return dirs[0]
}

func checkFile(t *testing.T, path string) {
	t.Helper()
	if text, err := os.ReadFile(path); err != nil || string(text) != "precious" {
		t.Errorf("%s holds %q, %v", path, text, err)
	}
}

// A link in place of the directory is removed, and nothing at its target.
func TestTrapT8DirectoryThatIsAnother(t *testing.T) {
	t.Parallel()
	opts := options(t, "plain")
	p := start(t, opts)
	precious := filepath.Join(shortDir(t), "precious")
	writeFile(t, precious, "precious", 0o600)
	dir := privateDir(t, opts.RunDir)
	if err := errors.Join(os.Rename(dir, dir+"-moved"), os.Symlink(filepath.Dir(precious), dir)); err != nil {
		t.Fatal(err)
	}
	kill(t, p)
	checkFile(t, precious)
	checkEmpty(t, opts.RunDir)
}

// Mounts anywhere in the directory keep their content, by whatever path the host names it.
func TestTrapT8MountsKeepTheirContent(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("to mount something needs root")
	}
	for where, at := range map[string]string{"below": "a/b", "over it": ".", "in go-plugin's own": "plugin-dir*"} {
		opts := options(t, "plain")
		real := opts.RunDir
		opts.RunDir = filepath.Join(shortDir(t), "run")
		if err := os.Symlink(real, opts.RunDir); err != nil {
			t.Fatal(err)
		}
		p := start(t, opts)
		point := filepath.Join(privateDir(t, opts.RunDir), at)
		if found, _ := filepath.Glob(point); len(found) == 1 {
			point = found[0]
		} else if where == "in go-plugin's own" {
			kill(t, p)
			continue // there is none, and it cannot be used for that
		}
		if err := errors.Join(os.MkdirAll(point, 0o700), unix.Mount("tmpfs", point, "tmpfs", 0, "")); err != nil {
			t.Fatal(err)
		}
		defer unix.Unmount(point, unix.MNT_DETACH)
		writeFile(t, filepath.Join(point, "data"), "precious", 0o600)
		kill(t, p)
		checkFile(t, filepath.Join(point, "data"))
		unmount(t, point)
		kill(t, start(t, opts))
		checkEmpty(t, real)
	}
}

// A socket directory that something else has removed is no error.
func TestRemovedSocketDirectoryIsNotMissed(t *testing.T) {
	t.Parallel()
	log := newLog()
	opts := options(t, "plain")
	opts.Logger = log
	p := start(t, opts)
	if err := os.RemoveAll(opts.RunDir); err != nil {
		t.Fatal(err)
	}
	kill(t, p)
	if text := log.text(); strings.Contains(text, "cannot remove the files") {
		t.Error(text)
	}
	kill(t, start(t, opts))
}
