package mount

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// question is what a Lookout writes to its helper: one of these.
type question struct {
	Look    [][]byte      `json:"look,omitempty"` // paths, of any bytes
	Users   [][]byte      `json:"users,omitempty"`
	Unmount *mounted      `json:"unmount,omitempty"`
	Part    *partQuestion `json:"part,omitempty"`
	Within  time.Duration `json:"within"` // nobody listens after that
}

// mounted is a mount below a root.
type mounted struct {
	Root []byte `json:"root"`
	Rel  []byte `json:"rel"`
}

// answer is one line of the helper's: that it begins with a path, or what there is about it. N is the path's number in the question.
type answer struct {
	N     int      `json:"n"`
	TID   int      `json:"tid,omitempty"` // the thread that begins
	Seen  *Seen    `json:"seen,omitempty"`
	Users [][]User `json:"users,omitempty"`
	Done  bool     `json:"done,omitempty"` // the end of all
	Error string   `json:"error,omitempty"`
	Kind  int      `json:"kind,omitempty"` // of the error: one of kinds, from 1
}

// kinds are the errors that survive the way from the helper.
var kinds = []error{ErrBusy, ErrMounted, ErrNoPart, ErrOutside, ErrHeld, unix.ENOSPC, unix.EDQUOT}

// Bounds of looking at paths.
const (
	lookers  = 64                     // paths at a time
	patience = 250 * time.Millisecond // until one that hangs is looked at beside the others
)

// LookMain is all that the helper of a Lookout does: it answers one question and exits.
func LookMain() {
	closeInherited()
	if err := answerTo(os.Stdin, os.Stdout); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// closeInherited closes what was left open by an exec; whatever this process opens itself is marked to be closed by one.
func closeInherited() {
	names, _ := namesIn("/proc/self/fd")
	for _, name := range names {
		fd, err := strconv.Atoi(name)
		if err != nil || fd <= 2 {
			continue
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			unix.Close(fd)
		}
	}
}

func answerTo(in io.Reader, out io.Writer) error {
	var q question
	if err := json.NewDecoder(in).Decode(&q); err != nil {
		return fmt.Errorf("read the question: %w", err)
	}
	time.AfterFunc(q.Within+time.Second, func() { os.Exit(1) }) // whoever asked is dead
	var mu sync.Mutex
	say := func(a answer) {
		line, err := json.Marshal(a)
		mu.Lock()
		defer mu.Unlock()
		if err == nil {
			_, err = out.Write(append(line, '\n'))
		}
		if err != nil {
			os.Exit(1) // nobody listens
		}
	}
	last := answer{Done: true}
	switch {
	case q.Unmount != nil:
		say(answer{TID: os.Getpid()})
		last.fail(Unmount(string(q.Unmount.Root), string(q.Unmount.Rel)))
	case q.Part != nil:
		say(answer{TID: os.Getpid()})
		last.fail(q.Part.answer(in))
	case q.Users != nil:
		found, err := users(texts(q.Users), os.Getpid(), os.Getppid())
		last.fail(err)
		for _, p := range texts(q.Users) {
			last.Users = append(last.Users, found[p])
		}
	default:
		lookAll(texts(q.Look), say)
	}
	say(last)
	return nil
}

// lookAll looks at each path on a thread of its own, so that one that hangs holds up no other.
func lookAll(paths []string, say func(answer)) {
	debug.SetMaxThreads(len(paths) + 1000)
	ms, _ := Table(0) // without it the types are not known
	types := make(map[int]string, len(ms))
	for _, m := range ms {
		types[m.ID] = m.FSType
	}
	crowd := newCrowd(lookers, patience)
	var all sync.WaitGroup
	all.Add(len(paths))
	for n, path := range paths {
		crowd.run(func() {
			defer all.Done()
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			tid := unix.Gettid()
			say(answer{N: n, TID: tid})
			s := see(path, types)
			say(answer{N: n, TID: tid, Seen: &s})
		})
	}
	all.Wait()
}

func (a *answer) fail(err error) {
	if err != nil {
		a.Error = err.Error()
		a.Kind = 1 + slices.IndexFunc(kinds, func(k error) bool { return errors.Is(err, k) })
	}
}

// told is an error of the helper.
type told struct {
	text string
	kind error
}

func (t *told) Error() string { return t.text }
func (t *told) Unwrap() error { return t.kind }

func (a answer) err() error {
	switch {
	case a.Error == "":
		return nil
	case a.Kind < 1 || a.Kind > len(kinds):
		return errors.New(a.Error)
	}
	return &told{a.Error, kinds[a.Kind-1]}
}

func texts(paths [][]byte) (out []string) {
	for _, p := range paths {
		out = append(out, string(p))
	}
	return out
}
