package taskdriver

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/registry"
)

// disk is a published loop device. The tests read its image file to see what was written.
type disk struct {
	image  string
	dev    string // the loop device
	target string // the published device
	number string // 7:N
}

// publishers are the two ways of publishing a block volume that CSI allows.
var publishers = map[string]func(dev, target string) error{
	"bind": func(dev, target string) error {
		return errors.Join(os.WriteFile(target, nil, 0o600), unix.Mount(dev, target, "", unix.MS_BIND, ""))
	},
	"node": func(dev, target string) error {
		var st unix.Stat_t
		err := unix.Stat(dev, &st)
		return errors.Join(err, unix.Mknod(target, unix.S_IFBLK|0o600, int(st.Rdev)))
	},
}

const hostData = "of-the-host-----"

// newDisk skips the test where loop devices are not available.
func newDisk(t *testing.T, publisher string) disk {
	t.Helper()
	needMounts(t)
	if os.Getuid() != 0 || os.Getenv(roleEnv) == userNSRole {
		t.Skip("only root on the host can set up loop devices")
	}
	dir := tempDir(t)
	d := disk{image: dir + "/image", target: dir + "/target"}
	must(t, os.WriteFile(d.image, bytes.Repeat([]byte(hostData), 1<<16), 0o600))
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
	must(t, publishers[publisher](d.dev, d.target))
	d.number = "7:" + strings.TrimPrefix(d.dev, "/dev/loop")
	return d
}

// wantContent checks the first 16 bytes of the image.
func (d disk) wantContent(t *testing.T, want string) {
	t.Helper()
	b, err := os.ReadFile(d.image)
	must(t, err)
	if got := strings.Trim(string(b[:16]), "\x00\n"); got != want {
		t.Errorf("the disk holds %q, want %q", got, want)
	}
}

// plan returns the shim's plan for a task that mounts the disk as /dev/data.
func (d disk) plan(t *testing.T, isolated, readOnly bool) hooks.Plan {
	t.Helper()
	use := registry.Usage{Access: registry.SingleNodeWriter, Attachment: registry.BlockDevice}
	n, err := mount.NumberOf(d.target)
	must(t, err)
	plans, err := hooks.Mounts(hooks.GroupSpec{
		Volumes: []hooks.VolumeRequest{{Name: "data", Usage: use}},
		Mounts:  map[string][]hooks.VolumeMount{"t": {{Volume: "data", Destination: "/dev/data", ReadOnly: readOnly}}},
	}, map[registry.RequestName]hooks.Published{"data": {
		Target: registry.Tree{Host: d.target}, Usage: use,
		Device: hooks.DeviceNumber{Major: int64(n.Major), Minor: int64(n.Minor)},
	}}, map[string]bool{"t": isolated})
	must(t, err)
	return plans["t"]
}

// tools has functions for the scripts of these tests. try prints whether a command works.
const tools = `
	try() {
		what=$1; shift
		if "$@" 2> /local/why; then echo "$what: yes"; else echo "$what: no, $(sed 's/.*: //' /local/why)"; fi
	}
	reads() { dd if="$1" of=/dev/null bs=512 count=1 status=none; }
	opens() { true 3<> "$1"; }
	writes() { echo "of-the-task" | dd of="$1" bs=16 count=1 conv=notrunc,sync,fsync status=none; }
	own() { mkdir "/local/$1"; mount -t tmpfs own "/local/$1"; mknod "/local/$1/node" $2 ${3%:*} ${3#*:}; }
`

const denied = ": no, Operation not permitted"

