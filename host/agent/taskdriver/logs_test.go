package taskdriver

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func TestLogsAreCaptured(t *testing.T) {
	both(t, func(t *testing.T, d Driver) {
		h := start(t, d, shell(t, `echo out; echo err >&2; printf unfinished`))
		wait(t, d, h)
		if out, err := logs(t, d, h, Stdout), logs(t, d, h, Stderr); out != "out\nunfinished" || err != "err\n" {
			t.Errorf("%q, %q", out, err)
		}
		if b, _ := os.ReadFile(filepath.Join(h.Dir, "logs", "stdout.0")); string(b) != "out\nunfinished" {
			t.Errorf("on disk there is %q", b)
		}
	})
}

func TestLogsAreBounded(t *testing.T) {
	d := NewRawExec()
	task := shell(t, `i=0; while [ $i -lt 1000 ]; do echo "line $i of a long output"; i=$((i+1)); done`)
	task.LogSize, task.LogFiles = 1000, 3
	h := start(t, d, task)
	wait(t, d, h)
	entries, err := os.ReadDir(filepath.Join(h.Dir, "logs"))
	if err != nil {
		t.Fatal(err)
	}
	files := 0
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		if info.Size() > 1000 {
			t.Errorf("%s has %d bytes", e.Name(), info.Size())
		}
		if strings.HasPrefix(e.Name(), "stdout.") {
			files++
		}
	}
	out := logs(t, d, h, Stdout)
	if files != 3 || !strings.HasSuffix(out, "line 998 of a long output\nline 999 of a long output\n") || len(out) > 3000 {
		t.Errorf("%d files, %d bytes, the end is %q", files, len(out), out[max(0, len(out)-80):])
	}
}

// The follower sees what comes later, over rotations, and its call ends with the task.
func TestLogsAreFollowed(t *testing.T) {
	d := NewRawExec()
	f := newFifos(t)
	task := shell(t, `echo first; echo > `+f.dir+`/ready; cat `+f.dir+`/go > /dev/null
		i=0; while [ $i -lt 50 ]; do echo "line $i"; i=$((i+1)); done`)
	task.LogSize, task.LogFiles = 100, 100
	h := start(t, d, task)
	f.reached(t)
	var got lines
	done := make(chan error)
	go func() { done <- d.Logs(t.Context(), h, Stdout, true, &got) }()
	got.wait(t, "first\n")
	f.goOn(t)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if text := got.b.String(); !strings.HasSuffix(text, "line 48\nline 49\n") || strings.Count(text, "\n") != 51 {
		t.Errorf("it followed %q", text)
	}
}

// lines is a writer on which a test can wait.
type lines struct {
	mu   sync.Mutex
	cond *sync.Cond
	b    bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cond != nil {
		l.cond.Broadcast()
	}
	return l.b.Write(p)
}

func (l *lines) wait(t *testing.T, text string) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cond = sync.NewCond(&l.mu)
	for !strings.Contains(l.b.String(), text) {
		l.cond.Wait()
	}
}
