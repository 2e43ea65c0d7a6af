package taskdriver

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/registry"
)

func TestBidirectionalMountsOutliveTheTask(t *testing.T) {
	needMounts(t)
	dir := sharedDir(t)
	volumes := mkdir(t, dir, "volumes")
	task := shell(t, `cd /local/csi; mkdir vol; mount -t tmpfs from-the-task vol; echo data > vol/file`)
	task.Plan = binds(hooks.Bind{Source: volumes, Target: "/local/csi", Propagation: hooks.Bidirectional})
	run(t, NewExec(), task)
	if b, err := os.ReadFile(volumes + "/vol/file"); err != nil || string(b) != "data\n" {
		t.Errorf("the host reads %q, %v", b, err)
	}
	if lines := mountLines(t, volumes+"/vol "); len(lines) != 1 || !strings.Contains(lines[0], "from-the-task") {
		t.Errorf("the host has %q", lines)
	}
	if err := unix.Unmount(volumes+"/vol", 0); err != nil {
		t.Errorf("the host cannot unmount it: %v", err)
	}
}

// The tests of package mount prove the effect of the layers.
func TestBindsOfPlanBecomeLayers(t *testing.T) {
	for propagation, want := range map[hooks.Propagation]mount.Propagation{
		hooks.Private: mount.Private, hooks.HostToTask: mount.Slave, hooks.Bidirectional: mount.Bidirectional,
	} {
		bind := hooks.Bind{Source: "/a", Target: "/b", ReadOnly: true, Propagation: propagation}
		layers := taskSpace(Task{Plan: binds(bind)}, nil).Layers
		if got := layers[len(layers)-1]; got != (mount.Bind{Source: "/a", Target: "/b", ReadOnly: true,
			Propagation: want}) {
			t.Errorf("%s: %+v", propagation, got)
		}
	}
}

// Neither the mount points of the task's own directories nor the targets of the plan appear on the host.
func TestTheTasksPathsNeverAppearOnTheHost(t *testing.T) {
	needMounts(t)
	dir := tempDir(t)
	unique := "/" + filepath.Base(dir)
	task := shell(t, `
		test -d `+unique+`/made; test -f `+unique+`/csi/file; test -c /dev/zero; test -x /bin/sh
		test "$(cat /secrets/given /local/sub/given)" = "ab"
		echo secret > /secrets/key; echo kept > /local/kept; echo shared > /alloc/shared
		test "$NOMAD_TASK_DIR" = /local; test "$NOMAD_ALLOC_DIR" = /alloc; test "$NOMAD_SECRETS_DIR" = /secrets
		pwd; grep -c `+unique+` /proc/self/mountinfo`)
	task.Alloc = mkdir(t, dir, "alloc")
	task.Files = []File{{"secrets/given", 0o600, []byte("a")}, {"local/sub/given", 0o644, []byte("b")}}
	task.Plan = hooks.Plan{
		Dirs:  []hooks.Dir{{Path: unique + "/made", Mode: 0o755}},
		Binds: []hooks.Bind{{Source: mkdir(t, dir, "src"), Target: unique + "/csi", Propagation: hooks.HostToTask}},
	}
	must(t, os.WriteFile(dir+"/src/file", nil, 0o600))
	if out := run(t, NewExec(), task); !strings.HasPrefix(out, "/local\n") || strings.HasSuffix(out, "\n0\n") {
		t.Errorf("the task says %q", out)
	}
	if exists(unique) || exists("/secrets/key") || len(mountLines(t, unique)) > 0 {
		t.Errorf("the host has %s: %q", unique, mountLines(t, unique))
	}
	if !exists(task.Dir+"/local/kept") || !exists(dir+"/alloc/shared") {
		t.Error("what the task wrote to its own directories is not in them")
	}
	found := 0
	_ = filepath.WalkDir(task.Dir, func(path string, _ os.DirEntry, _ error) error {
		if filepath.Base(path) == "key" {
			found++
		}
		return nil
	})
	if found > 0 {
		t.Error("a secret is on disk")
	}
}

func TestTaskRunsAsItsUser(t *testing.T) {
	if os.Getenv(roleEnv) == userNSRole {
		t.Skip("a user namespace with one user has no second one")
	}
	needMounts(t)
	task := shell(t, `id -u; id -g; touch /local/mine /secrets/mine /alloc/mine; cat /secrets/given
		if touch /etc/mine; then exit 3; fi`)
	task.User = "65534:65533"
	task.Files = []File{{"secrets/given", 0o400, []byte("his\n")}}
	if out := run(t, NewExec(), task); out != "65534\n65533\nhis\n" {
		t.Errorf("the task is %q", out)
	}
}

