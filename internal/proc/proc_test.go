package proc

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestReadStatOfOwnProcess(t *testing.T) {
	t.Parallel()
	s, err := ReadStat(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if s.PID != os.Getpid() || s.Parent != os.Getppid() || s.Exited() || s.Start == 0 || s.Comm != Comm(s.PID) {
		t.Errorf("ReadStat returned %+v", s)
	}
	if session, _ := unix.Getsid(0); s.Session != session {
		t.Errorf("session %d, want %d", s.Session, session)
	}
	if pids, err := PIDs(); err != nil || !slices.Contains(pids, s.PID) {
		t.Errorf("PIDs() = %v, %v", pids, err)
	}
}

func TestParseStatAcceptsAnyProcessName(t *testing.T) {
	t.Parallel()
	rest := " S 1 2 3 4" + strings.Repeat(" 0", 14) + " 99" + strings.Repeat(" 0", 30)
	for _, name := range []string{"sh", "a) R 9 (b", "", "x y\nz"} {
		s, err := parseStat(7, []byte("7 ("+name+")"+rest))
		want := Stat{PID: 7, Comm: name, State: 'S', Parent: 1, Session: 3, TTY: 4, Start: 99, NoEnviron: true}
		if err != nil || s != want {
			t.Errorf("%q: %+v, %v", name, s, err)
		}
	}
	for _, bad := range []string{"", "7 sh S 1", "7 (sh) S 1 2", "7 (sh) S x 2 3 4" + strings.Repeat(" 0", 14) + " 9"} {
		if _, err := parseStat(7, []byte(bad)); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

func TestFlockHolderIsNamed(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "lock")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if Opens(os.Getpid(), path+"x") || !Opens(os.Getpid(), path) {
		t.Error("Opens is wrong about an open or a missing file")
	}
	if got := FlockHolders(path); len(got) > 0 {
		t.Errorf("holders of a free lock: %v", got)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if got := FlockHolders(path); !slices.Equal(got, []int{os.Getpid()}) {
		t.Errorf("holders: %v, want %d", got, os.Getpid())
	}
}

func TestFlockHoldersIgnoreOtherLocks(t *testing.T) {
	t.Parallel()
	table := "1: FLOCK  ADVISORY  WRITE 4711 fe:00:12345 0 EOF\n2: POSIX  ADVISORY  WRITE 8 fe:00:12345 0 EOF\n" +
		"3: FLOCK  ADVISORY  WRITE 9 fe:00:1234 0 EOF\n4: -> FLOCK ADVISORY WRITE 10 fe:00:12345 0 EOF\nx\n" +
		"5: FLOCK  ADVISORY  WRITE 11 00:2a:12345 0 EOF\n6: FLOCK  ADVISORY  WRITE 12 00:2a:12345 0 EOF\n"
	opens := func(pid int) bool { return pid == 12 } // a file of a file system with two devices
	if got := flockHolders(table, "fe:00", 12345, opens); !slices.Equal(got, []int{4711, 12}) {
		t.Errorf("holders %v", got)
	}
}

func TestBootIDIsOfThisBoot(t *testing.T) {
	t.Parallel()
	id, err := BootID()
	if err != nil || len(id) != 36 {
		t.Errorf("%q, %v", id, err)
	}
	if BootTime() <= 0 || !strings.HasPrefix(Sleeping(os.Getpid()), "state ") {
		t.Error("no boot time, or no state of this process")
	}
}
