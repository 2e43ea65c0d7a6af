package csifake

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/internal/csifake/journal"
)

func needFuse(t *testing.T) {
	t.Helper()
	needMounts(t)
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skipf("this kernel has no FUSE: %v", err)
	}
}

// asked returns a channel that gets the result of a request to the path.
func asked(path string) <-chan error {
	answer := make(chan error, 1)
	go func() {
		_, err := os.ReadDir(path)
		answer <- err
	}()
	return answer
}

const patience = time.Minute

func answers(t *testing.T, answer <-chan error) error {
	t.Helper()
	select {
	case err := <-answer:
		return err
	case <-time.After(patience):
		t.Fatal("it hangs")
		return nil
	}
}

// A FUSE mount works while its plugin lives, at the staging path and at targets. It hangs and fails as the script says,
// and is dead once the plugin is dead. The next plugin unmounts dead mounts.
func TestFuseMountDiesWithItsPlugin(t *testing.T) {
	needFuse(t)
	path := NewJournal(t, journal.Options{Settled: true, Strict: true})
	fake, c := start(t, Config{Caps: []string{"STAGE_UNSTAGE"}, Mounts: true, Mount: MountFuse, Journal: path})
	at := newPaths(t)
	cleanMounts(t, at)
	must(t, c.stage(t.Context(), "v1", at), c.publish(t.Context(), "v1", at))
	for _, p := range []string{at.staging, at.target} {
		if m := mountsOn(t, p); len(m) != 1 || m[0].FSType != "fuse.csifake" {
			t.Fatalf("%s has %+v", p, m)
		}
		must(t, answers(t, asked(p)))
	}
	if _, err := os.Stat(filepath.Join(at.target, "file")); !os.IsNotExist(err) {
		t.Errorf("an empty file system has a file: %v", err)
	}

	fake.On(Fuse).Volume("v1").Times(1).Rule(Rule{Code: "INTERNAL"})
	if err := answers(t, asked(at.target)); !errors.Is(err, unix.EIO) {
		t.Errorf("a failing mount answers %v", err)
	}
	fake.ClearScript()
	gate := fake.On(Fuse).Volume("v1").Hold()
	waiting := asked(at.target)
	<-gate.Arrived()
	select {
	case err := <-waiting:
		t.Errorf("a mount that hangs answers %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	must(t, c.stage(t.Context(), "v1", at), c.publish(t.Context(), "v1", at)) // the plugin itself does not look
	gate.Open()
	must(t, answers(t, waiting))
	fake.ClearScript()

	fake.On(Fuse).Volume("v1").HangForEver()
	waiting = asked(at.target)
	fake.Kill()
	if err := answers(t, waiting); !errors.Is(err, unix.ENOTCONN) && !errors.Is(err, unix.ECONNABORTED) {
		t.Errorf("the dead answers %v to who waits", err)
	}
	for _, p := range []string{at.staging, at.target} {
		if err := answers(t, asked(p)); !errors.Is(err, unix.ENOTCONN) || len(mountsOn(t, p)) != 1 {
			t.Errorf("%s of a dead plugin: %v", p, err)
		}
	}
	c = dial(t, "unix:"+Start(t, fake.Config()).Socket()).learn()
	must(t, c.unpublish(t.Context(), "v1", at), c.unstage(t.Context(), "v1", at))
	if len(mountsOn(t, at.staging))+len(mountsOn(t, at.target)) != 0 {
		t.Error("a dead mount is left")
	}
}
