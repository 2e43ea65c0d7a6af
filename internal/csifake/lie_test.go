package csifake

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"holdfast/internal/csifake/journal"
)

// mountsOn is what the kernel has at a path.
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

// liar is a plugin that has staged v1 and tells a lie once.
func liar(t *testing.T, lie Lie, rpc string) (*Plugin, *client, places) {
	t.Helper()
	fake := Start(t, Config{Caps: []string{"STAGE_UNSTAGE"}, Mounts: true, DataDir: t.TempDir()})
	c, at := dial(t, fake.Socket()).learn(), makePlaces(t)
	cleanMounts(t, at)
	cleanMounts(t, places{Beside(at.staging), Beside(at.target)})
	if rpc != "NodeStageVolume" {
		must(t, c.stage(t.Context(), "v1", at))
	}
	fake.On(rpc).Times(1).Lie(lie)
	return fake, c, at
}

func (c *client) publishReadOnly(id string, p places) error {
	_, err := c.NodePublishVolume(c.t.Context(), &csi.NodePublishVolumeRequest{VolumeId: id,
		StagingTargetPath: p.staging,
		TargetPath:        p.target, VolumeCapability: writer(), Readonly: true})
	return err
}

// inBackend tells whether the backend has v1 staged and published.
func inBackend(t *testing.T, fake *Plugin) (staged, published bool) {
	t.Helper()
	used, err := fake.Backend().Volumes()
	must(t, err)
	return used["v1"].Staged["node-1"] != "", len(used["v1"].Published["node-1"]) > 0
}

// TestLiesOfPublish: it answers OK, and the mount table has something else.
func TestLiesOfPublish(t *testing.T) {
	needMounts(t)
	cases := map[Lie]func(t *testing.T, at places){
		"": func(t *testing.T, at places) {
			if n := len(mountsOn(t, at.target)); n != 1 || !readOnly(t, at.target) {
				t.Errorf("an honest plugin makes %d mounts", n)
			}
		},
		NoEffect: func(t *testing.T, at places) {
			if _, err := os.Lstat(at.target); !os.IsNotExist(err) {
				t.Errorf("the target is there: %v", err)
			}
		},
		NoMount: func(t *testing.T, at places) {
			if st, err := os.Lstat(at.target); err != nil || !st.IsDir() || len(mountsOn(t, at.target)) != 0 {
				t.Errorf("the target is no bare directory: %v, %v", st, err)
			}
		},
		Elsewhere: func(t *testing.T, at places) {
			if len(mountsOn(t, at.target)) != 0 || len(mountsOn(t, Beside(at.target))) != 1 {
				t.Error("it is not elsewhere")
			}
		},
		Symlink: func(t *testing.T, at places) {
			if to, err := os.Readlink(at.target); err != nil || to != Beside(at.target) || len(mountsOn(t, to)) != 1 {
				t.Errorf("the target leads to %q, %v", to, err)
			}
		},
		WrongData: func(t *testing.T, at places) {
			if _, err := os.Lstat(filepath.Join(at.target, "mine")); !os.IsNotExist(err) ||
				len(mountsOn(t, at.target)) != 1 {
				t.Errorf("it is the right data: %v", err)
			}
		},
		Stacked: func(t *testing.T, at places) {
			if n := len(mountsOn(t, at.target)); n != 2 {
				t.Errorf("there are %d mounts", n)
			}
		},
		Writable: func(t *testing.T, at places) {
			if len(mountsOn(t, at.target)) != 1 || readOnly(t, at.target) {
				t.Error("it is read-only")
			}
		},
	}
	for lie, check := range cases {
		t.Run(string(lie), func(t *testing.T) {
			fake, c, at := liar(t, lie, "NodePublishVolume")
			must(t, os.WriteFile(filepath.Join(at.staging, "mine"), nil, 0o600))
			must(t, c.publishReadOnly("v1", at))
			check(t, at)
			if _, published := inBackend(t, fake); published != (lie != NoEffect) {
				t.Errorf("published in the backend is %v", published)
			}
			calls, err := fake.Calls("NodePublishVolume")
			must(t, err)
			if end := calls[0].End; end.Code != "OK" || end.Effect != (lie == "" || lie == Stacked) {
				t.Errorf("the journal has %+v", end)
			}
			must(t, c.unpublish(t.Context(), "v1", at), c.unstage(t.Context(), "v1", at)) // honest: all is gone
			for _, path := range []string{at.target, at.staging, Beside(at.target)} {
				if n := len(mountsOn(t, path)); n != 0 {
					t.Errorf("%d mounts are left at %s", n, path)
				}
			}
			if _, err := os.Lstat(at.target); !os.IsNotExist(err) {
				t.Errorf("the target is left: %v", err)
			}
		})
	}
	if len(cases) != len(liesOf("NodePublishVolume"))+1 {
		t.Errorf("publish lies %v", liesOf("NodePublishVolume"))
	}
}

