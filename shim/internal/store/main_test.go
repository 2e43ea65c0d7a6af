package store

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"holdfast/registry"
)

// childPath makes the test binary a process that commits to the store at that path, until it is killed or has made
// childCommits commits.
const childPath = "HOLDFAST_TEST_STORE"

// childCommits is the number of commits that the child makes; 0: no limit.
const childCommits = "HOLDFAST_TEST_COMMITS"

func TestMain(m *testing.M) {
	BecomeVerifier()
	if path := os.Getenv(childPath); path != "" {
		if err := childMain(path); err != nil {
			fmt.Println("fatal", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	_ = flag.Set("rapid.checks", "12") // unless the command line says otherwise
	os.Exit(m.Run())
}

// childMain prints a line for each commit: "acked N", or the kind of its error and N. All file operations of the writer
// run on one thread, because strace counts by thread.
func childMain(path string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	s, err := Open(ctx, Options{Path: path})
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		ended <- s.Run(ctx)
	}()
	fmt.Println("open")
	var last int
	failed := false
	_, _ = fmt.Sscan(os.Getenv(childCommits), &last)
	for n := 1; last == 0 || n <= last; n++ {
		id := registry.AllocID(fmt.Sprintf("alloc-%06d", n))
		_, err := s.Commit(ctx, func(registry.View) (registry.Change, error) {
			return registry.Change{
				Put:    []registry.Record{registry.Alloc{ID: id, Job: strings.Repeat("x", 500)}, childVolume(n)},
				Events: make([]registry.Event, 1),
			}, nil
		})
		outcome := word(err)
		if outcome == "" {
			return err
		}
		fmt.Println(outcome, n)
		failed = failed || errors.Is(err, registry.ErrUncertain)
	}
	if failed { // after a failure Run ends without a cancellation
		fmt.Println("ended", word(<-ended))
	}
	return nil
}

// childVolume returns one of few inline volumes, under a name that no other child uses for it.
func childVolume(n int) registry.Volume {
	spec := registry.VolumeSpec{Namespace: "n", ID: registry.VolumeID(fmt.Sprint("v", n%8)),
		Name: fmt.Sprint(os.Getpid(), "-", n), Plugin: "p"}
	return registry.Volume{VolumeSpec: spec, Created: n%3 > 0, Ephemeral: true}
}

// word returns the outcome of a commit as childMain prints it; empty: err is none of the expected kinds.
func word(err error) string {
	for kind, word := range map[error]string{registry.ErrUncertain: "uncertain", registry.ErrExhausted: "exhausted",
		registry.ErrUnavailable: "unavailable"} {
		if errors.Is(err, kind) {
			return word
		}
	}
	if err != nil {
		return ""
	}
	return "acked"
}

// stored returns the number of allocs.
func stored(s *Store) (n int) {
	_ = s.View(context.Background(), func(v registry.View) error { n = len(v.Allocs()); return nil })
	return n
}

// child starts this test binary as another process. Its output is read line by line.
func child(t *testing.T, path string, commits int, wrap ...string) (*exec.Cmd, *bufio.Scanner) {
	t.Helper()
	args := append(wrap, os.Args[0])
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0", childPath+"="+path, fmt.Sprintf(
		"%s=%d", childCommits, commits))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return cmd, bufio.NewScanner(out)
}

// lines returns the lines that a child prints until it ends, by their first words.
func lines(out *bufio.Scanner) map[string][]string {
	said := map[string][]string{}
	for out.Scan() {
		verb, rest, _ := strings.Cut(out.Text(), " ")
		said[verb] = append(said[verb], rest)
	}
	return said
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
