package taskdriver

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/registry"
)

// What is granted can be read and written, and nothing else can, by whatever node.
func TestBlockDeviceIsTheTasks(t *testing.T) {
	for how := range publishes {
		t.Run(how, func(t *testing.T) {
			mine, other := newDisk(t, how), newDisk(t, how)
			script := tools + `
				test -b /dev/data
				try "read mine" reads /dev/data; try "write mine" writes /dev/data of-the-task
				try "read other" reads ` + other.dev + `; try "write other" writes ` + other.dev + ` of-the-task
				own x b ` + other.number + `; try "read a node of other" reads /local/x/node`
			task := shell(t, script)
			task.Plan = mine.asShimMakesIt(t, true, false)
			h := start(t, NewExec(), task)
			wait(t, NewExec(), h)
			const no = ": no, Operation not permitted"
			said(t, logs(t, NewExec(), h, Stdout),
				"read mine: yes", "write mine: yes", "read other"+no, "write other"+no, "read a node of other"+no)
			if mine.begins(t) != "of-the-task" || other.begins(t) != "of-the-host-----" {
				t.Errorf("the disks begin with %q and %q", mine.begins(t), other.begins(t))
			}
			if len(h.Warnings) > 0 || exists("/dev/data") {
				t.Errorf("warnings %q, the host has the task's node: %t", h.Warnings, exists("/dev/data"))
			}
			// The control: without devices in its plan a task keeps all. It could have done it.
			task = shell(t, strings.ReplaceAll(script, "/dev/data", mine.dev))
			said(t, run(t, NewExec(), task), "read mine: yes", "write mine: yes", "read other: yes", "write other: yes", "read a node of other: yes")
		})
	}
}

// Read-only holds for root, for a node that it makes itself, and for what it opens for both.
func TestBlockDeviceIsReadOnly(t *testing.T) {
	d := newDisk(t, "bind")
	task := shell(t, tools+`
		try read reads /dev/data; try write writes /dev/data of-the-task; chmod 666 /dev/data 2> /dev/null || true
		try both opens /dev/data
		own x b `+d.number+`; try "write a node of it" writes /local/x/node of-the-task
		try "mount it" mount -t ext4 /dev/data /mnt`)
	task.Plan = d.asShimMakesIt(t, true, true)
	out := run(t, NewExec(), task)
	for _, want := range []string{
		"read: yes\n", "write: no, Operation not permitted\n", "both: no, ", "write a node of it: no, Operation not permitted\n",
		"mount it: no, ",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("not %q:\n%s", want, out)
		}
	}
	if d.begins(t) != "of-the-host-----" {
		t.Errorf("the disk begins with %q", d.begins(t))
	}
}

// The node belongs to the user that the task runs as, in the task alone.
func TestBlockDeviceOfAUser(t *testing.T) {
	d := newDisk(t, "node")
	task := shell(t, tools+`try read reads /dev/data; try write writes /dev/data of-the-task; stat -c %a:%u /dev/data`)
	task.User, task.Plan = "65534:65534", d.asShimMakesIt(t, true, false)
	said(t, run(t, NewExec(), task), "read: yes", "write: yes", "600:65534")
	var st unix.Stat_t
	if err := unix.Stat(d.target, &st); err != nil || st.Uid != 0 {
		t.Errorf("the plugin's node belongs to %d, %v", st.Uid, err)
	}
}

// Who gets one device keeps what every program needs, and loses the rest.
func TestConfinedTasksHaveTheUsualDevices(t *testing.T) {
	d := newDisk(t, "bind")
	task := shell(t, tools+`
		for n in zero full random urandom; do try $n reads /dev/$n; done
		for n in null ptmx; do try $n opens /dev/$n; done
		try kmsg opens /dev/kmsg; try loop-control reads /dev/loop-control; own x c 1:1; try mem reads /local/x/node`)
	task.Plan = d.asShimMakesIt(t, true, false)
	const no = ": no, Operation not permitted"
	said(t, run(t, NewExec(), task),
		"zero: yes", "full: yes", "random: yes", "urandom: yes", "null: yes", "ptmx: yes", "kmsg"+no, "loop-control"+no, "mem"+no)
}

