package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"holdfast/internal/csifake/journal"
	"holdfast/internal/etcdtest"
)

// size is the number of etcd members, and also of nodes.
const size = 3

// system is a cluster under test.
type system struct {
	t       *testing.T
	dir     string // kept if the test fails
	random  *rand.Rand
	members []*machine // the members of etcd
	nodes   []*machine

	seen   int64           // how much of the history was read, in bytes
	used   map[string]bool // allocs that have used their volumes, and are not released yet
	cycles []int           // how many allocs have used and released their volumes, by node
	notes  []line          // all lines except those about allocs
}

// options are the arguments of newSystem.
type options struct {
	shim    []string // flags of go build for the shim
	workers int      // on each node
	volumes int
	seed    uint64
}

func number(t *testing.T, variable string, otherwise int) int {
	text := os.Getenv(variable)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s: %v", variable, err)
	}
	return n
}

// newSystem starts all machines, waits until the nodes have formed the cluster, and creates the volumes.
func newSystem(t *testing.T, o options) *system {
	t.Helper()
	dir, err := os.MkdirTemp("", "h-")
	if err != nil {
		t.Fatal(err)
	}
	s := &system{t: t, dir: dir, random: rand.New(rand.NewPCG(o.seed, 1)), used: map[string]bool{},
		cycles: make([]int, size)}
	t.Cleanup(s.close)
	memory := s.path("m")
	run(t, "mkdir", memory)
	run(t, "mount", "-t", "tmpfs", "none", memory)
	newBridge(t)
	shims := buildShims(t, memory, o.shim)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	endpoints := s.startEtcd(memory)
	if err := os.WriteFile(s.path("history"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for i := range size {
		name := fmt.Sprintf("node-%d", i+1)
		config := nodeConfig{
			Name: name, Dir: filepath.Join(memory, name), Shims: shims, CSIFake: filepath.Join(memory, "csifake"),
			Cluster: fmt.Sprintf("cluster {\n id = \"test\"\n expect = %d\n endpoints = [\"%s\"]\n lease_ttl = "+
				"\"3s\"\n lost_nodes = \"fence\"\n}\n", size,
				strings.Join(endpoints, `", "`)),
			History: s.path("history"), Journal: s.path("journal"), Backend: filepath.Join(memory, "backend"),
			Data: filepath.Join(memory, "data"), Killed: filepath.Join(memory, "killed"),
			Volumes: o.volumes, Workers: o.workers, Seed: o.seed + uint64(i),
		}
		text, err := json.Marshal(config)
		if err == nil {
			err = os.Mkdir(config.Dir, 0o700)
		}
		if err == nil {
			err = os.WriteFile(config.Dir+".json", text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		m := newMachine(t, name, dir, 10+i)
		m.command = func() *exec.Cmd {
			cmd := exec.Command(self)
			cmd.Env = append(os.Environ(), nodeVariable+"="+config.Dir+".json")
			return cmd
		}
		s.nodes = append(s.nodes, m)
		m.start()
	}
	s.awaitNotes(ready, size)
	s.command(0, "create")
	s.awaitNotes(created, 1)
	for i := range s.nodes {
		s.command(i, "work")
	}
	return s
}

func (s *system) path(name string) string { return filepath.Join(s.dir, name) }

// close removes the files of a test that has passed. All processes and mounts end with their namespaces at the latest.
func (s *system) close() {
	waitFor(s.t, "all mounts are gone", func() bool {
		for _, m := range slices.Concat(s.nodes, s.members) {
			if m.cmd != nil {
				m.signal(syscall.SIGKILL)
				<-m.exited
			}
		}
		umount := "grep -o '" + s.dir + "[^ ]*' /proc/self/mounts | tac | xargs -r umount"
		return exec.Command("sh", "-c", umount).Run() == nil
	})
	for _, m := range slices.Concat(s.nodes, s.members) {
		run(s.t, "ip", "netns", "delete", m.name)
	}
	run(s.t, "ip", "link", "delete", "bridge")
	run(s.t, "umount", "-l", "/run")
	if s.t.Failed() {
		s.t.Logf("history, journal and logs are in %s", s.dir)
		return
	}
	if err := os.RemoveAll(s.dir); err != nil {
		s.t.Error(err)
	}
}

// buildShims returns three shims with different digests, and builds csifake beside them.
func buildShims(t *testing.T, dir string, flags []string) (paths []string) {
	t.Helper()
	build := func(name, pkg string, flags ...string) string {
		path := filepath.Join(dir, name)
		run(t, "go", slices.Concat([]string{"build", "-C", "../..", "-ldflags=-s -w", "-o", path}, flags,
			[]string{pkg})...)
		return path
	}
	build("csifake", "./internal/csifake/cmd/csifake")
	program, err := os.ReadFile(build("shim", "./shim", flags...))
	for i := range 3 {
		path := filepath.Join(dir, fmt.Sprintf("shim-%d", i))
		if err == nil {
			// the appended digit does not change what the shim does
			err = os.WriteFile(path, fmt.Append(program[:len(program):len(program)], i), 0o700)
		}
		paths = append(paths, path)
	}
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

// startEtcd starts the members of etcd, and returns their endpoints.
func (s *system) startEtcd(memory string) (endpoints []string) {
	s.t.Helper()
	binary, err := etcdtest.Binary()
	if err != nil {
		s.t.Fatal(err)
	}
	var peers []string
	for i := range size {
		m := newMachine(s.t, fmt.Sprintf("etcd-%d", i+1), s.dir, 1+i)
		s.members = append(s.members, m)
		peers = append(peers, fmt.Sprintf("%s=http://%s:2380", m.name, m.address))
		endpoints = append(endpoints, fmt.Sprintf("http://%s:2379", m.address))
	}
	for i, m := range s.members {
		peer := fmt.Sprintf("http://%s:2380", m.address)
		m.command = func() *exec.Cmd {
			cmd := exec.Command(binary, "--name", m.name, "--data-dir", filepath.Join(memory, m.name),
				"--unsafe-no-fsync", "--listen-client-urls", endpoints[i], "--advertise-client-urls", endpoints[i],
				"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster",
				strings.Join(peers, ","), "--log-level", "warn", "--logger", "zap")
			cmd.Env = os.Environ()
			return cmd
		}
		m.start()
	}
	return endpoints
}

func (s *system) command(node int, word string) {
	s.t.Helper()
	if _, err := fmt.Fprintln(s.nodes[node].stdin, word); err != nil {
		s.t.Fatalf("node %d: %v", node+1, err)
	}
}

// read reads new lines of the history. A line about a failure fails the test.
func (s *system) read() {
	s.t.Helper()
	lines, next, err := readHistory(s.path("history"), s.seen)
	if err != nil {
		s.t.Fatal(err)
	}
	s.seen = next
	for _, l := range lines {
		switch {
		case l.Alloc == "":
			s.notes = append(s.notes, l)
			if l.Kind == broken {
				s.t.Errorf("%s: %s", l.Node, l.Error)
			}
		case l.Kind == prepareEnded && l.Error == "":
			s.used[l.Alloc] = true
		case l.Kind == releaseEnded && l.Error == "" && s.used[l.Alloc]:
			delete(s.used, l.Alloc)
			s.cycles[l.Node[len(l.Node)-1]-'1']++
		}
	}
}

// awaitNotes waits until the history has n lines of a kind.
func (s *system) awaitNotes(kind string, n int) {
	s.t.Helper()
	waitFor(s.t, fmt.Sprintf("%d lines %q", n, kind), func() bool {
		s.read()
		for i, m := range s.nodes {
			select {
			case <-m.exited:
				s.t.Fatalf("node %d has exited: %v", i+1, m.cmd.ProcessState)
			default:
			}
		}
		return s.count(kind) >= n
	})
}

func (s *system) count(kind string) (n int) {
	for _, l := range s.notes {
		if l.Kind == kind {
			n++
		}
	}
	return n
}

// awaitProgress waits until each node has released two more allocs.
func (s *system) awaitProgress() {
	s.t.Helper()
	s.read()
	before := slices.Clone(s.cycles)
	waitFor(s.t, "each node releases allocs", func() bool {
		s.read()
		for i := range s.cycles {
			if s.cycles[i] < before[i]+2 {
				return false
			}
		}
		return true
	})
}

// finish ends the load, and returns the violations that the checks find.
func (s *system) finish() (errs []string) {
	s.t.Helper()
	for _, step := range []struct{ word, answer string }{{"stop", stopped}, {"verify", verified}} {
		for i := range s.nodes {
			s.command(i, step.word)
		}
		s.awaitNotes(step.answer, size)
	}
	for _, l := range s.notes {
		if l.Kind == verified && l.Error != "" {
			errs = append(errs, l.Node+": "+l.Error)
		}
	}
	s.command(0, "delete")
	s.awaitNotes(deleted, 1)
	errs = append(errs, s.judgeEtcd()...)
	for i, m := range s.nodes {
		s.command(i, "end")
		waitFor(s.t, m.name+" ends", func() bool {
			select {
			case <-m.exited:
				return true
			default:
				return false
			}
		})
		if code := m.cmd.ProcessState.ExitCode(); code != 0 {
			errs = append(errs, fmt.Sprintf("%s exited with %d", m.name, code))
		}
	}
	lines, _, err := readHistory(s.path("history"), 0)
	if err != nil {
		s.t.Fatal(err)
	}
	errs = append(errs, linearizable(lines)...)
	errs = append(errs, judgeJournal(s.path("journal"), true)...)
	return append(errs, judgeWrites(s.path("m/data"))...)
}

// judgeEtcd returns an error for each record that must be gone but is still in etcd.
func (s *system) judgeEtcd() (errs []string) {
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{"http://" + s.members[0].address + ":2379"}})
	if err != nil {
		return []string{err.Error()}
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(s.t.Context(), waitLimit)
	defer cancel()
	for _, bucket := range []string{"volumes", "claims", "attachments", "intents", "late_calls", "remote_calls"} {
		answer, err := client.Get(ctx, "/holdfast/test/r/"+bucket+"/", clientv3.WithPrefix())
		if err != nil {
			return append(errs, err.Error())
		}
		for _, kv := range answer.Kvs {
			// the answer of a remote call whose caller is gone may stay
			if len(kv.Value) > 0 && !strings.Contains(string(kv.Value), `"done":true`) {
				errs = append(errs, fmt.Sprintf("left in etcd: %s: %s", kv.Key, kv.Value))
			}
		}
	}
	return errs
}

// TestClusterKeepsItsPromisesUnderFaults has many allocs fight for volumes while members of etcd and nodes are killed,
// frozen and cut off.
func TestClusterKeepsItsPromisesUnderFaults(t *testing.T) {
	seed := uint64(number(t, "SEED", int(time.Now().UnixNano()%1e6)))
	rounds, allocs := number(t, "ROUNDS", 30), number(t, "ALLOCS", 1000)
	t.Logf("SEED=%d ROUNDS=%d ALLOCS=%d", seed, rounds, allocs)
	s := newSystem(t, options{workers: allocs / size, volumes: 50, seed: seed})
	s.awaitProgress()
	for round := range rounds {
		began := time.Now()
		what := s.fault()
		s.awaitProgress()
		t.Logf("round %d: %s; %s; %d allocs", round+1, what, time.Since(began).Round(time.Millisecond), s.cycles)
	}
	for _, err := range s.finish() {
		t.Error(err)
	}
	t.Logf("%d allocs, %d swaps", s.cycles, s.count(swapped))
}

// fault disturbs a member of etcd, a node or both for some time. It returns a description.
func (s *system) fault() string {
	var done []string
	var undo []func()
	which := s.random.IntN(3)
	if s.random.IntN(10) == 0 {
		return s.lose(s.random.IntN(size))
	}
	if which != 0 {
		m := s.members[s.random.IntN(size)]
		what, end := s.disturb(m)
		done, undo = append(done, m.name+" "+what), append(undo, end)
	}
	if which != 1 {
		i := s.random.IntN(size)
		what, end := s.disturb(s.nodes[i])
		done, undo = append(done, s.nodes[i].name+" "+what), append(undo, func() {
			end()
			if strings.HasPrefix(what, "killed") {
				s.command(i, "work")
			}
		})
	}
	lasts := time.Duration(s.random.Int64N(int64(5 * time.Second))) // a lease lasts 3 s
	time.Sleep(lasts)
	for _, end := range undo {
		end()
	}
	return fmt.Sprintf("%s for %s", strings.Join(done, ", "), lasts.Round(time.Millisecond))
}

// lose kills all processes of a node, its tasks included. Another node fences it or declares it out of service. Then
// the node comes back.
func (s *system) lose(i int) string {
	m, other := s.nodes[i], (i+1)%size
	m.kill(true)
	mark, word := filepath.Join(s.path("m/killed"), m.name), "declare"
	err := errors.Join(journal.NoteReboot(s.path("journal"), driver, m.name+"-id"),
		appendLine(s.path("history"), line{Kind: lost, Node: m.name}))
	if err == nil && s.random.IntN(2) == 0 {
		word, err = "await fence of", os.MkdirAll(mark, 0o700)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	before := s.count(declared)
	s.command(other, word+": "+m.name)
	waitFor(s.t, m.name+" is lost", func() bool { s.read(); return s.count(declared) > before })
	if err := os.RemoveAll(mark); err != nil {
		s.t.Fatal(err)
	}
	m.start()
	s.command(i, "work")
	return fmt.Sprintf("%s lost (%s)", m.name, word)
}

// disturb kills, freezes or cuts off a machine until undo is called.
func (s *system) disturb(m *machine) (what string, undo func()) {
	switch kind := s.random.IntN(7); {
	case kind < 2:
		all := kind == 1
		m.kill(all)
		return fmt.Sprintf("killed (with what it has started: %v)", all), m.start
	case kind < 4:
		m.signal(syscall.SIGSTOP)
		return "frozen", func() { m.signal(syscall.SIGCONT) }
	default:
		cut := []string{cutBoth, cutIn, cutOut}[kind-4]
		m.cut(cut)
		return "cut off " + cut, m.join
	}
}
