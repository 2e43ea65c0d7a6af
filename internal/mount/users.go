package mount

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
)

// Use is how something is used.
type Use string

// The uses that a mount point can have.
const (
	WorksIn   Use = "cwd"       // a process's working directory
	RootedIn  Use = "root"      // a process's root
	Runs      Use = "exe"       // a process's program
	Opens     Use = "fd"        // an open file, also one that was removed
	Maps      Use = "map"       // a file mapped into memory
	MountedAt Use = "mounted"   // the same file system, or a part of it, is mounted elsewhere and stays there
	MountedIn Use = "submounts" // something is mounted inside it
)

// User is one who uses a mount.
type User struct {
	PID  int    `json:"pid,omitempty"`  // for a mount elsewhere: the first process of its namespace; 0: the mount is in our own
	Comm string `json:"comm,omitempty"` // the process's name (proc_pid_comm(5))
	Use  Use    `json:"use"`            //
	Path string `json:"path,omitempty"` // of the file or of the mount, as from the root of its namespace
}

func (u User) String() string {
	who, path := fmt.Sprintf("process %d (%s)", u.PID, printable(u.Comm)), printable(u.Path)
	switch {
	case u.Use == WorksIn:
		return who + " works in " + path
	case u.Use == RootedIn:
		return who + " has its root at " + path
	case u.Use == Runs:
		return who + " runs " + path
	case u.Use == Opens:
		return who + " has " + path + " open"
	case u.Use == Maps:
		return who + " maps " + path + " into its memory"
	case u.Use == MountedIn:
		return "something is mounted inside it, at " + path
	case u.PID == 0:
		return "it is mounted at " + path + " as well"
	}
	return "it is mounted at " + path + " in the mount namespace of " + who
}

// printable quotes what a process could have chosen to confuse the reader of a log.
func printable(s string) string {
	if strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return strconv.Quote(s)
	}
	return s
}

// Users says who uses what is mounted at each of the points and below them: processes, mounts inside, and mounts of the same file system
// elsewhere, in this namespace or in another, that would stay. A copy of a mount in another namespace that an unmount here takes off too,
// as the kernel propagates it, is no use; a process that is busy in such a copy is.
//
// A bind mount does not say what it was made from. One in another namespace counts for every point that it shows all or a part of. One in
// this namespace counts for the points that are older than it is; of several beside each other, on one and the same mount, only for the
// oldest, from which the others were made: a staged volume is used by what is published of it, and none of these by its siblings.
//
// It is what was true at some moment: the kernel's refusal to unmount is the last word. The calling process is not counted. What this
// process may not look into is not seen, nor is a namespace that no process is in. Users opens no path that may be in a volume. A
// process that hangs with its memory locked is left out in respect of its mapped files, and holds a thread of this process: Lookout.Users
// has that in a process that can be given up.
func Users(points []string) (map[string][]User, error) { return users(points, os.Getpid()) }

func users(points []string, without ...int) (map[string][]User, error) {
	c, err := newCensus(points)
	if err != nil || len(c.held) == 0 {
		return map[string][]User{}, err
	}
	all, err := processes(without)
	if err != nil {
		return nil, err
	}
	for _, ns := range c.namespaces(all) {
		c.follow(ns)
		c.elsewhere(ns)
	}
	c.inside()
	for _, p := range all {
		c.links(p)
	}
	c.mapped(all)
	for _, users := range c.users {
		slices.SortStableFunc(users, func(a, b User) int { return a.PID - b.PID })
	}
	return c.users, nil
}

// links counts what a process has open, its working directories, roots and program.
func (c *census) links(p process) {
	for _, t := range p.tasks {
		c.path(t, WorksIn, t.link("cwd"))
		c.path(t, RootedIn, t.link("root"))
	}
	t := p.tasks[0] // what follows its threads share
	c.path(t, Runs, t.link("exe"))
	t.files(func(mount int, path string) {
		if points := c.held[mount]; len(points) > 0 {
			c.add(points, User{PID: t.pid, Use: Opens, Path: path})
		}
	})
}

// path counts what is known by its path alone.
func (c *census) path(t task, use Use, path string) {
	for at := range upwards(path) {
		if points := c.places[t.ns][at]; len(points) > 0 {
			c.add(points, User{PID: t.pid, Use: use, Path: path})
		}
	}
}

// Bounds of waiting for a process's memory.
const (
	mapsPatience = 100 * time.Millisecond // then the next process is looked at beside it
	mapsLimit    = 2 * time.Second        // then it is left out
)

// mapped counts what the processes have mapped into their memory.
func (c *census) mapped(all []process) {
	type hit struct {
		t    task
		path string
	}
	crowd, begun := newCrowd(runtime.NumCPU(), mapsPatience), 0
	hits, limit := make(chan []hit, len(all)), time.Now().Add(mapsLimit)
	devices := c.devices()
	for _, p := range all {
		if time.Now().After(limit) {
			break
		}
		begun++
		crowd.run(func() {
			var found []hit
			p.tasks[0].maps(func(device, path string) {
				if n := len(found); devices[device] && (n == 0 || found[n-1].path != path) {
					found = append(found, hit{p.tasks[0], path})
				}
			})
			hits <- found
		})
	}
	late := time.After(time.Until(limit))
	for range begun {
		select {
		case found := <-hits:
			for _, h := range found {
				c.path(h.t, Maps, h.path)
			}
		case <-late:
			return
		}
	}
}

// crowd runs functions that may hang, each on its own, a number of them at a time. One that hangs gives its place to the next.
type crowd struct {
	places   chan struct{}
	patience time.Duration
}

func newCrowd(size int, patience time.Duration) crowd {
	return crowd{make(chan struct{}, size), patience}
}

// run waits for a place, and not for fn.
func (c crowd) run(fn func()) {
	c.places <- struct{}{}
	leave := sync.OnceFunc(func() { <-c.places })
	hangs := time.AfterFunc(c.patience, leave)
	go func() {
		defer leave()
		defer hangs.Stop()
		fn()
	}()
}

// upwards goes through a path and its parents, up to "/".
func upwards(path string) func(func(string) bool) {
	return func(yield func(string) bool) {
		if !filepath.IsAbs(path) {
			return
		}
		for path = filepath.Clean(path); yield(path) && path != "/"; path = filepath.Dir(path) {
		}
	}
}
