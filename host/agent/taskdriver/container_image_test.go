package taskdriver

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"holdfast/internal/enginetest"
)

// checkContainerLoad runs an image from an archive that the engine does not have, with limits that the kernel enforces.
func checkContainerLoad(t *testing.T, e *enginetest.Engine, d Container) {
	archive := filepath.Join(tempDir(t), "image.tar")
	e.CLI("tag", "box", "localhost/archived:1")
	e.CLI("save", "-o", archive, "localhost/archived:1")
	e.CLI("rmi", "localhost/archived:1")
	task := boxed(t, d, `echo "$0 $*"; sleep 1000`, fmt.Sprintf(`"load":%q`, archive),
		`"image":"localhost/archived:1"`, `"entrypoint":["sh","-euc"]`, `"command":"echo \"$0 $*\"; sleep 1000"`,
		`"args":["one", "two words"]`)
	task.Resources = Resources{CPU: 300, Memory: 64}
	must(t, d.Prepare(t.Context(), task, func(string) {}))
	h := startContainer(t, d, task)
	awaitOutput(t, d, h, "one two words\n")
	limit := memoryLimit(t, h.TaskPID)
	if limit != "67108864" {
		t.Errorf("the memory limit is %q", limit)
	}
	must(t, d.Stop(t.Context(), h, 0))
	wait(t, d, h)
}

// memoryLimit returns the memory limit of a process's cgroup.
func memoryLimit(t *testing.T, pid int) string {
	t.Helper()
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	must(t, err)
	for line := range strings.Lines(string(groups)) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		for _, file := range []string{"/sys/fs/cgroup/memory" + part[2] + "/memory.limit_in_bytes",
			"/sys/fs/cgroup" + part[2] + "/memory.max"} {
			if text, err := os.ReadFile(file); err == nil {
				return strings.TrimSpace(string(text))
			}
		}
	}
	return ""
}
