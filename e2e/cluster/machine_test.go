package cluster

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// machine is a network namespace with an address on the bridge. One program and its children run in it.
type machine struct {
	t       testing.TB
	name    string
	address string
	log     string // path of the log file
	command func() *exec.Cmd

	cmd    *exec.Cmd
	stdin  io.WriteCloser
	exited chan struct{} // closed when cmd has exited
}

// newBridge makes the bridge that connects all machines.
func newBridge(t testing.TB) {
	run(t, "mount", "-t", "tmpfs", "none", "/run")
	run(t, "mkdir", "/run/netns")
	run(t, "ip", "link", "set", "lo", "up")
	run(t, "ip", "link", "add", "bridge", "type", "bridge")
	run(t, "ip", "link", "set", "bridge", "up")
	run(t, "ip", "address", "add", "10.77.0.254/24", "dev", "bridge")
}

func newMachine(t testing.TB, name, dir string, number int) *machine {
	m := &machine{t: t, name: name, address: fmt.Sprintf("10.77.0.%d", number), log: filepath.Join(dir, name+".log")}
	run(t, "ip", "netns", "add", name)
	run(t, "ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
	run(t, "ip", "link", "set", name, "master", "bridge", "up")
	run(t, "ip", "-n", name, "address", "add", m.address+"/24", "dev", "eth0")
	run(t, "ip", "-n", name, "link", "set", "eth0", "up")
	run(t, "ip", "-n", name, "link", "set", "lo", "up")
	return m
}

func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func (m *machine) start() {
	m.t.Helper()
	program := m.command()
	m.cmd = exec.Command("nsenter",
		append([]string{"--net=/run/netns/" + m.name, program.Path}, program.Args[1:]...)...)
	m.cmd.Env = program.Env
	log, err := os.OpenFile(m.log, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		m.t.Fatal(err)
	}
	defer log.Close()
	m.cmd.Stdout, m.cmd.Stderr = log, log
	if m.stdin, err = m.cmd.StdinPipe(); err == nil {
		err = m.cmd.Start()
	}
	if err != nil {
		m.t.Fatalf("%s: %v", m.name, err)
	}
	cmd, exited := m.cmd, make(chan struct{})
	m.exited = exited
	go func() { _ = cmd.Wait(); close(exited) }()
}

// kill kills the program. all also kills its children and theirs.
func (m *machine) kill(all bool) {
	m.t.Helper()
	_ = m.cmd.Process.Kill()
	<-m.exited
	if all {
		m.signal(syscall.SIGKILL)
	}
}

// signal sends a signal to all processes of the machine. The program gets it first, so that it starts no further
// processes.
func (m *machine) signal(s syscall.Signal) {
	m.t.Helper()
	_ = m.cmd.Process.Signal(s)
	for range 3 { // a child may have been about to start another process
		for _, text := range strings.Fields(run(m.t, "ip", "netns", "pids", m.name)) {
			if pid, err := strconv.Atoi(text); err == nil {
				_ = syscall.Kill(pid, s)
			}
		}
	}
}

// Kinds of cuts of a machine's network.
const (
	cutBoth = "both ways"
	cutIn   = "incoming"
	cutOut  = "outgoing"
)

func (m *machine) cut(kind string) {
	switch kind {
	case cutBoth:
		run(m.t, "ip", "link", "set", m.name, "down")
	case cutIn:
		m.filter("-A", "INPUT", "-i", "eth0", "-j", "DROP")
	case cutOut:
		m.filter("-A", "OUTPUT", "-o", "eth0", "-j", "DROP")
	}
}

// join undoes all cuts.
func (m *machine) join() {
	run(m.t, "ip", "link", "set", m.name, "up")
	m.filter("-F")
}

func (m *machine) filter(args ...string) {
	run(m.t, "nsenter", append([]string{"--net=/run/netns/" + m.name, "iptables"}, args...)...)
}

// waitLimit bounds each wait. It is a safeguard: no check depends on it.
const waitLimit = 3 * time.Minute

// waitFor waits until done returns true. At waitLimit it fails the test.
func waitFor(t testing.TB, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(waitLimit); !done(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("timed out waiting for: %s", what)
		}
	}
}
