package mount

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// volumes is a shared mount, as ours are, with tmpfs mounted at the named directories.
func volumes(t *testing.T, names ...string) (dir string) {
	t.Helper()
	dir = tempDir(t)
	mountTmpfs(t, dir)
	if err := unix.Mount("", dir, "", unix.MS_SHARED, ""); err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		mountTmpfs(t, mkdir(t, dir, name))
		write(t, strings.Repeat("x", 4096), dir, name, "file")
	}
	return dir
}

func usersOf(t *testing.T, point string) []User {
	t.Helper()
	found, err := Users([]string{point})
	if err != nil {
		t.Fatal(err)
	}
	return found[point]
}

// What the kernel says is busy has a user, and the other way round.
func TestUsersAreWhatMakesTheKernelRefuse(t *testing.T) {
	for name, c := range map[string]struct {
		apart bool
		steps string // V is the volume
		use   Use
	}{
		"working directory":                  {false, "cwd:V", WorksIn},
		"working directory of a thread":      {false, "thread:V", WorksIn},
		"root":                               {false, "root:V", RootedIn},
		"open file":                          {false, "open:V/file", Opens},
		"open path":                          {false, "path:V", Opens},
		"open file that was removed":         {false, "open:V/file remove:V/file", Opens},
		"mapped file":                        {false, "map:V/file", Maps},
		"working directory that was removed": {false, "dir:V/d cwd:V/d", WorksIn},
		"open in a copy that would go":       {true, "slave:/ open:V/file", Opens},
		"directory in a copy that would go":  {true, "slave:/ cwd:V", WorksIn},
		"mapped in a copy that would go":     {true, "slave:/ map:V/file", Maps},
		"chrooted next to a copy":            {true, "slave:/ open:V/file root:R", Opens},
	} {
		t.Run(name, func(t *testing.T) {
			dir := volumes(t, "vol")
			vol := dir + "/vol"
			mkdir(t, dir, "root")
			h := holdOn(t, c.apart, strings.Fields(strings.NewReplacer("V", vol, "R", dir+"/root").Replace(c.steps))...)
			if strings.Contains(name, "directory that") {
				if err := unix.Rmdir(vol + "/d"); err != nil {
					t.Fatal(err)
				}
			}
			if err := unix.Unmount(vol, 0); !errors.Is(err, unix.EBUSY) {
				t.Fatalf("the kernel does not refuse: %v", err)
			}
			got := usersOf(t, vol)
			if len(got) != 1 || got[0].PID != h.pid || got[0].Use != c.use || !strings.HasPrefix(got[0].Path, vol) || got[0].Comm == "" {
				t.Errorf("got %+v, want %s by %d", got, c.use, h.pid)
			}
			h.end()
			if got := usersOf(t, vol); len(got) > 0 {
				t.Errorf("left: %v", got)
			}
			if err := unix.Unmount(vol, 0); err != nil {
				t.Errorf("nobody uses it: %v", err)
			}
		})
	}
}

func TestUsersOfAProgram(t *testing.T) {
	dir := volumes(t)
	vol := mkdir(t, dir, "vol")
	if err := unix.Mount("test", vol, "tmpfs", 0, "size=64m"); err != nil {
		t.Fatal(err)
	}
	copyFile(t, "/proc/self/exe", vol+"/program")
	h := begin(t, exec.Command(vol+"/program", "-hold"))
	got := usersOf(t, vol)
	if !slices.Contains(got, User{PID: h.pid, Comm: "program", Use: Runs, Path: vol + "/program"}) {
		t.Errorf("got %v", got)
	}
}

