package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/host/agent/control"
	"holdfast/internal/csifake"
	"holdfast/internal/fault"
)

// siege is an agent whose shim is replaced under load, while somebody kills it or its shims. Who judges is outside: the clients, and what they are told of
// events, the plugin's journal and storage, the kernel's tables of processes, locks and mounts, and the file that a task writes.
type siege struct {
	*station
	binaries string   // directory of shims
	args     []string // of each agent
	tried    attempt
	writer   control.Task
	mounts   string // before the load
	heard    hearing

	ending chan struct{} // closed when the load is to end
	load   sync.WaitGroup

	mu      sync.Mutex      // guards all below
	there   map[string]bool // volumes whose creation was acknowledged, and whose end nobody has asked for
	gone    map[string]bool // volumes whose deletion was acknowledged
	created []string        // volumes whose creation was acknowledged, whatever became of them
	unsure  []string        // volumes whose last call has failed
	failed  []error         // calls that have
	acked   int
	turns   int // jobs that ran on a volume, ended, and were forgotten
}

// newSiege starts an agent with a plugin, a task that writes, and a load.
func newSiege(t *testing.T) *siege {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("real mounts need root")
	}
	t.Parallel()
	s := &siege{binaries: t.TempDir(), ending: make(chan struct{}), there: map[string]bool{}, gone: map[string]bool{}}
	s.args = []string{"--shim", s.binary(t, "first"), "--shim-swap-budget", patience.String()} // a step that is late would be another story
	s.station = startStation(t, s.args...)
	s.strict = true
	s.hears()
	s.must(s.submit("fake.hcl"))
	s.must(os.WriteFile(s.path("script"), []byte(`[
		{"rpc": "CreateVolume", "when": "after", "delay": "20ms"},
		{"rpc": "NodeStageVolume", "when": "after", "delay": "200ms"}, {"rpc": "NodePublishVolume", "when": "after", "delay": "200ms"}
	]`), 0o600))
	for _, id := range []string{"kept", "turn"} {
		s.must(s.create(id))
	}
	s.must(s.submit("writer.hcl", "FAILED", s.path("failed")))
	s.writer = s.alloc("writer").Tasks[0]
	s.wait("the task writes", func() bool { return len(s.written()) > 3 })
	s.mounts = s.mountTable()
	t.Cleanup(s.endLoad)
	for i := range 3 {
		s.load.Go(func() { s.volumes(i) })
	}
	s.load.Go(s.jobs)
	s.goesOn("the load has begun")
	return s
}

// binary is a shim with faults.
func (s *siege) binary(t *testing.T, name string, lines ...string) string {
	t.Helper()
	return fault.Binary(t, faulty, s.binaries, name, lines...)
}

func sumOf(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(h.Sum(nil))
}

func (s *siege) over() bool { return closed(s.ending) }

func (s *siege) endLoad() {
	if !s.over() {
		close(s.ending)
	}
	s.load.Wait()
}

// volumes makes volumes, and deletes every other one.
func (s *siege) volumes(client int) {
	for n := 0; !s.over(); n++ {
		id := fmt.Sprintf("v%d-%d", client, n)
		if !s.told(id, s.made(id)) {
			continue
		}
		s.note(func() { s.there[id] = true; s.created = append(s.created, id) })
		if n%2 == 0 {
			s.note(func() { delete(s.there, id) })
			if s.told(id, s.client.DeleteVolume(s.ctx(), host.VolumeName{Namespace: "default", ID: host.VolumeID(id)})) {
				s.note(func() { s.gone[id] = true })
			}
		}
	}
}

func (s *siege) made(id string) error {
	src, err := s.file("disk.volume.hcl", `"disk"`, fmt.Sprintf("%q", id))
	if err != nil {
		return err
	}
	_, err = s.client.CreateVolume(s.ctx(), src)
	return err
}

// told notes what a client was told. Where no agent answers it waits a moment.
func (s *siege) told(id string, err error) bool {
	s.note(func() {
		if err == nil {
			s.acked++
			return
		}
		s.failed = append(s.failed, fmt.Errorf("%s: %w", id, err))
		s.unsure = append(s.unsure, id)
	})
	if err != nil {
		time.Sleep(retry)
	}
	return err == nil
}