func TestTaskWithHostDevicesIsNotConfined(t *testing.T) {
	d, other := newDisk(t, "bind"), newDisk(t, "bind")
	task := shell(t, tools+`try "read other" reads `+other.dev+`; try "write other" writes `+other.dev+` of-the-task; try read reads /dev/data`)
	task.Plan = hostDevices.And(d.asShimMakesIt(t, true, false))
	said(t, run(t, NewExec(), task), "read other: yes", "write other: yes", "read: yes")
}

// A rule without a device is as good: it covers what appears later.
func TestRulesGiveDevicesWithoutANode(t *testing.T) {
	d := newDisk(t, "node")
	task := shell(t, tools+`
		own x b `+d.number+`; try read reads /local/x/node; try write writes /local/x/node of-the-task
		try loop-control reads /dev/loop-control`)
	task.Plan = hooks.Plan{Rules: []hooks.DeviceRule{
		{Type: "b", Major: 7, Minor: -1, Access: "r"}, {Type: "c", Major: -1, Minor: 237, Access: "rw"},
	}}
	said(t, run(t, NewExec(), task), "read: yes", "write: no, Operation not permitted", "loop-control: no, Invalid argument")
}

// The agent that started the task is killed, another one adopts it: what the task may do stays as it was.
func TestDeviceRulesSurviveAdoption(t *testing.T) {
	mine, other := newDisk(t, "bind"), newDisk(t, "bind")
	f := newFifos(t)
	task := shell(t, tools+`
		echo > `+f.dir+`/ready; cat `+f.dir+`/go > /dev/null
		{ try "write mine" writes /dev/data of-the-task; try "read other" reads `+other.dev+`; } > /local/said
		echo > `+f.dir+`/ready; exec sleep 1000`)
	task.Plan = mine.asShimMakesIt(t, true, false)
	h := startElsewhere(t, NewExec(), task, f)
	if alive, err := NewExec().Adopt(t.Context(), h); !alive || err != nil {
		t.Fatalf("alive %t, %v", alive, err)
	}
	f.goOn(t)
	f.reached(t)
	b, _ := os.ReadFile(task.Dir + "/local/said")
	said(t, string(b), "write mine: yes", "read other: no, Operation not permitted")
	ended(t, h)
}

