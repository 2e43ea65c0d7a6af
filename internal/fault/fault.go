package fault

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Fault is one line.
type Fault struct {
	At     string        // "start", "serving" or a method
	Later  time.Duration // with "serving"
	After  bool          // with a method: its work is done
	Do     string        // the action
	With   string        // what the action needs
	Times  int           // at most so often in one process; 0: always
	Once   string        // only by the process that makes this file
	During time.Duration // With, of "slow"
}

// actions says what follows each action.
var actions = map[string]string{
	"hang": "", "slow": "time", "exit": "", "panic": "", "kill-self": "", "freeze": "", "error": "kind", "kill-host": "", "kill-other": "",
	"touch": "path", "wait-for": "path", "arrivals": "path", "rubbish": "", "noise": "", "fork": "", "protocol": "number", "schema": "number",
}

// Kinds are what may follow "error".
var Kinds = []string{"invalid", "conflict", "unavailable", "fenced", "exhausted", "damaged", "internal"}

// Parse reads lines. An empty one, and one that begins with #, says nothing.
func Parse(lines ...string) (all []Fault, err error) {
	for _, line := range lines {
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		f, err := parse(strings.Fields(line))
		if err != nil {
			return nil, fmt.Errorf("fault %q: %w", line, err)
		}
		all = append(all, f)
	}
	return all, nil
}

func parse(words []string) (f Fault, err error) {
	take := func() (word string) {
		if len(words) > 0 {
			word, words = words[0], words[1:]
		}
		return word
	}
	switch f.At = take(); f.At {
	case "start":
	case "serving":
		if f.Later, err = time.ParseDuration(take()); err != nil {
			return f, err
		}
	default:
		when := take()
		if f.After = when == "after"; !f.After && when != "before" {
			return f, errors.New(`neither "before" nor "after"`)
		}
	}
	f.Do = take()
	what, known := actions[f.Do]
	if !known {
		return f, errors.New("no such action")
	}
	if what != "" && len(words) > 0 && words[0] != "times" && words[0] != "once" {
		f.With = take()
	}
	if err := f.checkWith(what); err != nil {
		return f, err
	}
	switch word := take(); word {
	case "times":
		f.Times, err = strconv.Atoi(take())
	case "once":
		f.Once = take()
	case "":
	default:
		err = fmt.Errorf("what is %q", word)
	}
	return f, err
}

func (f *Fault) checkWith(what string) (err error) {
	switch what {
	case "time":
		f.During, err = time.ParseDuration(f.With)
	case "number":
		_, err = strconv.Atoi(f.With)
	case "path":
		if !filepath.IsAbs(f.With) {
			return errors.New("no absolute path")
		}
	case "kind":
		if f.With != "" && !slices.Contains(Kinds, f.With) {
			return fmt.Errorf("no kind; there are %v", Kinds)
		}
	}
	return err
}

// magic ends a program with faults; before it stands how long they are, in 8 bytes.
const magic = "holdfast-faults\n"

// Read gives the faults behind a program.
func Read(program string) ([]Fault, error) {
	f, err := os.Open(program)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	tail := make([]byte, 8+len(magic))
	if _, err := f.ReadAt(tail, end-int64(len(tail))); err != nil {
		return nil, err
	}
	if !bytes.HasSuffix(tail, []byte(magic)) {
		return nil, nil
	}
	text := make([]byte, binary.BigEndian.Uint64(tail))
	if _, err := f.ReadAt(text, end-int64(len(tail)+len(text))); err != nil {
		return nil, err
	}
	return Parse(strings.Split(string(text), "\n")...)
}

// Build builds the program for Binary into dir and returns its path, without what a debugger needs: it is copied often. flags are those of go
// build: -race where the test has it.
func Build(dir string, flags ...string) (string, error) {
	path := filepath.Join(dir, "holdfast-shim-faulty")
	cmd := exec.Command("go", append(append([]string{"build"}, flags...), "-ldflags=-s -w", "-o", path, "holdfast/shim/internal/faulty")...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the faulty shim: %w\n%s", err, out)
	}
	return path, nil
}

// Binary is a shim with the faults that lines say: the program that Build has built, in dir under name. Each name is another digest.
func Binary(t testing.TB, program, dir, name string, lines ...string) (path string) {
	t.Helper()
	if _, err := Parse(lines...); err != nil {
		t.Fatal(err)
	}
	body, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Join(append(lines, "# "+name), "\n")
	body = append(body, text...)
	body = binary.BigEndian.AppendUint64(body, uint64(len(text)))
	path = filepath.Join(dir, name)
	if err := os.WriteFile(path, append(body, magic...), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}
