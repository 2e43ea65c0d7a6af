package supervise

import (
	"context"
	"fmt"
	"path/filepath"
	"sync"

	"github.com/fsnotify/fsnotify"
)

// Directories tells of changes in the directories of sockets. One inotify instance serves all of them: there are few of those.
type Directories struct {
	watcher *fsnotify.Watcher
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

// Close ends Run.
func (d *Directories) Close() error { return d.watcher.Close() }

// Run passes changes on until ctx ends or Close is called.
func (d *Directories) Run(ctx context.Context) error {
	for {
		select {
		case e, open := <-d.watcher.Events:
			if !open {
				return nil
			}
			d.wake(filepath.Dir(e.Name))
		case _, open := <-d.watcher.Errors:
			if !open {
				return nil
			}
			d.wakeAll()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Changed returns when something changes in the socket's directory, or when ctx ends. A directory that cannot be watched changes never.
func (d *Directories) Changed(ctx context.Context, socket string) {
	dir := filepath.Dir(socket)
	w := d.join(dir)
	defer d.part(dir, w)
	select {
	case <-w.changed:
	case <-ctx.Done():
	}
}

func (d *Directories) join(dir string) *dirWait {
	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.waiting[dir]
	if w == nil {
		w = &dirWait{changed: make(chan struct{})}
		d.waiting[dir] = w
		_ = d.watcher.Add(dir) // without it the caller's back-off does
	}
	w.uses++
	return w
}

func (d *Directories) part(dir string, w *dirWait) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if w.uses--; w.uses == 0 && d.waiting[dir] == w {
		delete(d.waiting, dir)
		_ = d.watcher.Remove(dir)
	}
}

func (d *Directories) wake(dir string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if w := d.waiting[dir]; w != nil {
		close(w.changed)
		delete(d.waiting, dir)
		_ = d.watcher.Remove(dir)
	}
}

func (d *Directories) wakeAll() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for dir, w := range d.waiting {
		close(w.changed)
		delete(d.waiting, dir)
		_ = d.watcher.Remove(dir)
	}
}
