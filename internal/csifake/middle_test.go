package csifake

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"holdfast/internal/csifake/journal"
)

// mountsOn returns the mounts that the kernel has at a path.
func mountsOn(t *testing.T, path string) []*mountinfo.Info {
	t.Helper()
	all, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return m.Mountpoint != path, false })
	must(t, err)
	return all
}

func readOnly(t *testing.T, path string) bool {
	t.Helper()
	var st unix.Statfs_t
	must(t, unix.Statfs(path, &st))
	return st.Flags&unix.ST_RDONLY != 0
}

func (c *client) publishReadOnly(id string, p places) error {
	_, err := c.NodePublishVolume(c.t.Context(), &csi.NodePublishVolumeRequest{VolumeId: id,
		StagingTargetPath: p.staging,
		TargetPath:        p.target, VolumeCapability: writer(), Readonly: true})
	return err
}

// The plugin is slow, fails, dies or hangs after the first of two steps. The same call again, or its undo, by this
// plugin or the next one, repairs the state.
func TestInterruptedPublishIsRepeatedOrUndone(t *testing.T) {
	needMounts(t)
	for _, undo := range []bool{true, false} {
		for name, rule := range map[string]Rule{"crash": {Crash: true}, "code": {Code: "INTERNAL"},
			"drop": {Drop: true}} {
			t.Run(name, func(t *testing.T) {
				// a caller whose connection was cut cannot wait for the end of its call
				path := NewJournal(t, journal.Options{Settled: true, Strict: name != "drop"})
				fake, c := start(t, Config{Caps: []string{"STAGE_UNSTAGE"}, Mounts: true, DataDir: t.TempDir(),
					Journal: path})
				at := newPaths(t)
				cleanMounts(t, at)
				must(t, c.stage(t.Context(), "v1", at))
				fake.On("NodePublishVolume").Times(1).Middle().Rule(rule)
				if err := c.publishReadOnly("v1", at); err == nil {
					t.Fatal("it is OK")
				}
				if n := len(mountsOn(t, at.target)); n != 1 || readOnly(t, at.target) {
					t.Errorf("there are %d mounts, or it is read-only already", n)
				}
				if used, err := fake.Backend().Volumes(); err != nil || len(used["v1"].Published["node-1"]) > 0 {
					t.Errorf("the backend has it: %v, %v", used, err)
				}
				if name == "crash" {
					c = dial(t, "unix:"+Start(t, fake.Config()).Socket()).learn()
				}
				if !undo {
					retryAborted(t, func() error { return c.publishReadOnly("v1", at) })
					if len(mountsOn(t, at.target)) != 1 || !readOnly(t, at.target) {
						t.Error("the second time does not set it right")
					}
				}
				retryAborted(t, func() error { return c.unpublish(t.Context(), "v1", at) })
				must(t, c.unstage(t.Context(), "v1", at))
				if len(mountsOn(t, at.target)) != 0 {
					t.Error("a mount is left")
				}
			})
		}
	}
}

// Kill does not wait for a call that hangs between its steps. The next plugin finds the volume free.
func TestKillDoesNotWaitForACallInItsMiddle(t *testing.T) {
	fake, c := start(t, Config{Caps: []string{"STAGE_UNSTAGE"}})
	at, answer := newPaths(t), make(chan error, 1)
	fake.On("NodeStageVolume").Middle().HangForEver()
	go func() { answer <- c.stage(t.Context(), "v1", at) }()
	eventually(t, func() bool {
		calls, err := fake.Calls("NodeStageVolume")
		return err == nil && len(calls) == 1
	})
	fake.Kill()
	wantCode(t, <-answer, "UNAVAILABLE")
	_, c = start(t, fake.Config())
	must(t, c.unstage(t.Context(), "v1", at))
}
