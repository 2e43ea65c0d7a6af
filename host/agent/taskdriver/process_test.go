package taskdriver

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func itoa(n int) string { return strconv.Itoa(n) }

func atoi(s string) int {
	n, _ := strconv.Atoi(s)
	return n
}

// livingPID says whether a process is there and not dead, as ps sees it.
func livingPID(pid int) bool {
	out, _ := exec.Command("ps", "-o", "stat=", "-p", itoa(pid)).Output()
	state := strings.TrimSpace(string(out))
	return state != "" && state[0] != 'Z'
}

// livingBelow lists the living processes below one, as ps sees them.
func livingBelow(t *testing.T, pid int) []int {
	t.Helper()
	out, err := exec.Command("ps", "-e", "-o", "ppid=,pid=,stat=").Output()
	if err != nil {
		t.Fatal(err)
	}
	var found []int
	for queue := []int{pid}; len(queue) > 0; queue = queue[1:] {
		for line := range strings.Lines(string(out)) {
			if f := strings.Fields(line); atoi(f[0]) == queue[0] {
				queue = append(queue, atoi(f[1]))
				if f[2][0] != 'Z' {
					found = append(found, atoi(f[1]))
				}
			}
		}
	}
	return found
}

// A task whose records are all gone is found by its processes.
func TestParentsAreFoundWithoutTheirDirectories(t *testing.T) {
	f := newFifos(t)
	task := shell(t, `echo > `+f.dir+`/ready; cat `+f.dir+`/go`)
	d := NewRawExec()
	h := start(t, d, task)
	f.reached(t)
	away := task.Dir + "-away"
	if err := os.Rename(task.Dir, away); err != nil {
		t.Fatal(err)
	}
	want := []Parent{{PID: h.PID, ID: task.ID, Dir: task.Dir}}
	if got, err := Parents(filepath.Dir(task.Dir)); err != nil || !slices.Equal(got, want) {
		t.Errorf("%+v: %v, not %+v", got, err, want)
	}
	if got, err := Parents(t.TempDir()); err != nil || len(got) > 0 {
		t.Errorf("another directory has %+v: %v", got, err)
	}
	if err := os.Rename(away, task.Dir); err != nil {
		t.Fatal(err)
	}
	f.goOn(t)
	wait(t, d, h)
	if got, err := Parents(filepath.Dir(task.Dir)); err != nil || len(got) > 0 {
		t.Errorf("the task has ended, and there is %+v: %v", got, err)
	}
}