// retry is how long a client waits that nobody has answered.
const retry = 20 * time.Millisecond

func (s *siege) note(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *siege) count() (acked, turns int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.acked, s.turns
}

// jobs runs a job on a volume, and has it forgotten, again and again.
func (s *siege) jobs() {
	for !s.over() {
		if err := s.turn(); err != nil {
			s.t.Errorf("a job on a volume: %v", err)
			return
		}
		s.note(func() { s.turns++ })
	}
}

func (s *siege) turn() error {
	finish := s.path("turned")
	if err := os.RemoveAll(finish); err != nil {
		return err
	}
	if err := s.submit("batch.hcl", `source          = "disk"`, `source = "turn"`, "FINISH", finish); err != nil {
		return err
	}
	if err := os.WriteFile(finish, nil, 0o600); err != nil {
		return err
	}
	err := until(s.ctx(), "the job batch is complete", func() bool { return s.alloc("batch").State == "complete" })
	if err != nil {
		return fmt.Errorf("%w; it is %+v", err, s.alloc("batch"))
	}
	return s.stop("batch")
}

// goesOn returns when calls are answered, and a job has run.
func (s *siege) goesOn(what string) {
	s.t.Helper()
	acked, turns := s.count()
	s.wait("calls are answered: "+what, func() bool {
		a, n := s.count()
		return a > acked+5 && n > turns || s.t.Failed()
	})
}

// mountTable is what is mounted below this machine's directories, with the numbers of the mounts.
func (m *machine) mountTable() string {
	text, _ := os.ReadFile("/proc/self/mountinfo")
	var ours []string
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, m.dir+"/") && !strings.Contains(line, "/turn") {
			ours = append(ours, line)
		}
	}
	return strings.Join(ours, "")
}

// shims are the processes that are executed from this machine's store of shims, without those that only look at something for one.
func (m *machine) shims() (pids []int) { return shimsOf(m.state()) }

func shimsOf(state string) (pids []int) {
	store := filepath.Join(state, "shims") + "/"
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || !alive(pid) {
			continue
		}
		program, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
		if strings.HasPrefix(program, store) && !strings.Contains(proc(pid, "cmdline"), "-look") {
			pids = append(pids, pid)
		}
	}
	return pids
}

// active are the shims that hold a lock on a file of the state directory: a shim that may write. The kernel says so, not they.
func (m *machine) active() (pids []int) {
	locks, _ := os.ReadFile("/proc/locks")
	for _, pid := range m.shims() {
		for line := range strings.Lines(string(locks)) {
			f := strings.Fields(line)
			if len(f) > 5 && f[1] == "FLOCK" && f[3] == "WRITE" && f[4] == strconv.Itoa(pid) && m.has(pid, f[5]) {
				pids = append(pids, pid)
				break
			}
		}
	}
	return pids
}

// has says whether the process has a file of the state directory open that the kernel's table of locks calls id.
func (m *machine) has(pid int, id string) bool {
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, fd := range fds {
		to, _ := os.Readlink(fd)
		var st unix.Stat_t
		if strings.HasPrefix(to, m.state()+"/") && unix.Stat(fd, &st) == nil &&
			id == fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino) {
			return true
		}
	}
	return false
}

// written is what the task has written.
func (s *siege) written() []string {
	files, _ := filepath.Glob(s.path("data/*/line"))
	for _, file := range files {
		if text, _ := os.ReadFile(file); strings.HasPrefix(string(text), "1\n2\n3\n") {
			return strings.Fields(string(text))
		}
	}
	return nil
}

// judge holds what is there against what was said, after whatever happened.
func (s *siege) judge() {
	s.t.Helper()
	s.goesOn("after it")
	s.endLoad()
	s.oneIsActive()
	s.nothingIsLost()
	s.tidy()
	if now := s.mountTable(); now != s.mounts {
		s.t.Errorf("mounted was\n%s\nand is\n%s", s.mounts, now)
	}
	s.wrote()
	s.settle()
	s.toldRight()
}

