package mount

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// mountFuse mounts a file system whose server answers only the kernel's first request. A process that uses it hangs and
// cannot be killed. After dies was called, it gets ENOTCONN.
func mountFuse(t *testing.T, at string) (dies func()) {
	t.Helper()
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("there is no FUSE for this user: %v", err)
	}
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=%d", fd, os.Getuid(), os.Getgid())
	must(t, unix.Mount("hung", at, "fuse.test", unix.MS_NOSUID|unix.MS_NODEV, options))
	dev := os.NewFile(uintptr(fd), "/dev/fuse") // not earlier: before the mount, /dev/fuse cannot be polled
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for request := make([]byte, 1<<17); ; {
			if _, err := dev.Read(request); err != nil {
				return
			}
			const initialise = 26
			if binary.NativeEndian.Uint32(request[4:]) == initialise {
				reply := make([]byte, 16+64) // fuse_out_header, fuse_init_out
				binary.NativeEndian.PutUint32(reply, uint32(len(reply)))
				copy(reply[8:16], request[8:16])
				binary.NativeEndian.PutUint32(reply[16:], 7)
				binary.NativeEndian.PutUint32(reply[20:], 31)
				_, _ = dev.Write(reply)
			}
		}
	}()
	dies = func() {
		dev.Close()
		<-ended
	}
	t.Cleanup(func() {
		dies()
		until(t, "processes that hung release the mount",
			func() bool { return !errors.Is(unix.Unmount(at, 0), unix.EBUSY) })
	})
	return dies
}
