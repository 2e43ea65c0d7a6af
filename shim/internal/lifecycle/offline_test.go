package lifecycle

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/internal/mount/mounttest"
	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/store"
)

// TestMain lets the test binary be the helper process that it starts itself, and runs these tests in a new mount
// namespace.
func TestMain(m *testing.M) {
	Helper()
	os.Exit(mounttest.Run(m))
}

// needsRoot skips the test unless it runs as root.
func needsRoot(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("mounts need root")
	}
}

func offlineOf(l hooks.Layout) Offline {
	return Offline{State: l.State, Run: l.Run, Logger: hclog.NewNullLogger()}
}

// writeState creates a state file with these records, in the form that a shim leaves.
func writeState(t *testing.T, path string, records ...registry.Record) {
	t.Helper()
	s, err := store.Open(t.Context(), store.Options{Path: path, Boot: "the boot of that time"})
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	registrytest.Put(t, s, records...)
	cancel()
	<-done
	must(t, s.Close())
}

// tmpfs mounts a tmpfs at a new directory, with a file in it.
func tmpfs(t *testing.T, at string) {
	t.Helper()
	must(t, os.MkdirAll(at, 0o700))
	must(t, unix.Mount("tmpfs", at, "tmpfs", 0, "size=64k"))
	must(t, os.WriteFile(filepath.Join(at, "mark"), nil, 0o600))
}

// running starts a process that runs until the test ends.
func running(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if _, err := out.Read(make([]byte, 1)); err != nil { // the process writes when it is ready
		t.Fatal(err)
	}
}

func sleeper() *exec.Cmd { return exec.Command("sh", "-c", "echo; exec sleep 1000") }

func staged(l hooks.Layout, name string) string {
	return filepath.Join(l.PluginRoot("ebs"), "stage", name)
}

// mounted returns the number of mounts at each path below the mount root.
func mounted(t *testing.T, l hooks.Layout) map[string]int {
	t.Helper()
	all, err := mount.Below(l.MountRoot())
	must(t, err)
	found := map[string]int{}
	for _, m := range all {
		if m.Point != l.MountRoot() {
			found[m.Point]++
		}
	}
	return found
}

// shared returns a layout whose mount root is in the state in which a shim leaves it.
func shared(t *testing.T) hooks.Layout {
	t.Helper()
	needsRoot(t)
	l := dirs(t)
	d, err := mount.NewManager(l)
	must(t, err)
	must(t, d.Share())
	return l
}

// uses has ways to use a mount. Each function returns when the mount is in use.
var uses = map[string]func(t *testing.T, at string){
	"working directory": func(t *testing.T, at string) {
		cmd := sleeper()
		cmd.Dir = at
		running(t, cmd)
	},
	"open file": func(t *testing.T, at string) {
		f, err := os.Open(filepath.Join(at, "mark"))
		must(t, err)
		defer f.Close()
		cmd := sleeper()
		cmd.Stdin = f
		running(t, cmd)
	},
	"mount inside": func(t *testing.T, at string) { tmpfs(t, filepath.Join(at, "inner")) },
}