// Where mounts of the volume are left in any namespace after ours are gone, it is used, and the other way round: the kernel's own tables
// are asked, with the volume unmounted.
func TestUsersAreWhereTheVolumeStays(t *testing.T) {
	for name, c := range map[string]struct {
		apart bool
		steps string // R is the root of the volumes, V the volume, E an empty directory beside the root
		at    string // where it stays; empty: it goes
	}{
		"a slave copy goes":                         {true, "slave:/", ""},
		"a peer copy goes":                          {true, "", ""},
		"a slave of a slave goes":                   {true, "slave:/ shared:/ rbind:R:E slave:E", ""},
		"a private copy stays":                      {true, "private:/", "V"},
		"a copy on a private root stays":            {true, "private:R", "V"},
		"a private copy on a slave goes":            {true, "slave:/ private:V", ""},
		"a bind in a task stays":                    {true, "slave:/ bind:V:E", "E"},
		"a bind of a part in a task stays":          {true, "slave:/ bind:V/sub:E", "E"},
		"a bind of a file in a task stays":          {true, "slave:/ bind:V/file:E/file", "E/file"},
		"a copy with a mount in it stays":           {true, "slave:/ tmpfs:V/sub", "V"},
		"a copy of another place stays":             {true, "slave:/ bind:V:R/other", "R/other"},
		"a copy that was moved away stays":          {true, "slave:/ bind:V:E umount:V", "E"},
		"a chrooted private copy stays":             {true, "private:/ bind:V:E umount:V root:R", "E"},
		"a chrooted one without /proc stays":        {true, "private:/ bind:E:E dir:E/v bind:V:E/v dir:E/e pivot:E root:/e", "/v"},
		"a bind here stays":                         {false, "private:/ bind:V:E", "E"},
		"a bind of a part here stays":               {false, "bind:V/sub:E", "E"},
		"a bind of the root here takes it along":    {false, "rbind:R:E", ""},
		"a private bind of the root here leaves it": {false, "rbind:R:E private:E", "E/vol"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := tempDir(t)
			mountTmpfs(t, dir)
			root, empty := mkdir(t, dir, "root"), mkdir(t, dir, "empty")
			write(t, "", empty, "file")
			if err := MakeShared(root); err != nil {
				t.Fatal(err)
			}
			vol := mkdir(t, root, "vol")
			mkdir(t, root, "other")
			mountTmpfs(t, vol)
			mkdir(t, vol, "sub")
			write(t, "", vol, "file")
			m, _, _ := At(vol)
			place := strings.NewReplacer("R", root, "V", vol, "E", empty)
			h := holdOn(t, c.apart, strings.Fields(place.Replace(c.steps))...)
			got := usersOf(t, vol)
			if err := unix.Unmount(vol, 0); err != nil {
				t.Fatal(err)
			}
			left := shows(t, h.pid, m)
			if c.at == "" && (len(got) > 0 || len(left) > 0) {
				t.Fatalf("got %v; the kernel has it at %q", got, left)
			}
			if c.at == "" {
				return
			}
			at := place.Replace(c.at)
			if len(got) != 1 || got[0].Use != MountedAt || got[0].Path != at || c.apart != (got[0].PID == h.pid) {
				t.Errorf("got %v, want one at %s", got, at)
			}
			if !strings.Contains(name, "chrooted") && !slices.Contains(left, at) {
				t.Errorf("the kernel has it at %q", left)
			}
		})
	}
}

// shows lists where a process's namespace has mounts of the same file system: the kernel's word, without this package.
func shows(t *testing.T, pid int, m Mount) (points []string) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if fields := strings.Fields(line); fields[2] == fmt.Sprintf("%d:%d", m.Major, m.Minor) {
			points = append(points, fields[4])
		}
	}
	return points
}

