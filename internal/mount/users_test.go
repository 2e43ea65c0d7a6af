package mount

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// volumes returns a shared mount with a tmpfs at each named directory.
func volumes(t *testing.T, names ...string) (dir string) {
	t.Helper()
	dir = tempDir(t)
	mountTmpfs(t, dir)
	must(t, unix.Mount("", dir, "", unix.MS_SHARED, ""))
	for _, name := range names {
		mountTmpfs(t, mkdir(t, dir, name))
		write(t, strings.Repeat("x", 4096), dir, name, "file")
	}
	return dir
}

// usersOf returns the texts of the users of a point.
func usersOf(t *testing.T, point string) (texts []string) {
	t.Helper()
	found, err := Users([]string{point})
	must(t, err)
	for _, u := range found[point] {
		texts = append(texts, u.Text)
	}
	return texts
}

// Users names the reasons why the kernel refuses to unmount, as far as /proc shows them, and nothing else.
func TestUsersAreNamed(t *testing.T) {
	for name, c := range map[string]struct {
		apart bool
		steps string // V is the volume
		want  string // empty: no user is found
	}{
		"working directory":                  {false, "cwd:V", "has its working directory in V"},
		"working directory that was removed": {false, "dir:V/d cwd:V/d", "has its working directory in V/d (deleted)"},
		"root":                               {false, "root:V", "has its root at V"},
		"open file":                          {false, "open:V/file", "has V/file open"},
		"open file that was removed":         {false, "open:V/file remove:V/file", "has V/file (deleted) open"},
		"mapped file":                        {false, "map:V/file", ""},
		"open in a copy that would go":       {true, "slave:/ open:V/file", "has V/file open"},
		"directory in a copy that would go":  {true, "slave:/ cwd:V", "has its working directory in V"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := volumes(t, "vol")
			vol := dir + "/vol"
			h := holdOn(t, c.apart, strings.Fields(strings.ReplaceAll(c.steps, "V", vol))...)
			if strings.Contains(name, "directory that") {
				must(t, unix.Rmdir(vol+"/d"))
			}
			if err := unix.Unmount(vol, 0); !errors.Is(err, unix.EBUSY) {
				t.Fatalf("the kernel does not refuse: %v", err)
			}
			var want []string
			if c.want != "" {
				want = []string{fmt.Sprintf("process %d (%q) %s", h.pid, "exe", strings.ReplaceAll(c.want, "V", vol))}
			}
			if got := usersOf(t, vol); !slices.Equal(got, want) {
				t.Errorf("got %q, want %q", got, want)
			}
			h.end()
			if got := usersOf(t, vol); len(got) > 0 {
				t.Errorf("left: %q", got)
			}
			must(t, unix.Unmount(vol, 0))
		})
	}
}

// A mount of the same file system elsewhere is a user if it stays when the volume is unmounted.
func TestUsersAreWhereTheVolumeStays(t *testing.T) {
	for name, c := range map[string]struct {
		apart bool
		steps string // R is the root of the volumes, V the volume, E an empty directory beside the root
		at    string // where the file system stays mounted; empty: nowhere
	}{
		"a slave copy goes":                      {true, "slave:/", ""},
		"a peer copy goes":                       {true, "", ""},
		"a slave of a slave goes":                {true, "slave:/ shared:/ rbind:R:E slave:E", ""},
		"a private copy stays":                   {true, "private:/", "V"},
		"a private copy on a slave goes":         {true, "slave:/ private:V", ""},
		"a bind in a task stays":                 {true, "slave:/ bind:V:E", "E"},
		"a bind of a part in a task stays":       {true, "slave:/ bind:V/sub:E", "E"},
		"a bind of a file in a task stays":       {true, "slave:/ bind:V/file:E/file", "E/file"},
		"a copy at another place stays":          {true, "slave:/ bind:V:R/other", "R/other"},
		"a copy that was moved away stays":       {true, "slave:/ bind:V:E umount:V", "E"},
		"a bind here stays":                      {false, "private:/ bind:V:E", "E"},
		"a bind of a part here stays":            {false, "bind:V/sub:E", "E"},
		"a bind of the root here takes it along": {false, "rbind:R:E", ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := tempDir(t)
			mountTmpfs(t, dir)
			root, empty := mkdir(t, dir, "root"), mkdir(t, dir, "empty")
			write(t, "", empty, "file")
			must(t, MakeShared(root))
			vol := mkdir(t, root, "vol")
			mkdir(t, root, "other")
			mountTmpfs(t, vol)
			mkdir(t, vol, "sub")
			write(t, "", vol, "file")
			m, _, _ := At(vol)
			place := strings.NewReplacer("R", root, "V", vol, "E", empty)
			h := holdOn(t, c.apart, strings.Fields(place.Replace(c.steps))...)
			got := usersOf(t, vol)
			must(t, unix.Unmount(vol, 0))
			left := shows(t, h.pid, m)
			if c.at == "" {
				if len(got) > 0 || len(left) > 0 {
					t.Errorf("got %q; the kernel has it at %q", got, left)
				}
				return
			}
			at := place.Replace(c.at)
			want := "it is also mounted at " + at
			if c.apart {
				want = fmt.Sprintf("it is mounted at %s in the mount namespace of process %d (%q)", at, h.pid, "exe")
			}
			if !slices.Equal(got, []string{want}) || !slices.Contains(left, at) {
				t.Errorf("got %q, want %q; the kernel has it at %q", got, want, left)
			}
		})
	}
}

// shows lists the mount points of the same file system in a process's namespace, from the kernel's own table.
func shows(t *testing.T, pid int, m Mount) (points []string) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	must(t, err)
	for line := range strings.Lines(string(b)) {
		if fields := strings.Fields(line); fields[2] == fmt.Sprintf("%d:%d", m.Major, m.Minor) {
			points = append(points, fields[4])
		}
	}
	return points
}

// A staged volume is used by its publishes. A publish is used neither by the staged volume nor by another publish, even
// if another mount shows all of them a second time.
func TestStagedVolumeIsUsedByItsPublishes(t *testing.T) {
	dir := volumes(t, "staged")
	for _, name := range []string{"p1", "p2"} {
		must(t, do("bind:"+dir+"/staged:"+mkdir(t, dir, name)))
	}
	for range 2 {
		found, err := Users([]string{dir + "/staged", dir + "/p1", dir + "/p2"})
		want := map[string][]User{dir + "/staged": {
			{Text: "it is also mounted at " + dir + "/p1", Mount: dir + "/p1"},
			{Text: "it is also mounted at " + dir + "/p2", Mount: dir + "/p2"},
		}}
		if err != nil || !reflect.DeepEqual(found, want) {
			t.Errorf("got %v, %v", found, err)
		}
		must(t, do("rbind:"+dir+":"+tempDir(t)))
		holdOn(t, true, "slave:/") // a task
	}
	mountTmpfs(t, mkdir(t, dir, "p1", "inner"))
	if got, want := usersOf(t, dir+"/p1"), []string{"something is mounted inside it, at " + dir +
		"/p1/inner"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A path that is not in the form of the mount table would seem to have no users.
func TestUsersRefusesOtherPaths(t *testing.T) {
	for _, path := range []string{"", "vol", "/vol/", "/a/../vol"} {
		if found, err := Users([]string{"/", path}); err == nil {
			t.Errorf("%q: %v", path, found)
		}
	}
}