func TestTaskOwnsItsBlockDevice(t *testing.T) {
	for publisher := range publishers {
		t.Run(publisher, func(t *testing.T) {
			mine, other := newDisk(t, publisher), newDisk(t, publisher)
			script := tools + `
				try "read mine" reads /dev/data; try "write mine" writes /dev/data
				try "read other" reads ` + other.dev + `; try "write other" writes ` + other.dev + `
				own x b ` + other.number + `; try "read a node of other" reads /local/x/node`
			task := shell(t, script)
			task.Plan = mine.plan(t, true, false)
			h := start(t, NewExec(), task)
			wait(t, NewExec(), h)
			wantLines(t, logs(t, NewExec(), h, Stdout),
				"read mine: yes", "write mine: yes", "read other"+denied, "write other"+denied,
				"read a node of other"+denied)
			mine.wantContent(t, "of-the-task")
			other.wantContent(t, hostData)
			if len(h.Warnings) > 0 || exists("/dev/data") {
				t.Errorf("warnings %q, the host has the task's node: %t", h.Warnings, exists("/dev/data"))
			}
			// The control: a task without devices in its plan has all.
			out := run(t, NewExec(), shell(t, strings.ReplaceAll(script, "/dev/data", mine.dev)))
			wantLines(t, out, "read mine: yes", "write mine: yes", "read other: yes", "write other: yes",
				"read a node of other: yes")
		})
	}
}

// Read-only also holds for root, for a node that the task makes, and for an open for both reading and writing.
func TestBlockDeviceIsReadOnly(t *testing.T) {
	d := newDisk(t, "bind")
	task := shell(t, tools+`
		try read reads /dev/data; try write writes /dev/data; chmod 666 /dev/data 2> /dev/null || true
		try both opens /dev/data
		own x b `+d.number+`; try "write a node of it" writes /local/x/node
		try "mount it" mount -t ext4 /dev/data /mnt`)
	task.Plan = d.plan(t, true, true)
	out := run(t, NewExec(), task)
	for _, want := range []string{"read: yes\n", "write" + denied, "both: no, ", "write a node of it" + denied,
		"mount it: no, "} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q:\n%s", want, out)
		}
	}
	d.wantContent(t, hostData)
}

// Each task is confined to its plan.
func TestDevicesOfPlan(t *testing.T) {
	mounted := func(t *testing.T, d disk) hooks.Plan { return d.plan(t, true, false) }
	for name, c := range map[string]struct {
		script string // DISK is the loop device, NUMBER its number
		user   string
		plan   func(*testing.T, disk) hooks.Plan
		want   []string
	}{
		"a user owns the node in the task": {
			`try read reads /dev/data; try write writes /dev/data; stat -c %a:%u /dev/data`,
			"65534:65534", mounted, []string{"read: yes", "write: yes", "600:65534"},
		},
		"default devices only": {
			`for n in zero full random urandom; do try $n reads /dev/$n; done
			for n in null ptmx kmsg; do try $n opens /dev/$n; done
			try loop-control reads /dev/loop-control; own x c 1:1; try mem reads /local/x/node`, "", mounted,
			[]string{
				"zero: yes", "full: yes", "random: yes", "urandom: yes", "null: yes", "ptmx: yes",
				"kmsg" + denied, "loop-control" + denied, "mem" + denied,
			},
		},
		"all devices with the host's /dev": {
			`try read reads DISK; try write writes DISK; try data reads /dev/data`, "",
			func(t *testing.T, d disk) hooks.Plan { return hostDevices.And(d.plan(t, true, false)) },
			[]string{"read: yes", "write: yes", "data: yes"},
		},
		"rules without devices": {
			`own x b NUMBER; try read reads /local/x/node; try write writes /local/x/node
			try loop-control reads /dev/loop-control`, "",
			func(*testing.T, disk) hooks.Plan {
				return rules(hooks.DeviceRule{Type: "b", Major: 7, Minor: -1, Access: "r"},
					hooks.DeviceRule{Type: "c", Major: -1, Minor: 237, Access: "rw"})
			},
			[]string{"read: yes", "write" + denied, "loop-control: no, Invalid argument"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDisk(t, "node")
			task := shell(t, tools+strings.NewReplacer("DISK", d.dev, "NUMBER", d.number).Replace(c.script))
			task.User, task.Plan = c.user, c.plan(t, d)
			wantLines(t, run(t, NewExec(), task), c.want...)
		})
	}
}