// A staged volume is used by what is published of it. What is published is not used by the staged one, by its siblings, or by their copies.
func TestUsersOfAStagedVolume(t *testing.T) {
	dir := volumes(t, "staged")
	names := []string{"staged", "p1", "p2"}
	for _, name := range names[1:] {
		if err := do("bind:" + dir + "/staged:" + mkdir(t, dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	aside := tempDir(t)
	plugin := holdOn(t, true, "rbind:"+dir+":"+aside) // sees all that is ours at a second place
	task := holdOn(t, true, "slave:/")
	for at, want := range map[string][]string{"staged": {dir + "/p1", dir + "/p2"}, "p1": nil, "p2": nil} {
		var got []string
		for _, u := range usersOf(t, dir+"/"+at) {
			if u.Use != MountedAt || u.PID != 0 {
				t.Errorf("%s: %v (%d is the plugin, %d the task)", at, u, plugin.pid, task.pid)
			}
			got = append(got, u.Path)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s is used by %q, want %q", at, got, want)
		}
	}
	// The task that has one bound has any of them: it does not say which.
	binder := holdOn(t, true, "slave:/", "bind:"+dir+"/p2:"+aside)
	found, err := Users([]string{dir + "/staged", dir + "/p1", dir + "/p2"})
	for _, name := range names {
		if !slices.ContainsFunc(found[dir+"/"+name], func(u User) bool { return u.PID == binder.pid && u.Path == aside }) || err != nil {
			t.Errorf("%s: %v, %v", name, found[dir+"/"+name], err)
		}
	}
}

// The same where our directory is mounted a second time, so that each mount is a copy of another.
func TestUsersOfAStagedVolumeSeenTwice(t *testing.T) {
	dir := volumes(t, "staged")
	if err := errors.Join(do("bind:"+dir+"/staged:"+mkdir(t, dir, "p")), do("rbind:"+dir+":"+tempDir(t))); err != nil {
		t.Fatal(err)
	}
	if got, want := usersOf(t, dir+"/staged"), []User{{Use: MountedAt, Path: dir + "/p"}}; !slices.Equal(got, want) {
		t.Errorf("the staged one: %v", got)
	}
	if got := usersOf(t, dir+"/p"); len(got) > 0 {
		t.Errorf("the published one: %v", got)
	}
}

// And where it is staged on another mount than it is published on.
func TestUsersOfAVolumeStagedElsewhere(t *testing.T) {
	dir, elsewhere := volumes(t), tempDir(t)
	mountTmpfs(t, elsewhere)
	if err := do("bind:" + elsewhere + ":" + mkdir(t, dir, "p")); err != nil {
		t.Fatal(err)
	}
	if got, want := usersOf(t, elsewhere), []User{{Use: MountedAt, Path: dir + "/p"}}; !slices.Equal(got, want) {
		t.Errorf("the staged one: %v", got)
	}
	if got := usersOf(t, dir+"/p"); len(got) > 0 {
		t.Errorf("the published one: %v", got)
	}
}

func TestUsersInside(t *testing.T) {
	dir := volumes(t, "vol", "other")
	for range 2 {
		mountTmpfs(t, dir+"/vol") // stacked: no use
	}
	if got := usersOf(t, dir+"/vol"); len(got) > 0 {
		t.Errorf("stacked: %v", got)
	}
	mountTmpfs(t, mkdir(t, dir, "vol", "inner"))
	want := []User{{Use: MountedIn, Path: dir + "/vol/inner"}}
	if got := usersOf(t, dir+"/vol"); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := usersOf(t, dir+"/vol/inner"); len(got) > 0 {
		t.Errorf("the inner one: %v", got)
	}
	h := holdOn(t, false, "cwd:"+dir+"/vol/inner") // used is also what it lies in
	found, err := Users([]string{dir + "/vol", dir + "/other", dir + "/vol/inner", dir + "/none"})
	inner := found[dir+"/vol/inner"]
	if err != nil || len(found) != 2 || len(found[dir+"/vol"]) != 2 || len(inner) != 1 || inner[0].PID != h.pid {
		t.Errorf("got %v, %v", found, err)
	}
}

// A path that is not as the mount table writes it would be used by nobody.
func TestUsersRefusesOtherPaths(t *testing.T) {
	for _, path := range []string{"", "vol", "/vol/", "/a/../vol"} {
		if found, err := Users([]string{"/", path}); err == nil {
			t.Errorf("%q: %v", path, found)
		}
	}
}

// The caller itself is not counted, whatever it has open.
func TestUsersLeavesTheCallerOut(t *testing.T) {
	dir := volumes(t, "vol")
	f, err := os.Open(dir + "/vol/file")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if got := usersOf(t, dir+"/vol"); len(got) > 0 {
		t.Errorf("got %v", got)
	}
}

// Processes and namespaces that come and go while they are looked at are no error, and hide nobody.
func TestUsersWhileProcessesComeAndGo(t *testing.T) {
	dir := volumes(t, "vol")
	h := holdOn(t, true, "slave:/", "open:"+dir+"/vol/file")
	over := make(chan struct{})
	var storm sync.WaitGroup
	for range 4 {
		storm.Go(func() {
			for {
				select {
				case <-over:
					return
				default:
				}
				cmd := exec.Command("/bin/true")
				cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
				_ = cmd.Run()
			}
		})
	}
	for range 20 {
		found, err := Users([]string{dir + "/vol"})
		if err != nil || !slices.ContainsFunc(found[dir+"/vol"], func(u User) bool { return u.PID == h.pid && u.Use == Opens }) {
			t.Errorf("got %v, %v", found, err)
		}
	}
	close(over)
	storm.Wait()
}

func TestUserReads(t *testing.T) {
	for want, u := range map[string]User{
		"process 7 (sh) works in /v":                                   {PID: 7, Comm: "sh", Use: WorksIn, Path: "/v"},
		"process 7 (sh) has its root at /v":                            {PID: 7, Comm: "sh", Use: RootedIn, Path: "/v"},
		"process 7 (sh) runs /v/sh":                                    {PID: 7, Comm: "sh", Use: Runs, Path: "/v/sh"},
		`process 7 ("a\nb") has "/v/\x1b" open`:                        {PID: 7, Comm: "a\nb", Use: Opens, Path: "/v/\x1b"},
		"process 7 (sh) maps /v/f into its memory":                     {PID: 7, Comm: "sh", Use: Maps, Path: "/v/f"},
		"it is mounted at /m as well":                                  {Use: MountedAt, Path: "/m"},
		"it is mounted at /m in the mount namespace of process 7 (sh)": {PID: 7, Comm: "sh", Use: MountedAt, Path: "/m"},
		"something is mounted inside it, at /v/m":                      {Use: MountedIn, Path: "/v/m"},
	} {
		if got := u.String(); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

// L8: among ten thousand mounts the users of all are found within a second.
func TestUsersAmongTenThousandMounts(t *testing.T) {
	needMounts(t)
	err := OnThread(func() error { // its namespace ends with it, and all mounts with that
		if err := errors.Join(unix.Unshare(unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")); err != nil {
			return err
		}
		dir := t.TempDir()
		if err := errors.Join(unix.Mount("root", dir, "tmpfs", 0, ""), unix.Mount("", dir, "", unix.MS_SHARED, "")); err != nil {
			return err
		}
		var points []string
		for i := range 10_000 {
			point := fmt.Sprintf("%s/%d", dir, i)
			if err := errors.Join(os.Mkdir(point, 0o700), unix.Mount("many", point, "tmpfs", 0, "size=4k")); err != nil {
				return err
			}
			points = append(points, point)
		}
		h := holdOn(t, true, "slave:/", "cwd:"+points[5000])
		best := time.Hour
		for range 3 {
			begun := time.Now()
			found, err := Users(points)
			best = min(best, time.Since(begun))
			if users := found[points[5000]]; err != nil || len(found) != 1 || len(users) != 1 || users[0].PID != h.pid {
				return fmt.Errorf("got %v, %w", found, err)
			}
		}
		t.Logf("%v", best)
		if slower == 1 && best > time.Second {
			t.Errorf("it took %v", best)
		}
		h.end()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
