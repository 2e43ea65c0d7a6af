package driver

import (
	"os/exec"
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