func liesOf(rpc string) (all []Lie) {
	for l := range lies {
		if l.fits(rpc) {
			all = append(all, l)
		}
	}
	return all
}

// TestLiesOfStage: it answers OK, and the staging path has something else.
func TestLiesOfStage(t *testing.T) {
	needMounts(t)
	cases := map[Lie][2]int{"": {1, 0}, NoEffect: {0, 0}, NoMount: {0, 0}, Elsewhere: {0, 1}, Stacked: {2, 0},
		WrongData: {1, 0}}
	for lie, want := range cases {
		t.Run(string(lie), func(t *testing.T) {
			fake, c, at := liar(t, lie, "NodeStageVolume")
			must(t, c.stage(t.Context(), "v1", at))
			if got := [2]int{len(mountsOn(t, at.staging)), len(mountsOn(t, Beside(at.staging)))}; got != want {
				t.Errorf("%v mounts at the path and beside it, want %v", got, want)
			}
			if staged, _ := inBackend(t, fake); staged != (lie != NoEffect) {
				t.Errorf("staged in the backend is %v", staged)
			}
			must(t, c.unstage(t.Context(), "v1", at))
			if len(mountsOn(t, at.staging))+len(mountsOn(t, Beside(at.staging))) != 0 {
				t.Error("a mount is left")
			}
		})
	}
}

// TestLiesOfTheWayDown: it answers OK, and the mount or the target is still there. The next time it is honest.
func TestLiesOfTheWayDown(t *testing.T) {
	needMounts(t)
	cases := []struct {
		rpc             string
		lie             Lie
		mounts          int
		target, backend bool
	}{
		{"NodeUnpublishVolume", NoEffect, 1, true, true},
		{"NodeUnpublishVolume", KeepMount, 1, true, false},
		{"NodeUnpublishVolume", LeaveTarget, 0, true, false},
		{"NodeUnstageVolume", NoEffect, 1, false, true},
		{"NodeUnstageVolume", KeepMount, 1, false, false},
	}
	for _, tc := range cases {
		t.Run(tc.rpc+" "+string(tc.lie), func(t *testing.T) {
			fake, c, at := liar(t, tc.lie, tc.rpc)
			must(t, c.publish(t.Context(), "v1", at))
			must(t, c.unpublish(t.Context(), "v1", at))
			path, again := at.target, c.unpublish
			if tc.rpc == "NodeUnstageVolume" {
				must(t, c.unstage(t.Context(), "v1", at))
				path, again = at.staging, c.unstage
			}
			staged, published := inBackend(t, fake)
			has := published
			if tc.rpc == "NodeUnstageVolume" {
				has = staged
			}
			_, err := os.Lstat(at.target)
			if n := len(mountsOn(t, path)); n != tc.mounts || has != tc.backend || (err == nil) != tc.target {
				t.Errorf("%d mounts, in the backend is %v, target: %v", n, has, err)
			}
			must(t, again(t.Context(), "v1", at))
			if n := len(mountsOn(t, path)); n != 0 {
				t.Errorf("%d mounts are left", n)
			}
			must(t, c.unstage(t.Context(), "v1", at))
		})
	}
}

