package taskdriver

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/registry"
)

// A task may replace its files and directories by links. The next attempt does not follow them out of the task's
// directory, and does not fail because of them.
func TestFilesFollowNoLinkOfTheTask(t *testing.T) {
	dir, outside := tempDir(t), tempDir(t)
	must(t, os.WriteFile(outside+"/f", []byte("theirs"), 0o644))
	task := Task{Dir: dir, Files: []File{{"local/f", 0o640, []byte("new")}}}
	in := func(name string) string { return filepath.Join(dir, name) }
	must(t, os.Mkdir(in("local"), 0o700))
	for range 2 {
		must(t, os.Symlink(outside+"/f", in("local/link")))
		must(t, os.Rename(in("local/link"), in("local/f")))
		must(t, task.writeFiles(in, 0, 0))
	}
	if text, err := os.ReadFile(in("local/f")); err != nil || string(text) != "new" {
		t.Errorf("%q, %v", text, err)
	}
	if info, err := os.Lstat(in("local/f")); err != nil || info.Mode() != 0o640 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	must(t, os.Symlink(outside, in("local/sub")))
	task.Files[0].Path = "local/sub/f"
	err := task.writeFiles(in, 0, 0)
	if !errors.Is(err, registry.ErrInvalid) || !strings.HasPrefix(err.Error(), "template local/sub/f: ") {
		t.Errorf("a link out of the directory: %v", err)
	}
	if text, err := os.ReadFile(outside + "/f"); err != nil || string(text) != "theirs" {
		t.Errorf("%q, %v", text, err)
	}
}

// Only an error that would recur at the next attempt is invalid.
func TestErrorsOfFilesHaveTheirKind(t *testing.T) {
	for number, want := range map[unix.Errno]error{
		unix.ENOTEMPTY: registry.ErrInvalid, unix.ENOSPC: registry.ErrExhausted, unix.EIO: nil,
	} {
		err := classifyFileError(errors.Join(&fs.PathError{Op: "write", Path: "f", Err: number}, nil))
		for _, kind := range registry.Kinds {
			if errors.Is(err, kind) != (kind == want) {
				t.Errorf("%v is a %v", err, kind)
			}
		}
	}
}
