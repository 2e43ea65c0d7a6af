package control

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"
)

// firstActivated is the first descriptor that systemd passes: sd_listen_fds(3).
const firstActivated = 3

// Activated returns the listener that a systemd socket unit has passed for path. Without one it calls Listen.
func Activated(path string, log hclog.Logger) (net.Listener, error) {
	count, _ := strconv.Atoi(os.Getenv("LISTEN_FDS"))
	if os.Getenv("LISTEN_PID") != strconv.Itoa(os.Getpid()) {
		count = 0
	}
	l, err := findPassedListener(path, firstActivated, count)
	switch {
	case err != nil:
		return nil, err
	case l == nil:
		return Listen(path, log)
	}
	return newPeerListener(l, log), nil
}

// findPassedListener finds the listener of path among count descriptors that systemd passed, from first on. It marks
// all of these descriptors close-on-exec. found is nil if no listener has the path.
func findPassedListener(path string, first, count int) (found net.Listener, err error) {
	for fd := first; fd < first+count; fd++ {
		unix.CloseOnExec(fd)
		addr, failed := unix.Getsockname(fd)
		if at, is := addr.(*unix.SockaddrUnix); failed != nil || !is || at.Name != path || found != nil {
			continue
		}
		f := os.NewFile(uintptr(fd), path)
		if found, failed = net.FileListener(f); failed != nil {
			err = fmt.Errorf("socket %s of systemd: %w", path, failed)
		}
		err = errors.Join(err, f.Close())
	}
	return found, err
}