// Half of a hundred mounts without a record, some of them stacks, are in use in various ways. A repair unmounts exactly
// the others.
func TestUsedUnknownMountsStay(t *testing.T) {
	l := shared(t)
	writeState(t, l.Database())
	var used []string
	for i := range 11 { // another mount namespace holds what is mounted by now
		used = append(used, staged(l, fmt.Sprint("namespace-", i)))
		tmpfs(t, used[i])
	}
	running(t, exec.Command("unshare", "-m", "--propagation", "private", "sh", "-c", "echo; exec sleep 1000"))
	for name, use := range uses {
		for i := range 13 {
			at := staged(l, strings.ReplaceAll(name, " ", "-")+fmt.Sprint(i))
			tmpfs(t, at)
			use(t, at)
			used = append(used, at)
		}
	}
	before := mounted(t, l)
	for i := range 50 {
		for range 1 + i%10/9*2 {
			tmpfs(t, filepath.Join(l.PluginRoot("ebs"), "publish", fmt.Sprint("free-", i), "v"))
		}
	}
	all := mounted(t, l)

	found, err := offlineOf(l).Examine(t.Context())
	must(t, err)
	var isUsed []string
	for _, f := range found.Findings {
		if f.Kind == registry.FoundUsed {
			isUsed = append(isUsed, f.Path)
		}
	}
	slices.Sort(used)
	if !slices.Equal(isUsed, used) || len(found.Findings) != 100 {
		t.Errorf("%d findings, used are\n%s\nwant\n%s", len(found.Findings), strings.Join(isUsed, "\n"),
			strings.Join(used, "\n"))
	}
	if now := mounted(t, l); !maps.Equal(now, all) {
		t.Fatal("an examination has changed the mount table")
	}

	repaired, err := offlineOf(l).Repair(t.Context(), found.Digest)
	must(t, err)
	for _, f := range repaired.Findings {
		if f.Action == registry.ActUnmount && f.Result != registry.RepairDone {
			t.Errorf("%s: %s", f, f.Result)
		}
	}
	if now := mounted(t, l); !maps.Equal(now, before) {
		t.Errorf("mounted is %v, want %v", now, before)
	}
	for _, at := range used {
		if _, err := os.Lstat(filepath.Join(at, "mark")); err != nil {
			t.Errorf("what is used was touched: %v", err)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(l.PluginRoot("ebs"), "publish", "*")); len(left) > 0 {
		t.Errorf("directories are left: %v", left)
	}
}

// inUse returns the records of a volume that is published for one alloc.
func inUse(l hooks.Layout, boot string) (records []registry.Record, at registry.Tree) {
	v := registry.Volume{State: registry.VolumeReady,
		VolumeSpec: registry.VolumeSpec{Namespace: "default", ID: "data", Plugin: "ebs",
			External: "ext-1"}}
	key := registry.ClaimKey{Volume: v.VolumeKey(), Alloc: "a1", Request: "vol"}
	root := registry.Tree{Host: l.PluginRoot("ebs"), Task: "/csi"}
	at = l.Target(key, root)
	u := registry.Usage{Access: registry.SingleNodeWriter, Attachment: registry.FileSystem}
	return []registry.Record{
		v, registry.Claim{Volume: key.Volume, Name: v.VolumeName(), Alloc: "a1", Request: "vol", Usage: u},
		registry.Staging{Volume: key.Volume, Name: v.VolumeName(), State: registry.MarkDone, Stages: true, Usage: u,
			Path: l.Staging(key.Volume, root), Boot: boot},
		registry.Ref{Volume: key.Volume, Alloc: "a1", Request: "vol", Usage: u, Target: at, Publish: registry.MarkDone,
			Boot: boot},
	}, at
}

func TestDoctorSaysThatTheStateIsRefused(t *testing.T) {
	l := shared(t)
	writeState(t, l.Database())
	if found, err := offlineOf(l).Examine(t.Context()); err != nil || len(found.Findings) > 0 {
		t.Errorf("found %v, %v", found.Findings, err)
	}
	must(t, os.Chmod(l.Database(), 0o644))
	found, err := offlineOf(l).Examine(t.Context())
	must(t, err)
	if len(found.Findings) != 1 || found.Findings[0].Kind != registry.FoundDamage ||
		!strings.Contains(found.Findings[0].Detail, "chmod 600 "+l.Database()) {
		t.Errorf("found %v", found.Findings)
	}
}

func TestDoctorFindsAMountOnASocketDirectory(t *testing.T) {
	l := shared(t)
	writeState(t, l.Database())
	at := l.SocketDir(registry.TaskKey{Alloc: "a1", Task: "p"})
	tmpfs(t, at)
	t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
	found, err := offlineOf(l).Examine(t.Context())
	must(t, err)
	if len(found.Findings) != 1 || found.Findings[0].Path != at || found.Findings[0].Action != registry.ActNothing {
		t.Errorf("found %v", found.Findings)
	}
}

// After a reboot no record counts as mounted.
func TestARebootIsNoticedOffline(t *testing.T) {
	l := shared(t)
	records, _ := inUse(l, "the boot of that time")
	writeState(t, l.Database(), records...)
	before, err := os.ReadFile(l.Database())
	must(t, err)
	found, err := offlineOf(l).Examine(t.Context())
	must(t, err)
	unseen := found.Unexamined()
	if rest := found.Findings[len(unseen):]; len(rest) != 2 || rest[0].Kind != registry.FoundRebooted ||
		rest[1].Kind != registry.FoundRebooted {
		t.Errorf("found %v", found.Findings)
	}
	if after, err := os.ReadFile(l.Database()); err != nil || !bytes.Equal(after, before) {
		t.Errorf("an examination has written to the state (%v)", err)
	}
	repaired, err := offlineOf(l).Repair(t.Context(), found.Digest)
	must(t, err)
	if !repaired.Clean() {
		t.Errorf("%+v", repaired.Findings)
	}
	if again, err := offlineOf(l).Examine(t.Context()); err != nil || len(again.Findings) > len(unseen) ||
		len(unseen) != 1 {
		t.Errorf("found again: %v, %v", again.Findings, err)
	}
	if _, err := offlineOf(l).Repair(t.Context(), found.Digest); !errors.Is(err, registry.ErrConflict) {
		t.Errorf("the old plan: %v", err)
	}
}

// An offline command fails with the reason and changes nothing if the state is damaged, is gone or never existed, or if
// a shim runs.
func TestRefusedOfflineCommands(t *testing.T) {
	l := shared(t)
	stray := staged(l, "stray")
	tmpfs(t, stray)
	rubbish := bytes.Repeat([]byte("rubbish "), 8192)
	must(t, os.WriteFile(l.Database(), rubbish, 0o600))
	names := listing(t, l.State)
	for what, look := range map[string]func() error{
		"examine": func() error { _, err := offlineOf(l).Examine(t.Context()); return err },
		"repair":  func() error { _, err := offlineOf(l).Repair(t.Context(), ""); return err },
	} {
		if err := look(); !errors.Is(err, registry.ErrDamaged) ||
			!strings.Contains(err.Error(), l.Database()+" is damaged") {
			t.Errorf("%s of a damaged state: %v", what, err)
		}
	}
	if now, err := os.ReadFile(l.Database()); err != nil || !bytes.Equal(now, rubbish) ||
		!slices.Equal(listing(t, l.State), names) ||
		mounted(t, l)[stray] != 1 {
		t.Errorf("something was touched: %v, %v, %v", err, listing(t, l.State), mounted(t, l))
	}

	must(t, os.Remove(l.Database()))
	if d, err := offlineOf(l).Examine(t.Context()); err != nil || len(d.Findings) != 1 ||
		d.Findings[0].Kind != registry.FoundOrphan {
		t.Errorf("a state that is gone: %v, %v", d.Findings, err)
	}
	if _, err := offlineOf(l).Repair(t.Context(), ""); !errors.Is(err, registry.ErrNotFound) ||
		len(listing(t, l.State)) != len(names)-1 {
		t.Errorf("repair of a state that is gone: %v", err)
	}
	empty := dirs(t)
	for _, state := range []string{empty.State, filepath.Join(empty.State, "none")} {
		if _, err := (Offline{State: state, Logger: hclog.NewNullLogger()}).Examine(t.Context()); !errors.Is(err,
			registry.ErrNotFound) ||
			!strings.Contains(err.Error(), state) {
			t.Errorf("%s: %v", state, err)
		}
	}

	p := newProcess(t)
	p.activate(l)
	d, err := offlineOf(l).Examine(t.Context())
	if err != nil || !slices.ContainsFunc(d.Findings, func(f registry.Finding) bool {
		return strings.Contains(f.Detail, "a shim runs")
	}) {
		t.Errorf("while a shim runs: %v, %v", d.Findings, err)
	}
	if _, err := offlineOf(l).Repair(t.Context(), d.Digest); !errors.Is(err, registry.ErrConflict) ||
		!strings.Contains(err.Error(), "a shim runs with this state") {
		t.Errorf("repair while a shim runs: %v", err)
	}
	if mounted(t, l)[stray] != 1 {
		t.Error("something was unmounted")
	}
}

func listing(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}
