package task

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/fsnotify/fsnotify"
)

var _ Sockets = (*Directories)(nil)

// Directories tells of changes in the directories of sockets. One inotify instance serves all of them: there are few of those.
type Directories struct {
	watcher *fsnotify.Watcher
	edit    sync.Mutex // held while the watcher is told what to watch, so that it agrees with waiting. Run never takes it
	mu      sync.Mutex // guards waiting; held for no longer than a look-up
	waiting map[string]*dirWait
}

// dirWait is who waits for a change of one directory.
type dirWait struct {
	changed chan struct{} // closed at the next change
	uses    int
}

// NewDirectories opens the inotify instance; Close closes it.
func NewDirectories() (*Directories, error) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("watch sockets by inotify: %w", err)
	}
	return &Directories{watcher: w, waiting: map[string]*dirWait{}}, nil
}

// Close ends Run. Who still waits is told nothing more.
func (d *Directories) Close() error { return d.watcher.Close() }

// Run passes changes on until ctx ends or Close is called.
func (d *Directories) Run(ctx context.Context) error {
	for {
		select {
		case e, open := <-d.watcher.Events:
			if !open {
				return nil
			}
			d.wake(e.Name)               // the directory itself: it is removed or moved
			d.wake(filepath.Dir(e.Name)) // something in it
		case _, open := <-d.watcher.Errors:
			if !open {
				return nil
			}
			d.wakeAll() // the queue ran over: anything may have changed
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Changed returns when something changes in the socket's directory, or when ctx ends. A directory that cannot be watched changes never: the
// caller's ctx is its back-off.
func (d *Directories) Changed(ctx context.Context, socket string) {
	dir := filepath.Dir(socket)
	changed := d.join(dir)
	defer d.part(dir)
	select {
	case <-changed:
	case <-ctx.Done():
	}
}

// Missing reports whether the socket's file does not exist, and whether its directory does not either. If the file cannot
// be looked up, neither is reported as missing.
func (d *Directories) Missing(socket string) (file, dir bool) {
	if _, err := os.Lstat(socket); !errors.Is(err, fs.ErrNotExist) {
		return false, false
	}
	_, err := os.Lstat(filepath.Dir(socket))
	return true, errors.Is(err, fs.ErrNotExist)
}

// join has the directory watched. It may be another one of the same name than before.
func (d *Directories) join(dir string) <-chan struct{} {
	d.edit.Lock()
	defer d.edit.Unlock()
	changed := d.enter(dir)
	_ = d.watcher.Add(dir)
	return changed
}

func (d *Directories) enter(dir string) <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.waiting[dir]
	if w == nil {
		w = &dirWait{changed: make(chan struct{})}
		d.waiting[dir] = w
	}
	w.uses++
	return w.changed
}

// part ends the watching when nobody waits any more.
func (d *Directories) part(dir string) {
	d.edit.Lock()
	defer d.edit.Unlock()
	if d.leave(dir) {
		_ = d.watcher.Remove(dir) // one that was removed is not watched
	}
}

func (d *Directories) leave(dir string) (last bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.waiting[dir]
	if w.uses--; w.uses == 0 {
		delete(d.waiting, dir)
	}
	return w.uses == 0
}

func (d *Directories) wake(dir string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if w := d.waiting[dir]; w != nil {
		w.tell()
	}
}

func (d *Directories) wakeAll() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, w := range d.waiting {
		w.tell()
	}
}

// tell wakes who waits now.
func (w *dirWait) tell() {
	close(w.changed)
	w.changed = make(chan struct{})
}
