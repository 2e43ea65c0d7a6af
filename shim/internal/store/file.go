package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"holdfast/internal/proc"
	"holdfast/registry"
)

const (
	dirMode  = 0o700
	fileMode = 0o600

	// lockRetry is the time between two attempts to lock the file, because flock(2) has no deadline.
	lockRetry = 2 * time.Millisecond

	// mapSize limits the size of the file, in bytes of address space. All of it is mapped at once, because bbolt waits
	// for all views to end before it enlarges the mapping.
	mapSize = 1 << 30
	// growStep is the number of bytes by which bbolt extends the file where reserve has not allocated space.
	growStep = 1 << 20
)

// ensureDir creates the state directory if there is none, and refuses one that other users can use.
func ensureDir(dir string) error {
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return registry.Errorf(registry.ErrUnavailable, "state directory: %w", err)
	}
	info, err := os.Stat(dir)
	if err != nil {
		return registry.Errorf(registry.ErrUnavailable, "state directory: %w", err)
	}
	return checkOwner(dir, info, 0o077, fmt.Sprintf("chmod %o", dirMode))
}

// CheckAccess returns an ErrDenied if a shim would refuse the permissions, owner or type of the state file or its
// directory. It creates a missing directory, does not read the file and takes no lock.
func CheckAccess(path string) error {
	if err := ensureDir(filepath.Dir(path)); err != nil {
		return err
	}
	file, err := openFile(path, true)
	if err != nil {
		return err
	}
	return file.Close()
}

// checkOwner refuses a file that belongs to another user, or that has one of the forbidden permissions.
func checkOwner(path string, info fs.FileInfo, forbidden fs.FileMode, remedy string) error {
	stat := info.Sys().(*syscall.Stat_t)
	if int(stat.Uid) != os.Geteuid() {
		return registry.Errorf(registry.ErrDenied,
			"%s belongs to uid %d, and the shim runs as uid %d", path, stat.Uid, os.Geteuid())
	}
	if info.Mode().Perm()&forbidden != 0 {
		return registry.Errorf(registry.ErrDenied,
			"%s has mode %#o, so other users may use it; find out why, then run %s %s",
			path, info.Mode().Perm(), remedy, path)
	}
	return nil
}

// openFile opens the file for reading and writing. It follows no link, does not wait at a FIFO, and refuses a file that
// no store has created. If readable is set and the file system is read-only, it opens the file for reading.
func openFile(path string, readable bool) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if readable && errors.Is(err, unix.EROFS) {
		file, err = os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	}
	switch {
	case errors.Is(err, unix.ELOOP):
		return nil, registry.Errorf(registry.ErrDenied,
			"%s is a symbolic link; the state file must be a file of its own", path)
	case errors.Is(err, fs.ErrPermission):
		return nil, registry.Errorf(registry.ErrDenied, "state file: %w", err)
	case errors.Is(err, unix.EROFS):
		return nil, registry.Errorf(registry.ErrUnavailable, "%s is on a read-only file system: %w; mount it for "+
			"writing; the kernel log may say why it is not", path, err)
	case errors.Is(err, unix.EISDIR):
		return nil, registry.Errorf(registry.ErrDenied, "%s is a directory", path)
	case err != nil:
		return nil, registry.Errorf(registry.ErrUnavailable, "state file: %w", err)
	}
	if err := checkFile(path, file); err != nil {
		_ = file.Close()
		return nil, err
	}
	return file, nil
}

func checkFile(path string, file *os.File) error {
	info, err := file.Stat()
	if err != nil {
		return registry.Errorf(registry.ErrUnavailable, "state file: %w", err)
	}
	if !info.Mode().IsRegular() {
		return registry.Errorf(registry.ErrDenied, "%s is not a regular file (%s)", path, info.Mode().Type())
	}
	if links := info.Sys().(*syscall.Stat_t).Nlink; links != 1 {
		return registry.Errorf(registry.ErrDenied,
			"%s has %d hard links; the state file must have one name only", path, links)
	}
	return checkOwner(path, info, 0o177, fmt.Sprintf("chmod %o", fileMode))
}

// lock waits for the file's lock until ctx ends. bbolt uses the same descriptor, and can therefore lock it again.
func lock(ctx context.Context, path string, file *os.File) error {
	for {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return registry.Errorf(registry.ErrUnavailable, "lock %s: %w", path, err)
		}
		select {
		case <-ctx.Done():
			return registry.Errorf(registry.ErrConflict, "%s is locked by %s: %w", path, lockHolder(path),
				context.Cause(ctx))
		case <-time.After(lockRetry):
		}
	}
}

// unlock releases the lock. It accepts a closed file.
func unlock(path string, file *os.File) error {
	if err := unix.Flock(int(file.Fd()), unix.LOCK_UN); err != nil && !errors.Is(err, unix.EBADF) {
		return registry.Errorf(registry.ErrUnavailable, "unlock %s: %w", path, err)
	}
	return nil
}