// TestMiddle: a step of two is done as the plugin is slow, fails, dies or hangs. The same call again, or its undo, by
// the plugin or by the next one, sets it right.
func TestMiddle(t *testing.T) {
	needMounts(t)
	for _, undo := range []bool{true, false} {
		for name, rule := range map[string]Rule{"crash": {Crash: true}, "code": {Code: "INTERNAL"},
			"drop": {Drop: true}} {
			t.Run(name, func(t *testing.T) {
				// who is cut off may not wait
				path := NewJournal(t, journal.Options{Settled: true, Strict: name != "drop"})
				fake := Start(t, Config{Caps: []string{"STAGE_UNSTAGE"}, Mounts: true, DataDir: t.TempDir(),
					Journal: path})
				c, at := dial(t, fake.Socket()).learn(), makePlaces(t)
				cleanMounts(t, at)
				must(t, c.stage(t.Context(), "v1", at))
				fake.On("NodePublishVolume").Times(1).Middle().Rule(rule)
				if err := c.publishReadOnly("v1", at); err == nil {
					t.Fatal("it is OK")
				}
				if n := len(mountsOn(t, at.target)); n != 1 || readOnly(t, at.target) {
					t.Errorf("there are %d mounts, or it is read-only already", n)
				}
				if _, published := inBackend(t, fake); published {
					t.Error("the backend has it")
				}
				if name == "crash" {
					c = dial(t, Start(t, fake.Config()).Socket()).learn()
				}
				if !undo {
					patiently(t, func() error { return c.publishReadOnly("v1", at) })
					if len(mountsOn(t, at.target)) != 1 || !readOnly(t, at.target) {
						t.Error("the second time does not set it right")
					}
				}
				patiently(t, func() error { return c.unpublish(t.Context(), "v1", at) })
				must(t, c.unstage(t.Context(), "v1", at))
				if len(mountsOn(t, at.target)) != 0 {
					t.Error("a mount is left")
				}
			})
		}
	}
}

// TestKillInTheMiddle: who kills a plugin does not wait for a call that hangs between its steps, and the next plugin
// finds the volume free.
func TestKillInTheMiddle(t *testing.T) {
	inBothForms(t, func(t *testing.T, start func(Config) (*Plugin, *client)) {
		fake, c := start(Config{Caps: []string{"STAGE_UNSTAGE"}})
		at, answer := makePlaces(t), make(chan error, 1)
		fake.On("NodeStageVolume").Middle().HangForEver()
		go func() { answer <- c.stage(t.Context(), "v1", at) }()
		eventually(t, func() bool {
			calls, err := fake.Calls("NodeStageVolume")
			return err == nil && len(calls) == 1
		})
		fake.Kill()
		wantCode(t, <-answer, "UNAVAILABLE")
		_, c = start(fake.Config())
		must(t, c.unstage(t.Context(), "v1", at))
	})
}

// TestMiddleOfEach: each of the four calls stops between its steps, while other volumes go on.
func TestMiddleOfEach(t *testing.T) {
	needMounts(t)
	fake := Start(t, Config{Caps: []string{"STAGE_UNSTAGE"}, Mounts: true})
	c, at, other := dial(t, fake.Socket()).learn(), makePlaces(t), makePlaces(t)
	cleanMounts(t, at)
	cleanMounts(t, other)
	steps := []struct {
		rpc   string
		call  func() error
		after func() bool // what the first step has done
	}{
		{"NodeStageVolume", func() error {
			return c.stage(t.Context(), "v1", at)
		}, func() bool { return len(mountsOn(t, at.staging)) == 1 }},
		{"NodePublishVolume", func() error {
			return c.publish(t.Context(), "v1", at)
		}, func() bool { return len(mountsOn(t, at.target)) == 1 }},
		{"NodeUnpublishVolume", func() error { return c.unpublish(t.Context(), "v1", at) }, func() bool {
			_, err := os.Lstat(at.target)
			return len(mountsOn(t, at.target)) == 0 && err == nil
		}},
		{"NodeUnstageVolume", func() error {
			return c.unstage(t.Context(), "v1", at)
		}, func() bool { return len(mountsOn(t, at.staging)) == 0 }},
	}
	for _, s := range steps {
		gate, done := fake.On(s.rpc).Volume("v1").Middle().Hold(), make(chan error, 1)
		go func() { done <- s.call() }()
		<-gate.Arrived()
		if !s.after() {
			t.Errorf("%s has not done its first step in its middle", s.rpc)
		}
		must(t, c.stage(t.Context(), "v2", other), c.publish(t.Context(), "v2", other),
			c.unpublish(t.Context(), "v2", other),
			c.unstage(t.Context(), "v2", other))
		gate.Open()
		must(t, <-done)
	}
}
