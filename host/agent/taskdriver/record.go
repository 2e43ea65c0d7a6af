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

// The records in a task's directory. Each is replaced as a whole, so a reader sees the old or the new one.
const (
	handleFile = "task.json"
	exitFile   = "exit.json"
	stopFile   = "stop.json"
	lockFile   = "lock"
)

// ending is exit.json: the directory may be used by several attempts, one after another.
type ending struct {
	ID   string `json:"id"`
	Exit Exit   `json:"exit"`
}

// stopping is stop.json.
type stopping struct {
	ID    string        `json:"id"`
	Grace time.Duration `json:"grace"`
}

// writeRecord uses the record's reserve, if it has one.
func writeRecord(dir, name string, v any) error {
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
	err = errors.Join(err, f.Truncate(int64(len(b))), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(dir, name))
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

// reserveSize is more than an exit or a stop takes.
const reserveSize = 4096

func reserveOf(dir, name string) string { return filepath.Join(dir, "."+name+".reserve") }

// reserveRecord takes the room for a record now, so that it can be written on a full disk.
func reserveRecord(dir, name string) error {
	return os.WriteFile(reserveOf(dir, name), bytes.Repeat([]byte(" "), reserveSize), 0o600)
}

// OutOfSpace says whether the error is that of a disk, or a quota, without room.
func OutOfSpace(err error) bool {
	return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT)
}

// noRoom makes the error of a full disk registry.ErrExhausted, which a parent can tell its starter.
func noRoom(err error) error {
	if OutOfSpace(err) && !errors.Is(err, registry.ErrExhausted) {
		return registry.Errorf(registry.ErrExhausted, "%w", err)
	}
	return err
}

func readRecord(dir, name string, v any) (found bool, err error) {
	b, err := os.ReadFile(filepath.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err == nil {
		err = json.Unmarshal(b, v)
	}
	if err != nil {
		return false, registry.Errorf(registry.ErrDamaged, "%s: %w", filepath.Join(dir, name), err)
	}
	return true, nil
}

// readExit is how the attempt ended, if that is written.
func readExit(h Handle) (Exit, bool, error) {
	var e ending
	found, err := readRecord(h.Dir, exitFile, &e)
	return e.Exit, found && e.ID == h.ID, err
}

// noteLost notes that it is not known how the attempt ended, unless the directory is another attempt's by now.
func noteLost(h Handle, exit Exit) error {
	var owner Handle
	found, err := readRecord(h.Dir, handleFile, &owner)
	if err != nil || !found || owner.ID != h.ID {
		return err
	}
	return writeRecord(h.Dir, exitFile, ending{h.ID, exit})
}

// lock takes a task's directory. The parent inherits it, so it is held until both are gone.
func lock(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, registry.Errorf(registry.ErrConflict, "a task runs in %s already: %w", dir, err)
	}
	return f, nil
}

// Find is the handle of the task in dir, which an orchestrator may have started without living to note it. A start that is under
// way is waited for. No handle: nothing runs there, and nothing will.
func Find(ctx context.Context, dir string) (Handle, bool, error) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		free, err := lock(dir)
		if errors.Is(err, fs.ErrNotExist) {
			return Handle{}, false, nil
		}
		if err != nil && !errors.Is(err, registry.ErrConflict) {
			return Handle{}, false, err
		}
		if free != nil {
			free.Close()
		}
		var h Handle
		found, err := readRecord(dir, handleFile, &h)
		if err != nil || free != nil || found && h.TaskPID != 0 {
			return h, found, err
		}
		select {
		case <-ctx.Done():
			return Handle{}, false, fmt.Errorf("wait for the task that starts in %s: %w", dir, context.Cause(ctx))
		case <-tick.C:
		}
	}
}