// lockHolder names the process that has locked the file, for messages. If that process has exited, the processes that
// inherited the open file still hold the lock.
func lockHolder(path string) string {
	for _, pid := range proc.FlockHolders(path) {
		if stat, err := proc.ReadStat(pid); err == nil && !stat.Exited() {
			return proc.Name(pid)
		}
	}
	var heirs []string
	pids, _ := proc.PIDs()
	for _, pid := range pids {
		if pid != os.Getpid() && proc.Opens(pid, path) {
			heirs = append(heirs, proc.Name(pid))
		}
	}
	if len(heirs) == 0 {
		return "another process"
	}
	return strings.Join(heirs, ", ") + ", which inherited the lock of a process that has exited: end it"
}

// sameFile reports whether path still names the open file.
func sameFile(path string, file *os.File) (bool, error) {
	named, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	opened, err := file.Stat()
	return err == nil && os.SameFile(named, opened), err
}

// openLocked opens and locks the file at path. If there is none, it creates it. readable is passed to openFile.
func openLocked(ctx context.Context, path string, s schema, readable bool) (file *os.File, created bool, err error) {
	for {
		file, err := openFile(path, readable)
		if errors.Is(err, fs.ErrNotExist) {
			if err := create(ctx, path, s); err != nil {
				return nil, false, err
			}
			created = true
			continue
		}
		if err != nil {
			return nil, false, err
		}
		if err := lock(ctx, path, file); err != nil {
			_ = file.Close()
			return nil, false, err
		}
		same, err := sameFile(path, file)
		if same {
			return file, created, nil
		}
		_ = file.Close()
		if err != nil {
			return nil, false, registry.Errorf(registry.ErrUnavailable, "state file: %w", err)
		}
	}
}

// create puts an empty state file at path, unless one exists by now. A crash leaves the whole file or none. create
// locks the directory, so that two processes that start at once do not replace each other's file.
func create(ctx context.Context, path string, s schema) error {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return registry.Errorf(registry.ErrUnavailable, "state directory: %w", err)
	}
	defer dir.Close()
	if err := lock(ctx, dir.Name(), dir); err != nil {
		return err
	}
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return err // nil: another process has created the file
	}
	temp := path + ".new"
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return registry.Errorf(registry.ErrUnavailable, "remove the file of an interrupted start: %w", err)
	}
	if err := writeEmpty(temp, s); err != nil {
		return diskError("create "+temp, err)
	}
	if err := os.Rename(temp, path); err != nil {
		return registry.Errorf(registry.ErrUnavailable, "state file: %w", err)
	}
	if err := dir.Sync(); err != nil {
		return registry.Errorf(registry.ErrUnavailable, "sync state directory: %w", err)
	}
	return nil
}

// diskError wraps an error as ErrExhausted if the disk is full or read-only, else as ErrUnavailable.
func diskError(what string, err error) error {
	if outOfSpace(err) {
		return registry.Errorf(registry.ErrExhausted, "%s: %w; make room there", what, err)
	}
	return registry.Errorf(registry.ErrUnavailable, "%s: %w", what, err)
}

// writeEmpty creates a state file without records at temp, where no file may exist.
func writeEmpty(temp string, s schema) error {
	openNew := func(name string, flag int, mode os.FileMode) (*os.File, error) {
		return os.OpenFile(name, flag|os.O_EXCL|unix.O_NOFOLLOW, mode)
	}
	db, err := bolt.Open(temp, fileMode, &bolt.Options{
		OpenFile: openNew, FreelistType: bolt.FreelistMapType, NoStatistics: true,
	})
	if err != nil {
		return err
	}
	err = db.Update(func(tx *bolt.Tx) error { return s.createBuckets(newTransaction(tx)) })
	return errors.Join(err, db.Close())
}

// openBolt opens the file with bbolt, and reads the state on which Open bases its decisions. The database owns the file
// from then on. After an error, the file is closed.
func openBolt(path string, file *os.File, throwaway bool) (o opened, err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil { // a panic of bbolt, a fault of the mapped file, or damage
			err = registry.Errorf(registry.ErrDamaged, "open %s: %v", path, r)
		}
		if err != nil {
			_ = unlock(path, file) // bbolt may have mapped the file, and the mapping keeps the lock
			_ = file.Close()
		}
	}()
	o.file = file
	o.db, err = bolt.Open(path, fileMode, &bolt.Options{
		OpenFile:        func(string, int, os.FileMode) (*os.File, error) { return file, nil },
		FreelistType:    bolt.FreelistMapType,
		InitialMmapSize: mapSize,
		MaxSize:         mapSize - 1,
		NoStatistics:    true,
		NoSync:          throwaway,
		NoGrowSync:      throwaway,
	})
	if err != nil {
		return o, registry.Errorf(registry.ErrUnavailable, "open %s: %w", path, err)
	}
	o.db.AllocSize = growStep
	err = o.db.View(func(tx *bolt.Tx) error { o.fileState = stateOf(tx); return nil })
	return o, err
}

// writable reports whether the file is open for writing.
func writable(file *os.File) bool {
	flags, err := unix.FcntlInt(file.Fd(), unix.F_GETFL, 0)
	return err == nil && flags&unix.O_ACCMODE == unix.O_RDWR
}
