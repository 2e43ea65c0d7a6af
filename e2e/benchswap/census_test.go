package benchswap

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"holdfast/host"
)

// census counts what a swap might leave behind, by what it is.
type census map[string]int

var (
	digits = regexp.MustCompile(`[0-9a-f]{8,}|[0-9]+`) // names that differ from one to the next
)

// taken is a census of the host and all below it. The shim that runs, and the process of the plugins, are counted with
// their descriptors.
func (n *node) taken() census {
	c := census{"goroutines of the host": runtime.NumGoroutine()}
	c.fds("host", os.Getpid())
	for _, pid := range children() {
		c["process "+command(pid)]++
		c.fds(command(pid), pid)
	}
	for _, dir := range []string{n.config.StateDir, n.config.RunDir} {
		_ = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				return nil //nolint:nilerr // it is just going
			}
			c[fmt.Sprintf("%s %s", e.Type(), digits.ReplaceAllString(strings.TrimPrefix(path, n.dir), "#"))]++
			return nil
		})
	}
	return c
}

// fds counts a process's descriptors by their kind.
func (c census) fds(name string, pid int) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	list, _ := os.ReadDir(dir)
	for _, e := range list {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil {
			continue
		}
		c[fmt.Sprintf("descriptor of %s: %s", name, digits.ReplaceAllString(target, "#"))]++
	}
}

// children are the processes that this one has, without those that have ended.
func children() (pids []int) {
	tasks, _ := filepath.Glob("/proc/self/task/*/children")
	for _, path := range tasks {
		text, _ := os.ReadFile(path)
		for f := range strings.FieldsSeq(string(text)) {
			if pid, err := strconv.Atoi(f); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

func command(pid int) string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return strings.TrimSpace(string(text))
}

// more is what there is more of than before.
func (c census) more(before census) (list []string) {
	for what, n := range c {
		if n > before[what] {
			list = append(list, fmt.Sprintf("%s: %d, and it was %d", what, n, before[what]))
		}
	}
	slices.Sort(list)
	return list
}

func (c census) total(prefix string) (n int) {
	for what := range maps.Keys(c) {
		if strings.HasPrefix(what, prefix) {
			n += c[what]
		}
	}
	return n
}

// settled waits until no swap is young, and takes a census.
func (n *node) settled() census {
	n.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		all := n.host.Swaps()
		if len(all) == 0 || all[0].Outcome != host.SwapBaking {
			return n.taken()
		}
		if time.Now().After(end) {
			n.t.Fatalf("the last swap bakes for ever: %+v", all[0])
		}
	}
}

// leftBehind is what a settled node has more of than before. What is only late to go is waited for.
func (n *node) leftBehind(before census) (list []string) {
	for end := time.Now().Add(patience / 4); ; time.Sleep(50 * time.Millisecond) {
		if list = n.settled().more(before); len(list) == 0 || time.Now().After(end) {
			return list
		}
	}
}

// mountTable is what is mounted below the node's directories, as the kernel tells it.
func (n *node) mountTable() string {
	n.t.Helper()
	text, err := os.ReadFile("/proc/self/mountinfo")
	must(n.t, err)
	var ours []string
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, n.dir) {
			ours = append(ours, line)
		}
	}
	return strings.Join(ours, "")
}

// untouched says that the mount table is as it was, byte for byte.
func (n *node) untouched(t testing.TB, before string) (mounts int) {
	t.Helper()
	after := n.mountTable()
	if after != before {
		was, is := strings.SplitAfter(before, "\n"), strings.SplitAfter(after, "\n")
		t.Errorf("the mount table has changed; gone:\n%s\nnew:\n%s", without(was, is), without(is, was))
	}
	return strings.Count(after, "\n")
}

func without(a, b []string) string {
	known := map[string]bool{}
	for _, line := range b {
		known[line] = true
	}
	return strings.Join(slices.DeleteFunc(a, func(line string) bool { return known[line] }), "")
}
