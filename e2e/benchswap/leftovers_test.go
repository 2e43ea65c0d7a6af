package benchswap

import (
	"fmt"
	"io/fs"
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

// census counts what a swap might leave behind, by description.
type census map[string]int

// variable matches the parts of names that differ between two swaps.
var variable = regexp.MustCompile(`[0-9a-f]{8,}|[0-9]+`)

// census counts goroutines, child processes, descriptors and files of the node. The active shim and the process of the
// plugins are among them.
func (n *node) census() census {
	c := census{"goroutines of the host": runtime.NumGoroutine()}
	c.countDescriptors("host", os.Getpid())
	for _, pid := range children() {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		name := strings.TrimSpace(string(text))
		c["process "+name]++
		c.countDescriptors(name, pid)
	}
	for _, dir := range []string{n.config.StateDir, n.config.RunDir} {
		_ = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err == nil { // else it is being removed
				c[fmt.Sprintf("%s %s", e.Type(), variable.ReplaceAllString(strings.TrimPrefix(path, n.dir), "#"))]++
			}
			return nil
		})
	}
	return c
}

func (c census) countDescriptors(name string, pid int) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	list, _ := os.ReadDir(dir)
	for _, e := range list {
		if target, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil {
			c[fmt.Sprintf("descriptor of %s: %s", name, variable.ReplaceAllString(target, "#"))]++
		}
	}
}

// children returns the child processes of this process.
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

// more lists what there is more of than before.
func (c census) more(before census) (list []string) {
	for what, n := range c {
		if n > before[what] {
			list = append(list, fmt.Sprintf("%s: %d, was %d", what, n, before[what]))
		}
	}
	slices.Sort(list)
	return list
}

// total sums the counts of descriptions with a prefix.
func (c census) total(prefix string) (n int) {
	for what, count := range c {
		if strings.HasPrefix(what, prefix) {
			n += count
		}
	}
	return n
}

// waitCommitted waits until no swap is baking.
func (n *node) waitCommitted() {
	n.t.Helper()
	for end := time.Now().Add(waitLimit); ; time.Sleep(10 * time.Millisecond) {
		all := n.host.Swaps()
		if len(all) == 0 || all[0].Outcome != host.SwapBaking {
			return
		}
		if time.Now().After(end) {
			n.t.Fatalf("the last swap is still baking: %+v", all[0])
		}
	}
}

// leftovers lists what there is more of than before, and waits for what is about to go.
func (n *node) leftovers(before census) (list []string) {
	n.waitCommitted()
	for end := time.Now().Add(waitLimit); ; time.Sleep(50 * time.Millisecond) {
		if list = n.census().more(before); len(list) == 0 || time.Now().After(end) {
			return list
		}
	}
}

// mountTable returns the kernel's lines about mounts below the node's directory.
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

// wantMounts fails the test unless the mount table is as before, byte for byte. It returns the number of mounts.
func (n *node) wantMounts(t testing.TB, before string) int {
	t.Helper()
	after := n.mountTable()
	if after != before {
		was, is := strings.SplitAfter(before, "\n"), strings.SplitAfter(after, "\n")
		t.Errorf("the mount table has changed; gone:\n%s\nnew:\n%s", without(was, is), without(is, was))
	}
	return strings.Count(after, "\n")
}

func without(a, b []string) string {
	return strings.Join(slices.DeleteFunc(slices.Clone(a), func(l string) bool { return slices.Contains(b, l) }), "")
}