// oneIsActive: one process may write, and it is the one that answers. A shim that dies between the two looks is looked for again.
func (s *siege) oneIsActive() {
	s.t.Helper()
	s.wait("one shim holds the state, and it is the one that answers", func() bool {
		st, err := s.client.Shim(s.ctx())
		return err == nil && slices.Equal(s.active(), []int{st.PID})
	})
}

// nothingIsLost: what was acknowledged is listed, and was at the plugin.
func (s *siege) nothingIsLost() {
	s.t.Helper()
	list, err := s.client.Volumes(s.ctx(), "")
	s.must(err)
	stored, err := csifake.NewBackend(s.path("backend")).Volumes()
	s.must(err)
	made := map[string]bool{}
	calls, err := csifake.Calls(s.path("journal"), "CreateVolume")
	s.must(err)
	for _, c := range calls {
		made[c.Name] = made[c.Name] || c.End != nil && c.End.Code == "OK"
	}
	listed := map[string]control.Volume{}
	for _, v := range list {
		listed[string(v.ID)] = v
	}
	for id := range s.there {
		_, is := listed[id]
		if _, there := stored[csifake.VolumeID(id)]; !is || !there || !made[id] {
			s.t.Errorf("volume %s was acknowledged: listed %t, stored %t, in the journal %t", id, is, there, made[id])
		}
	}
	for id := range s.gone {
		_, is := listed[id]
		if _, there := stored[csifake.VolumeID(id)]; is || there {
			s.t.Errorf("the end of volume %s was acknowledged: listed %t, stored %t", id, is, there)
		}
	}
	if turn := listed["turn"]; len(turn.Holders) > 0 {
		s.t.Errorf("released allocs hold a volume: %+v", turn.Holders)
	}
	if a := s.alloc("batch"); a.ID != "" {
		s.t.Errorf("a job that was forgotten is there: %+v", a)
	}
	if len(s.there) == 0 || len(s.gone) == 0 || s.turns == 0 {
		s.t.Errorf("the load was none: %d there, %d gone, %d turns", len(s.there), len(s.gone), s.turns)
	}
}

// tidy deletes what the load has made.
func (s *siege) tidy() {
	for id := range s.there {
		s.must(s.delete(id))
	}
	for _, id := range s.unsure {
		s.must(s.delete(id))
	}
}

// wrote: the task is the same process, and has written all its numbers.
func (s *siege) wrote() {
	s.t.Helper()
	if now := s.alloc("writer").Tasks[0]; now.PID != s.writer.PID || now.Attempt != s.writer.Attempt || !alive(now.PID) {
		s.t.Errorf("the task was %+v and is %+v", s.writer, now)
	}
	if text, err := os.ReadFile(s.path("failed")); err == nil {
		s.t.Errorf("writes of the task have failed: %s", text)
	}
	lines := s.written()
	for i, n := range lines {
		if n != strconv.Itoa(i+1) {
			s.t.Fatalf("number %d of the task is %q", i+1, n)
		}
	}
	s.wait("the task writes still", func() bool { return len(s.written()) > len(lines) })
}

// settle takes everything down; the station's end finds what is left.
func (s *siege) settle() {
	s.must(s.stop("writer"))
	s.must(s.delete("kept"))
	s.must(s.delete("turn"))
	s.must(s.stop("fake"))
}

// unheard: no call has failed.
func (s *siege) unheard() {
	s.t.Helper()
	s.note(func() {
		for _, err := range s.failed {
			s.t.Errorf("a call has failed, and the host lives: %v", err)
		}
	})
}

// comesBack starts the next agent: the one before was killed.
func (s *siege) comesBack() {
	s.t.Helper()
	select {
	case err := <-s.ended:
		if err == nil || !strings.Contains(err.Error(), "killed") {
			s.t.Errorf("the agent has ended: %v", err)
		}
	case <-time.After(patience):
		s.t.Fatal("the agent lives")
	}
	s.agent = nil
	s.must(s.start(s.args...))
}