// The parent of a task may be killed before the task is: it is confined until its own end.
func TestDeviceRulesOutliveTheParent(t *testing.T) {
	mine, other := newDisk(t, "bind"), newDisk(t, "bind")
	f := newFifos(t)
	task := shell(t, tools+`
		echo > `+f.dir+`/ready; cat `+f.dir+`/go > /dev/null
		try "read other" reads `+other.dev+` > /local/said; echo > `+f.dir+`/ready; exec sleep 1000`)
	task.Plan = mine.asShimMakesIt(t, true, false)
	h := start(t, NewExec(), task)
	f.reached(t)
	if err := unix.Kill(h.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	reaped(t, h)
	f.goOn(t)
	f.reached(t)
	b, _ := os.ReadFile(task.Dir + "/local/said")
	said(t, string(b), "read other: no, Operation not permitted")
	ended(t, h)
}

// The rules are the group's, which outlives whoever made it: its list in version 1, in version 2 one program that no link holds.
func TestTheRulesAreTheGroups(t *testing.T) {
	d := newDisk(t, "bind")
	task := shell(t, `exec sleep 1000`)
	task.Plan = d.asShimMakesIt(t, true, true)
	h := start(t, NewExec(), task)
	i := slices.IndexFunc(h.Cgroups, func(dir string) bool { return exists(dir + "/devices.list") })
	if i >= 0 {
		list, _ := os.ReadFile(h.Cgroups[i] + "/devices.list")
		if s := string(list); !strings.Contains(s, "b "+d.number+" r\n") || !strings.Contains(s, "c 136:* rwm\n") || strings.Contains(s, "a ") {
			t.Errorf("the group allows %s", list)
		}
		return
	}
	if i = slices.IndexFunc(h.Cgroups, func(dir string) bool { return exists(dir + "/cgroup.controllers") }); i < 0 {
		t.Fatalf("there is no cgroup for devices: %q, %q", h.Cgroups, h.Warnings)
	}
	if all := programs(t, h.Cgroups[i]); len(all.Programs) != 1 || all.HaveLinkInfo() {
		t.Errorf("the group has %+v", all)
	}
}

// A start that fails after the rules are applied leaves neither group nor program.
func TestFailedStartsLeaveNoDeviceRules(t *testing.T) {
	d := newDisk(t, "bind")
	task := shell(t, `exit 0`)
	task.Command, task.Plan = "no-such-program", d.asShimMakesIt(t, true, false)
	if _, err := NewExec().Start(t.Context(), task); !errors.Is(err, registry.ErrNotFound) {
		t.Errorf("got %v", err)
	}
	noGroups(t, task.ID)
}

// A raw_exec task has the host's paths: its plan holds no device, but tells it where the volume is.
func TestRawExecIsToldWhereItsDeviceIs(t *testing.T) {
	d := newDisk(t, "bind")
	task := shell(t, `
		echo "$HOLDFAST_VOLUME_DATA"
		echo of-the-task | dd of="$HOLDFAST_VOLUME_DATA" bs=16 conv=notrunc,sync,fsync status=none`)
	task.Plan = d.asShimMakesIt(t, false, false)
	if len(task.Plan.Devices)+len(task.Plan.Rules)+len(task.Plan.Binds) > 0 {
		t.Errorf("the plan is %+v", task.Plan)
	}
	task.Plan = task.Plan.And(rules(hooks.DeviceRule{Type: "c", Major: 1, Minor: 3, Access: "rw"})) // nothing is denied, so it asks for nothing
	said(t, run(t, NewRawExec(), task), d.target)
	if d.begins(t) != "of-the-task" {
		t.Errorf("the disk begins with %q", d.begins(t))
	}
}

// An orchestrator that is confined itself cannot give what it has not, and says so before anything runs.
func TestDevicesThatTheOrchestratorLacks(t *testing.T) {
	d := newDisk(t, "bind")
	own := newCgroup("confined-orchestrator-" + itoa(os.Getpid()))
	t.Cleanup(func() {
		if err := removeCgroups(own.dirs()); err != nil {
			t.Error(err)
		}
	})
	if own.devices == "" {
		t.Skip("version 2 does not tell: the task starts, and its cgroup and the orchestrator's both have to allow what it opens")
	}
	if err := writeRule(own.devices, "devices.deny", "b 7:* rwm"); err != nil {
		t.Fatal(err)
	}
	task := shell(t, `exit 0`)
	task.Plan = d.asShimMakesIt(t, true, false)
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
	noGroups(t, task.ID)
}

// Where no cgroup can be had, a user's own namespace, the notes say that nothing is enforced.
func TestDevicesWithoutCgroups(t *testing.T) {
	if os.Getenv(roleEnv) != inside {
		t.Skip("there are cgroups here; TestUserNamespace runs this test where there are none")
	}
	task := shell(t, `head -c 4 /dev/of-plan/zero | od -An -tx1; echo > /dev/null`)
	task.Plan = hooks.Plan{
		Devices: []hooks.Device{{Source: "/dev/zero", Target: "/dev/of-plan/zero", Access: "r"}},
		Rules:   []hooks.DeviceRule{{Type: "c", Major: 1, Minor: 3, Access: "rw"}},
	}
	h := start(t, NewExec(), task)
	wait(t, NewExec(), h)
	said(t, logs(t, NewExec(), h, Stdout), "00 00 00 00")
	if !strings.Contains(strings.Join(h.Warnings, "; "), "not enforced") {
		t.Errorf("warnings: %q", h.Warnings)
	}
}
