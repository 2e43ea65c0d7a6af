package mount

import (
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"holdfast/internal/proc"
)

// question is the request of a Helper to its process. One field is set.
type question struct {
	Inspect     []string // paths
	Unmount     *Part    // Root and At
	MountPart   *Part
	UnmountPart *Part // Root and At
	Ownership   *Ownership
}

// answer reports that a thread has started an operation, or its result, or the end of all operations.
type answer struct {
	TID   int // the thread
	Path  int // index of the path in the question
	Found bool
	Info  Info
	Done  bool
	Error string
	Kind  int // of the error: index in errorKinds, from 1
}

// errorKinds are the errors that keep their identity in an answer.
var errorKinds = []error{ErrBusy, ErrMounted, ErrNoPart, ErrOutside, ErrHeld, unix.ENOSPC, unix.EDQUOT, unix.EROFS,
	ErrNotEmpty}

// HelperCommand runs this program as a helper process. The program's main function has to call BecomeHelper first.
var HelperCommand = []string{"/proc/self/exe", "-mount-helper"}

// BecomeHelper does not return in a helper process (HelperCommand). In any other process it does nothing.
func BecomeHelper() {
	if len(os.Args) == 2 && os.Args[1] == HelperCommand[1] {
		runHelper()
	}
}

// runHelper answers one question and exits. If the parent closes the pipe, it exits at once.
func runHelper() {
	closeInherited()
	unix.Umask(0) // directories of volumes are made with the mode of their parent
	var q question
	if err := gob.NewDecoder(os.Stdin).Decode(&q); err != nil {
		os.Exit(1)
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
	answerTo(q, os.Stdout)
	os.Exit(0)
}

// closeInherited closes files without close-on-exec, which the parent may have opened.
func closeInherited() {
	for _, open := range proc.FDs(os.Getpid()) {
		var fd int
		if _, err := fmt.Sscanf(open.Entry, "/proc/"+strconv.Itoa(os.Getpid())+"/fd/%d", &fd); err != nil || fd <= 2 {
			continue
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			unix.Close(fd)
		}
	}
}

func answerTo(q question, out io.Writer) {
	var mu sync.Mutex
	encoder := gob.NewEncoder(out)
	say := func(a answer) {
		mu.Lock()
		defer mu.Unlock()
		if encoder.Encode(a) != nil {
			os.Exit(1) // the parent has exited
		}
	}
	if q.Inspect != nil {
		inspectAll(q.Inspect, say)
		say(answer{Done: true})
		return
	}
	say(answer{TID: os.Getpid()})
	var err error
	switch {
	case q.Unmount != nil:
		err = Unmount(q.Unmount.Root, q.Unmount.At)
	case q.MountPart != nil:
		err = MountPart(*q.MountPart)
	case q.UnmountPart != nil:
		err = UnmountPart(q.UnmountPart.Root, q.UnmountPart.At)
	case q.Ownership != nil:
		err = SetOwnership(*q.Ownership)
	}
	last := answer{Done: true}
	if err != nil {
		last.Error = err.Error()
		last.Kind = 1 + slices.IndexFunc(errorKinds, func(k error) bool { return errors.Is(err, k) })
	}
	say(last)
}

// inspectAll inspects each path on a separate thread, so that a path that hangs does not delay the others.
func inspectAll(paths []string, say func(answer)) {
	debug.SetMaxThreads(len(paths) + 1000)
	var all sync.WaitGroup
	for n, path := range paths {
		all.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			tid := unix.Gettid()
			say(answer{Path: n, TID: tid})
			say(answer{Path: n, TID: tid, Found: true, Info: inspect(path)})
		})
	}
	all.Wait()
}

// remoteError is an error from a helper process.
type remoteError struct {
	text string
	kind error
}

func (e *remoteError) Error() string { return e.text }
func (e *remoteError) Unwrap() error { return e.kind }

func (a answer) err() error {
	if a.Error == "" {
		return nil
	}
	e := &remoteError{text: a.Error}
	if a.Kind >= 1 && a.Kind <= len(errorKinds) {
		e.kind = errorKinds[a.Kind-1]
	}
	return e
}
