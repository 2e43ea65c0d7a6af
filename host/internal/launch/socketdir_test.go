package launch_test

import (
	"errors"
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

// T8: a shim leaves files of all kinds and links, or its directory is replaced or gone. All is removed, and no link is
// followed.
func TestTrapT8OddFilesAreRemoved(t *testing.T) {
	t.Parallel()
	for what, change := range map[string]func(dir, precious string) error{
		"odd files": func(dir, precious string) error {
			below := filepath.Join(dir, "a", "b")
			return errors.Join(os.MkdirAll(below, 0o700), unix.Mkfifo(filepath.Join(below, "fifo"), 0o600),
				os.Symlink(filepath.Dir(precious), filepath.Join(below, "link")),
				os.Symlink(precious, filepath.Join(dir, "link")), os.Link(precious, filepath.Join(dir, "hard")))
		},
		"a link": func(dir, precious string) error {
			return errors.Join(os.Rename(dir, dir+"-moved"), os.Symlink(filepath.Dir(precious), dir))
		},
		"gone": func(dir, _ string) error { return os.RemoveAll(filepath.Dir(dir)) },
	} {
		opts, log := logged(t, "plain")
		p, precious := start(t, opts), filepath.Join(shortDir(t), "precious")
		writeFile(t, precious, "precious", 0o600)
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