// A plan that cannot be applied is refused before anything runs.
func TestPlansThatAreRefused(t *testing.T) {
	needMounts(t)
	private := tempDir(t)
	must(t, unix.Mount("private", private, "tmpfs", 0, "size=64k"))
	must(t, unix.Mount("", private, "", unix.MS_PRIVATE, ""))
	bind := func(source, target string, p hooks.Propagation) hooks.Plan {
		return binds(hooks.Bind{Source: source, Target: target, Propagation: p})
	}
	device := func(source, target, access string) hooks.Plan {
		return devices(hooks.Device{Source: source, Target: target, Access: access})
	}
	exec, raw := NewExec(), NewRawExec()
	for _, c := range []struct {
		driver Driver
		plan   hooks.Plan
		kind   error
	}{
		{exec, bind(private, "/csi", hooks.Bidirectional), registry.ErrUnsupported},
		{exec, bind(private, "/csi", "sideways"), registry.ErrUnsupported},
		{exec, bind(private+"/none", "/csi", hooks.Private), registry.ErrInvalid},
		{exec, hooks.Plan{Dirs: []hooks.Dir{{Path: "relative"}}}, registry.ErrInvalid},
		{exec, device(private+"/none", "/x", "rw"), registry.ErrInvalid},
		{exec, device(private, "/x", "rw"), registry.ErrInvalid},
		{exec, device("/dev/zero", "/x", ""), registry.ErrInvalid},
		{exec, device("/dev/zero", "/x", "rx"), registry.ErrInvalid},
		{exec, rules(hooks.DeviceRule{Type: "a", Major: 1, Minor: 5, Access: "rw"}), registry.ErrInvalid},
		{exec, rules(charRule(1<<12, 5, "rw")), registry.ErrInvalid},
		{exec, rules(charRule(1, 5, "")), registry.ErrInvalid},
		{raw, bind(private, "/csi", hooks.Private), registry.ErrUnsupported},
		{raw, binds(hooks.Bind{Source: private, Target: private, ReadOnly: true}), registry.ErrUnsupported},
		{raw, hooks.Plan{Dirs: []hooks.Dir{{Path: "/made"}}}, registry.ErrUnsupported},
		{raw, device("/dev/null", "/dev/x", "rw"), registry.ErrUnsupported},
		{raw, device("/dev/null", "/dev/null", "r"), registry.ErrUnsupported},
	} {
		if err := refused(t, c.driver, c.plan); !errors.Is(err, c.kind) {
			t.Errorf("%s with %+v: %v; want %v", c.driver.Name(), c.plan, err, c.kind)
		}
	}
}

// refused starts a task with the plan and returns the error. Nothing may be left.
func refused(t *testing.T, d Driver, plan hooks.Plan) error {
	t.Helper()
	task := shell(t, `exit 0`)
	task.Plan = plan
	_, err := d.Start(t.Context(), task)
	if _, found, findErr := Find(t.Context(), task.Dir); found || findErr != nil {
		t.Errorf("%+v left a handle: %t, %v", plan, found, findErr)
	}
	wantNothingLeft(t, task.ID)
	return err
}

// A cgroup knows a device by its number, so a plan cannot give it twice with different access.
func TestContradictingDevicesAreRefused(t *testing.T) {
	needMounts(t)
	zero := func(at, access string) hooks.Device {
		return hooks.Device{Source: "/dev/zero", Target: at, Access: access}
	}
	for what, plan := range map[string]hooks.Plan{
		"two devices":    devices(zero("/a", "r"), zero("/b", "rw")),
		"a rule":         devices(zero("/a", "r")).And(rules(charRule(1, 5, "rw"))),
		"a rule for all": devices(zero("/a", "r")).And(rules(charRule(-1, -1, "w"))),
		"with /dev":      devices(zero("/b", "r")).And(hostDevices),
	} {
		err := refused(t, NewExec(), plan)
		if !errors.Is(err, registry.ErrUnsupported) ||
			!strings.Contains(err.Error(), "mount the volume with one access only") {
			t.Errorf("%s: %v", what, err)
		}
	}
}
