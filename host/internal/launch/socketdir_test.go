package launch_test

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// unmount waits for processes that are being forked: they have the files of this process open until they execute.
func unmount(t *testing.T, point string) {
	t.Helper()
	await(t, point+" is unmounted", func() bool {
		err := unix.Unmount(point, 0)
		if !errors.Is(err, unix.EBUSY) {
			must(t, err)
		}
		return err == nil
	})
}

// T8: a shim leaves sockets, pipes, a closed directory, a tree deeper than the longest path. All is removed, and no
// link is followed.
func TestTrapT8OddFilesAreRemoved(t *testing.T) {
	t.Parallel()
	opts, precious := options(t, "plain"), preciousFile(t)
	p := start(t, opts)
	plant(t, privateDir(t, opts.RunDir), precious)
	kill(t, p)
	checkEmpty(t, opts.RunDir)
	checkPrecious(t, precious)
	refused(t, script(t, patience, "cd $PLUGIN_UNIX_SOCKET_DIR", "ln -s "+filepath.Dir(precious)+" link",
		"mkdir -p closed/below", "mkfifo closed/fifo", "chmod 0 closed .", "exit 3"), nil, "exited with code 3")
	checkPrecious(t, precious)
}

func preciousFile(t *testing.T) string {
	path := filepath.Join(shortDir(t), "precious")
	writeFile(t, path, "precious", 0o600)
	return path
}

// plant creates odd files in a directory, with links to precious.
func plant(t *testing.T, dir, precious string) {
	t.Helper()
	socket, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "s"), Net: "unix"})
	must(t, err)
	socket.SetUnlinkOnClose(false)
	closed := filepath.Join(dir, "closed")
	tree, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	errs := []error{
		err, socket.Close(), unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600),
		os.MkdirAll(filepath.Join(closed, "below"), 0o700),
		os.Symlink(filepath.Dir(precious), filepath.Join(dir, "link")),
		os.Symlink(precious, filepath.Join(closed, "link")), os.Link(precious, filepath.Join(dir, "hard")),
		os.Chmod(closed, 0),
	}
	for range 2500 { // "deep/" so often is three times the longest path
		errs = append(errs, unix.Mkdirat(tree, "deep", 0o700))
		next, err := unix.Openat(tree, "deep", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		errs = append(errs, err, unix.Close(tree))
		tree = next
	}
	must(t, errors.Join(append(errs, unix.Close(tree))...))
}

func privateDir(t *testing.T, runDir string) string {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(runDir, "shim-*"))
	if err != nil || len(dirs) != 1 {
		t.Fatal(dirs, err)
	}
	return dirs[0]
}

func checkPrecious(t *testing.T, path string) {
	t.Helper()
	if text, err := os.ReadFile(path); err != nil || string(text) != "precious" {
		t.Errorf("%s holds %q, %v", path, text, err)
	}
}

// A link in place of the directory is removed, and nothing at its target. A directory that something else has removed
// is no error.
func TestTrapT8ReplacedDirectory(t *testing.T) {
	t.Parallel()
	for what, change := range map[string]func(dir, precious string) error{
		"a link": func(dir, precious string) error {
			return errors.Join(os.Rename(dir, dir+"-moved"), os.Symlink(filepath.Dir(precious), dir))
		},
		"gone": func(dir, _ string) error { return os.RemoveAll(filepath.Dir(dir)) },
	} {
		opts, log := logged(t, "plain")
		p, precious := start(t, opts), preciousFile(t)
		must(t, change(privateDir(t, opts.RunDir), precious))
		kill(t, p)
		checkPrecious(t, precious)
		if text := log.text(); strings.Contains(text, "cannot remove the files") {
			t.Errorf("%s: %s", what, text)
		}
		kill(t, start(t, opts))
		checkEmpty(t, opts.RunDir)
	}
}

// Mounts anywhere in the directory keep their content, by whatever path the host names it, and are logged. Once they
// are unmounted, the next start removes the directory.
func TestTrapT8MountsKeepTheirContent(t *testing.T) {
	t.Parallel()
	needsRoot(t)
	for _, at := range []string{"a/b", "."} {
		opts, log := logged(t, "plain")
		real := opts.RunDir
		opts.RunDir = filepath.Join(shortDir(t), "run")
		must(t, os.Symlink(real, opts.RunDir))
		p := start(t, opts)
		point := filepath.Join(privateDir(t, opts.RunDir), at)
		must(t, errors.Join(os.MkdirAll(point, 0o700), unix.Mount("tmpfs", point, "tmpfs", 0, "")))
		defer unix.Unmount(point, unix.MNT_DETACH)
		writeFile(t, filepath.Join(point, "data"), "precious", 0o600)
		kill(t, p)
		if text := log.text(); !strings.Contains(text, "cannot remove the files") ||
			!strings.Contains(text, " is mounted in the socket directory") {
			t.Errorf("%s: the log does not name the mount: %s", at, text)
		}
		checkPrecious(t, filepath.Join(point, "data"))
		unmount(t, point)
		kill(t, start(t, opts))
		checkEmpty(t, real)
	}
}
