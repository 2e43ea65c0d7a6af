package taskdriver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/registry"
)

// The records in a task's directory. Each is replaced atomically.
const (
	handleFile = "task.json"
	exitFile   = "exit.json"
	stopFile   = "stop.json"
	lockFile   = "lock"
	execFile   = "exec.lock" // each helper process of Exec holds a shared lock on it while it lives
)

// exitRecord is the content of exit.json. It has the ID, because several attempts use the directory one after another.
// It has the driver, because a power cut may leave exit.json without task.json.
type exitRecord struct {
	ID     string `json:"id"`
	Driver string `json:"driver,omitempty"`
	Exit   Exit   `json:"exit"`
}

// stopRequest is the content of stop.json.
type stopRequest struct {
	ID    string        `json:"id"`
	Grace time.Duration `json:"grace"`
}

// writeRecord replaces a record. It uses the space that reserveRecord has allocated, so it succeeds on a full disk. A
// usual atomic write would create a new file and fail.
func writeRecord(dir, name string, v any) error { return replaceRecord(dir, name, v, (*os.File).Sync) }

// writeVolatile is writeRecord without a sync, for a record that has no use after a reboot. The record survives the
// death of processes. After a power cut it may be missing.
func writeVolatile(dir, name string, v any) error {
	return replaceRecord(dir, name, v, func(*os.File) error { return nil })
}

func replaceRecord(dir, name string, v any, sync func(*os.File) error) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(reserveOf(dir, name), os.O_WRONLY, 0)
	if err != nil || len(b) > reserveSize {
		f.Close() // nil is fine
		f, err = os.CreateTemp(dir, "."+name+"-")
	}
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Truncate(int64(len(b))), sync(f), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(dir, name))
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

// reserveSize is larger than the record of an exit or a stop.
const reserveSize = 4096

func reserveOf(dir, name string) string { return filepath.Join(dir, "."+name+".reserve") }

// reserveRecord allocates the space of a record before it is needed.
func reserveRecord(dir, name string) error {
	return os.WriteFile(reserveOf(dir, name), bytes.Repeat([]byte(" "), reserveSize), 0o600)
}

// OutOfSpace reports whether err means a full disk or an exhausted quota.
func OutOfSpace(err error) bool {
	return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT)
}

// Exhausted makes the error of a full disk a registry.ErrExhausted, and returns other errors unchanged.
func Exhausted(err error) error {
	if OutOfSpace(err) && !errors.Is(err, registry.ErrExhausted) {
		return registry.Errorf(registry.ErrExhausted, "%w", err)
	}
	return err
}

func readRecord(dir, name string, v any) (found bool, err error) {
	path := filepath.Join(dir, name)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err == nil {
		if len(bytes.Trim(b, " \x00")) == 0 {
			return false, nil // a power cut came before its content was on disk
		}
		err = json.Unmarshal(b, v)
	}
	if err != nil {
		return false, registry.Errorf(registry.ErrDamaged, "%s: %w", path, err)
	}
	return true, nil
}

// readExit returns the recorded exit of the attempt. recorded is false if there is none.
func readExit(h Handle) (exit Exit, recorded bool, err error) {
	var e exitRecord
	found, err := readRecord(h.Dir, exitFile, &e)
	return e.Exit, found && e.ID == h.ID, err
}

// recordLostExit records an unknown exit, unless a later attempt already uses the directory.
func recordLostExit(h Handle, exit Exit) error {
	var owner Handle
	found, err := readRecord(h.Dir, handleFile, &owner)
	if err != nil || !found || owner.ID != h.ID {
		return err
	}
	return writeRecord(h.Dir, exitFile, exitRecord{h.ID, h.Driver, exit})
}

// lock locks a task's directory. The parent inherits the descriptor and thereby the lock. Closing the file here must
// not unlock it, which the usual lock libraries would do.
func lock(dir string) (*os.File, error) {
	f, err := flock(filepath.Join(dir, lockFile), unix.LOCK_EX)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, registry.Errorf(registry.ErrConflict, "a task already runs in %s: %w", dir, err)
	}
	return f, err
}

// lockExec locks a task's directory for the helper process of a command, which inherits the lock.
func lockExec(dir string) (*os.File, error) {
	f, err := flock(filepath.Join(dir, execFile), unix.LOCK_SH)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, errTaskEnded // Wait holds the lock
	}
	return f, err
}

// flock opens and locks a file without waiting.
func flock(path string, how int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Find returns the handle of the last task that was started in dir, even if the orchestrator died before it recorded
// the handle. It waits for a start in progress. If found is false, nothing runs in dir, and nothing will start there.
// If a power cut has left only the exit of the task, the handle has only the fields that Wait needs to return it.
func Find(ctx context.Context, dir string) (h Handle, found bool, err error) {
	err = poll(ctx, pollInterval, func() (isKnown bool, err error) {
		h, found = Handle{}, false
		held, err := lock(dir)
		if errors.Is(err, fs.ErrNotExist) {
			return true, nil
		}
		if err != nil && !errors.Is(err, registry.ErrConflict) {
			return false, err
		}
		held.Close() // nil is fine
		found, err = readRecord(dir, handleFile, &h)
		if err != nil {
			return false, err
		}
		if held == nil { // the parent holds the lock, and sets TaskPID once it has started the task
			return found && h.TaskPID != 0, nil
		}
		if !found {
			var e exitRecord
			_, err = readRecord(dir, exitFile, &e)
			if found = e.Driver != ""; found {
				h = Handle{ID: e.ID, Driver: e.Driver, Dir: dir}
			}
		}
		return true, err
	})
	if err != nil {
		return Handle{}, false, fmt.Errorf("find the task that was started in %s: %w", dir, err)
	}
	return h, found, nil
}

// pollInterval is the usual interval of poll.
const pollInterval = 10 * time.Millisecond

// poll calls done until it returns true or an error, or ctx ends.
func poll(ctx context.Context, interval time.Duration, done func() (bool, error)) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		if finished, err := done(); finished || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
