package fault

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Fault is one line of faults.
type Fault struct {
	At    string        // "start", "serving", "store", "etcd" or a method of a service
	Later time.Duration // with "serving"
	After bool          // with a method or the store: after its work
	Do    string        // the action
	With  string        // the argument of the action
	Times int           // at most this often per process; 0: always
	Once  string        // only in the process that creates this file
}

// actions maps each action to the kind of its argument.
var actions = map[string]string{
	"hang": "", "exit": "", "panic": "", "kill-self": "", "freeze": "", "error": "kind", "kill-host": "",
	"kill-other": "", "kill-at": "path", "touch": "path", "wait-for": "path", "schema": "number",
}

// kinds are the arguments of "error".
var kinds = []string{"invalid", "conflict", "unavailable", "fenced", "exhausted", "damaged", "internal"}

// Parse parses lines of faults. Empty lines and lines that begin with # are ignored.
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
		return f, errors.New("unknown action")
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
		err = fmt.Errorf("unexpected word %q", word)
	}
	return f, err
}

func (f *Fault) checkWith(what string) (err error) {
	switch what {
	case "number":
		_, err = strconv.Atoi(f.With)
	case "path":
		if !filepath.IsAbs(f.With) {
			return errors.New("not an absolute path")
		}
	case "kind":
		if f.With != "" && !slices.Contains(kinds, f.With) {
			return fmt.Errorf("unknown kind; the kinds are %v", kinds)
		}
	}
	return err
}

// magic ends a program with faults. The 8 bytes before it are the length of the faults.
const magic = "holdfast-faults\n"

// Read returns the faults at the end of a program.
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

// Binary copies the program, which testbin.FaultyShim builds, to dir/name and appends faults. Programs with different
// names have different digests.
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