// The rules hold when the agent or the parent is killed, until the task ends.
func TestDeviceRulesSurviveAdoption(t *testing.T) {
	for _, killed := range []string{"agent", "parent"} {
		t.Run(killed, func(t *testing.T) {
			mine, other := newDisk(t, "bind"), newDisk(t, "bind")
			f := newFifos(t)
			task := shell(t, tools+f.ready+f.wait+`
				{ try "write mine" writes /dev/data; try "read other" reads `+other.dev+`; } > /local/said
				`+f.ready+` exec sleep 1000`)
			task.Plan = mine.plan(t, true, false)
			var h Handle
			if killed == "agent" {
				h = startElsewhere(t, NewExec(), task, f)
			} else {
				h = start(t, NewExec(), task)
				f.awaitReady(t)
				killParent(t, h)
			}
			wantAlive(t, NewExec(), h, true)
			f.release(t)
			f.awaitReady(t)
			b, _ := os.ReadFile(task.Dir + "/local/said")
			wantLines(t, string(b), "write mine: yes", "read other"+denied)
		})
	}
}

// A raw_exec task gets the path of its device in a variable. The other parts of such a plan have no effect.
func TestRawExecTakesPlansMadeForIt(t *testing.T) {
	d, dir := newDisk(t, "bind"), tempDir(t)
	task := shell(t, `
		echo "$HOLDFAST_VOLUME_DATA $CSI_ENDPOINT $OWN"
		echo of-the-task | dd of="$HOLDFAST_VOLUME_DATA" bs=16 conv=notrunc,sync,fsync status=none`)
	task.Env = []string{"OWN=mine"}
	task.Plan = d.plan(t, false, false)
	if len(task.Plan.Devices)+len(task.Plan.Rules)+len(task.Plan.Binds) > 0 {
		t.Errorf("the plan is %+v", task.Plan)
	}
	task.Plan = task.Plan.And(rules(charRule(1, 3, "rw"))).And(hooks.Plan{
		Binds: []hooks.Bind{{Source: dir, Target: dir, Propagation: hooks.Bidirectional}},
		Env: []hooks.Env{{Name: "CSI_ENDPOINT", Value: "unix:///run/x.sock", Default: true},
			{Name: "OWN", Value: "plan's", Default: true}},
	})
	wantLines(t, run(t, NewRawExec(), task), d.target+" unix:///run/x.sock mine")
	d.wantContent(t, "of-the-task")
}

// An orchestrator that is itself confined cannot give a task devices that it lacks.
func TestDevicesThatTheOrchestratorLacks(t *testing.T) {
	d := newDisk(t, "bind")
	own := newCgroup("confined-orchestrator-"+strconv.Itoa(os.Getpid()), Resources{}, true)
	t.Cleanup(func() { must(t, removeCgroups(own.dirs())) })
	if own.devices == "" {
		t.Skip("version 2 starts the task, and checks both cgroups when it opens a device")
	}
	must(t, writeRule(own.devices, "devices.deny", "b 7:* rwm"))
	task := shell(t, `exit 0`)
	task.Plan = d.plan(t, true, false)
	err := mount.OnThread(func() error {
		if err := writeExisting(filepath.Join(own.devices, "tasks"), "0"); err != nil {
			return err
		}
		_, err := NewExec().Start(t.Context(), task) // the parent is a child of this thread
		return err
	})
	if !errors.Is(err, registry.ErrDenied) || !strings.Contains(err.Error(), "b "+d.number+" rw") {
		t.Errorf("got %v", err)
	}
	wantNothingLeft(t, task.ID)
}

