package priority

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// Where the kernel shares processors among sessions first (sched(7), "The autogroup feature"), as it does outside of control groups, the priority of a
// thread counts among the threads of its own session only: an idle one has as large a part as a session that works. So the session is set as well,
// if the process has one of its own.

// session is the nice value of a process's own session, nil if there is none that may be set.
func session(pid int) *int32 {
	leader, err := unix.Getsid(own(pid))
	if err != nil || leader != own(pid) {
		return nil
	}
	text, err := os.ReadFile(autogroup(pid)) // "/autogroup-17 nice 0"
	if err != nil {
		return nil
	}
	words := bytes.Fields(text)
	if len(words) == 0 {
		return nil
	}
	nice, err := strconv.ParseInt(string(words[len(words)-1]), 10, 32)
	if err != nil || setSession(pid, int32(nice)) != nil {
		return nil
	}
	return new(int32(nice))
}

// setSession sets the nice value of a process's session. One whose process has ended is fs.ErrNotExist.
func setSession(pid int, nice int32) error {
	err := os.WriteFile(autogroup(pid), strconv.AppendInt(nil, int64(nice), 10), 0)
	if errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("%w: %w", fs.ErrNotExist, err)
	}
	return err
}

func autogroup(pid int) string { return fmt.Sprintf("/proc/%d/autogroup", own(pid)) }
