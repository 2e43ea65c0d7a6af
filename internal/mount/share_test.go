package mount

import (
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// MakeShared mounts a directory on itself once, whatever file system it is on. The mount gets a new peer group: if the
// parent is shared, as / is on most machines, a mount below it must not appear a second time.
func TestMakeSharedIsIdempotent(t *testing.T) {
	for name, prepare := range map[string]func(dir string) (arg, point string){
		"plain directory": func(dir string) (string, string) { return dir, dir },
		"private mount": func(dir string) (string, string) {
			mountTmpfs(t, dir)
			must(t, unix.Mount("", dir, "", unix.MS_PRIVATE, ""))
			return dir, dir
		},
		"below a shared mount": func(dir string) (string, string) {
			mountTmpfs(t, dir)
			must(t, unix.Mount("", dir, "", unix.MS_SHARED, ""))
			root := mkdir(t, dir, "root")
			return root, root
		},
		"symbolic link": func(dir string) (string, string) {
			must(t, os.Symlink(mkdir(t, dir, "real"), dir+"/link"))
			return dir + "/link", dir + "/real"
		},
	} {
		arg, point := prepare(tempDir(t))
		write(t, "kept", point, "file")
		for range 3 {
			must(t, MakeShared(arg))
			killed := mkdir(t, point, ".probe") // the test of a process that was killed
			must(t, unix.Mount("probe", killed, "tmpfs", 0, "size=4k"))
			must(t, ProbePropagation(arg))
		}
		if m, found, err := At(point); err != nil || !found || !m.Shared() || !exists(t, point+"/file") {
			t.Errorf("%s: mount %v, %v", name, m, err)
		}
		mountTmpfs(t, mkdir(t, point, "vol"))
		if got, want := raw(t, point), []string{point, point + "/vol"}; !slices.Equal(got, want) {
			t.Errorf("%s: mounted at %q, want %q", name, got, want)
		}
		if names, _ := os.ReadDir(point); len(names) != 2 {
			t.Errorf("%s: ProbePropagation left %v", name, names)
		}
	}
}

// The negative control: a private mount is refused, and the error says what to do.
func TestProbePropagationRefusesAPrivateMount(t *testing.T) {
	dir := tempDir(t)
	mountTmpfs(t, dir)
	must(t, unix.Mount("", dir, "", unix.MS_PRIVATE, ""))
	err := ProbePropagation(dir)
	wantErr(t, err, ErrNotShared, "mount --make-shared "+dir)
	if names, _ := os.ReadDir(dir); len(names) != 0 {
		t.Errorf("ProbePropagation left %v", names)
	}
}
