package store

import (
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"holdfast/internal/installed"
	"holdfast/registry"
)

// A committing process is killed repeatedly. Each time the file holds every acknowledged commit, and at most the one in
// progress besides.
func TestKilledKeepsWhatItAcknowledged(t *testing.T) {
	path := statePath(t)
	for round := range 5 {
		cmd, out := child(t, path, 0)
		acked := 0
		for out.Scan() {
			if verb, _, _ := strings.Cut(out.Text(), " "); verb == "acked" {
				acked++
			} else if verb != "open" {
				t.Fatalf("the child says %q", out.Text())
			}
			if acked == 20+17*round {
				_ = cmd.Process.Kill()
			}
		}
		_ = cmd.Wait()
		s := start(t, Options{Path: path})
		had := holds(t, s, acked)
		if had > acked+1 {
			t.Errorf("round %d: %d acknowledged, %d stored", round, acked, had)
		}
		s.must(t, registry.Change{Delete: allocKeys(had)})
		s.stop(t)
	}
}

// holds counts the stored allocs of the child. It fails if one of the first want allocs is missing.
func holds(t *testing.T, s *running, want int) (n int) {
	t.Helper()
	err := s.View(t.Context(), func(v registry.View) error {
		n = len(v.Allocs())
		for i := range want {
			if _, ok := v.Alloc(allocName(i + 1)); !ok {
				t.Errorf("alloc %d of %d acknowledged is lost", i+1, want)
				break
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	return n
}

func allocName(n int) registry.AllocID { return registry.AllocID(fmt.Sprintf("alloc-%06d", n)) }

func allocKeys(n int) (keys []registry.Key) {
	for i := range n {
		keys = append(keys, registry.AllocRecord(allocName(i+1)))
	}
	return keys
}

const commitsUnderFault = 8

// injected runs the child with one failing system call. It skips the test if calls cannot be made to fail.
func injected(t *testing.T, path, fault string) map[string][]string {
	t.Helper()
	const strace = "strace"
	installed.Tool(t, strace, strace)
	if err := exec.Command(strace, "-qq", "-o", "/dev/null", "true").Run(); err != nil {
		t.Skipf("strace may not trace here: %v", err)
	}
	call, _, _ := strings.Cut(fault, ":")
	cmd, out := child(t, path, commitsUnderFault, strace, "-f", "-qq", "-o", "/dev/null", "-e", "trace="+call, "-e",
		"inject="+fault)
	said := lines(out)
	_ = cmd.Wait()
	return said
}

// TestFailedSyncStopsTheStore makes the n-th fdatasync of the writer fail, for data and meta pages. The outcome of that
// commit is uncertain, no commit follows it, and every acknowledged commit is stored.
func TestFailedSyncStopsTheStore(t *testing.T) {
	reached := 0
	for n := 1; n <= 6; n++ {
		path := statePath(t)
		start(t, Options{Path: path}).stop(t)
		said := injected(t, path, fmt.Sprintf("fdatasync:error=EIO:when=%d", n))
		acked := len(said["acked"])
		if len(said["fatal"]) > 0 { // the sync of Open itself, which may share its thread with the writer
			continue
		}
		reached++
		if len(said["uncertain"]) != 1 || acked+1+len(said["unavailable"]) != commitsUnderFault {
			t.Fatalf("sync %d failed: %v", n, said)
		}
		if !slices.Equal(said["ended"], []string{"uncertain"}) {
			t.Errorf("sync %d failed: Run: %v", n, said)
		}
		s := start(t, Options{Path: path})
		if had := holds(t, s, acked); had > acked+1 {
			t.Errorf("sync %d failed: %d acknowledged, %d stored", n, acked, had)
		}
		s.stop(t)
	}
	if reached < 3 {
		t.Errorf("only %d syncs of commits were made to fail", reached)
	}
}

// TestFullDiskInTheMiddle makes the n-th write of the writer fail for lack of space, for data and meta pages. A refused
// commit is not stored, and later ones succeed. An uncertain one stops the store.
func TestFullDiskInTheMiddle(t *testing.T) {
	refused := 0
	for n := 1; n <= 8; n++ {
		path := statePath(t)
		start(t, Options{Path: path}).stop(t)
		said := injected(t, path, fmt.Sprintf("pwrite64:error=ENOSPC:when=%d", n))
		if len(said["fatal"]) > 0 {
			continue
		}
		acked := len(said["acked"])
		refused += len(said["exhausted"])
		if len(said["exhausted"])+len(said["uncertain"]) != 1 || len(said["uncertain"]) == 0 &&
			acked != commitsUnderFault-1 {
			t.Fatalf("write %d: %v", n, said)
		}
		s := start(t, Options{Path: path})
		var had int
		_ = s.View(t.Context(), func(v registry.View) error {
			had = len(v.Allocs())
			for _, name := range append(said["exhausted"], said["unavailable"]...) {
				var i int
				_, _ = fmt.Sscan(name, &i)
				if _, there := v.Alloc(allocName(i)); there {
					t.Errorf("write %d: commit %d was refused and is there", n, i)
				}
			}
			return nil
		})
		if had < acked || had > acked+len(said["uncertain"]) {
			t.Errorf("write %d: %d stored: %v", n, had, said)
		}
		s.stop(t)
	}
	if refused == 0 {
		t.Error("no write was refused cleanly")
	}
}

// TestSecondOpener opens a file that another process has locked. The error names that process. Once it is gone, the
// file can be opened.
func TestSecondOpener(t *testing.T) {
	path := statePath(t)
	cmd, out := child(t, path, 0)
	for out.Scan() && out.Text() != "acked 1" {
	}
	go func() {
		for out.Scan() {
		}
	}()
	_, err := Open(t.Context(), Options{Path: path, LockLimit: 50 * time.Millisecond})
	if !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(),
		fmt.Sprint("process ", cmd.Process.Pid)) {
		t.Errorf("second opener: %v", err)
	}
	opened := make(chan error, 1)
	go func() {
		s, err := Open(within(t, time.Minute), Options{Path: path})
		if err == nil {
			err = s.Close()
		}
		opened <- err
	}()
	_ = cmd.Process.Kill()
	if err := <-opened; err != nil {
		t.Error(err)
	}
}

// A process that locked the file may be dead and may have left the lock to its child. The error names the child, and
// says what to do.
func TestInheritedLockNamesWhoHasIt(t *testing.T) {
	path := statePath(t)
	s, err := Open(within(t, time.Minute), Options{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("sh", "-c", "exec 9<>"+path+"; flock 9; sleep 1000 >&- 2>&- & echo $!").Output()
	if err != nil {
		t.Fatal(err)
	}
	heir, _ := strconv.Atoi(strings.TrimSpace(string(out)))
	defer syscall.Kill(heir, syscall.SIGKILL)
	_, err = Open(t.Context(), Options{Path: path, LockLimit: 50 * time.Millisecond})
	named := fmt.Sprintf("process %d (\"sleep\"), which inherited the lock", heir)
	if !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(), named) {
		t.Errorf("the lock that process %d has: %v", heir, err)
	}
}