// zeroAt returns a plan with /dev/zero at another path.
func zeroAt(access string) hooks.Plan {
	return devices(hooks.Device{Source: "/dev/zero", Target: "/dev/of-plan/zero", Access: access})
}

// wantUnconfined runs a task whose devices cannot be confined.
func wantUnconfined(t *testing.T, plan hooks.Plan) {
	t.Helper()
	task := shell(t, `head -c 4 /dev/of-plan/zero | od -An -tx1; echo > /dev/null`)
	task.Plan = plan
	h := start(t, NewExec(), task)
	wait(t, NewExec(), h)
	wantLines(t, logs(t, NewExec(), h, Stdout), "00 00 00 00")
	if !strings.Contains(strings.Join(h.Warnings, "; "), "device access is not enforced") {
		t.Errorf("warnings: %q", h.Warnings)
	}
}

func TestDevicesInUserNamespaceAreNotConfined(t *testing.T) {
	if os.Getenv(roleEnv) != userNSRole {
		t.Skip("TestTasksInUserNamespace runs this test")
	}
	wantUnconfined(t, zeroAt("r"))
}

// Without any cgroup, a task whose plan restricts a device is refused outside a user namespace. A task with other
// devices gets a warning.
func TestDevicesWithoutAnyCgroup(t *testing.T) {
	if os.Getenv(roleEnv) == "" && os.Getuid() == 0 {
		again(t, noCgroupsRole, "^TestDevicesWithoutAnyCgroup$", "TestDevicesWithoutAnyCgroup")
		return
	}
	if os.Getenv(roleEnv) != noCgroupsRole {
		t.Skip("only root can unmount cgroups, once")
	}
	task := shell(t, `exit 0`)
	task.Plan = zeroAt("r")
	_, err := NewExec().Start(t.Context(), task)
	if !errors.Is(err, registry.ErrUnsupported) ||
		!strings.Contains(err.Error(), "give the orchestrator a writable cgroup") {
		t.Errorf("read-only: %v", err)
	}
	wantUnconfined(t, zeroAt("rw"))
}

// TestDevicesWithVersion2 runs device tests without cgroups of version 1.
func TestDevicesWithVersion2(t *testing.T) {
	if os.Getenv(roleEnv) != "" {
		t.Skip("this is the inner run")
	}
	if os.Getuid() != 0 {
		t.Skip("only root can unmount cgroups")
	}
	if len(mountLines(t, " - cgroup2 ")) == 0 {
		t.Skip("no cgroup version 2 is mounted here")
	}
	if err := features.HaveProgramType(ebpf.CGroupDevice); errors.Is(err, ebpf.ErrNotSupported) {
		t.Skipf("this kernel has no device programs: %v", err)
	}
	if len(mountLines(t, " - cgroup ")) == 0 {
		t.Skip("no cgroup version 1 here: the other tests run with version 2")
	}
	again(t, version2Role, "Device|Survives|Leaked/exec",
		"TestTaskOwnsItsBlockDevice", "TestBlockDeviceIsReadOnly", "TestDeviceRulesSurviveAdoption")
}

// again runs tests in another process with a mount namespace of its own, and checks that the named ones pass.
func again(t *testing.T, role, tests string, pass ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.v", "-test.run="+tests)
	cmd.Env = append(os.Environ(), roleEnv+"="+role)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", role, err, out)
	}
	for _, name := range pass {
		if !strings.Contains(string(out), "--- PASS: "+name+" ") {
			t.Errorf("%s has not passed:\n%s", name, out)
		}
	}
}

// unmountCgroups unmounts cgroup file systems in this process's mount namespace only.
func unmountCgroups(types ...string) {
	err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, "")
	table, tableErr := mount.Table(0)
	for _, m := range table {
		if slices.Contains(types, m.FSType) {
			err = errors.Join(err, unix.Unmount(m.Point, unix.MNT_DETACH))
		}
	}
	if err := errors.Join(err, tableErr); err != nil {
		panic(err)
	}
}
