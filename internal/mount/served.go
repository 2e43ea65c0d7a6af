package mount

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// sysfs is the directory in which the kernel describes block devices.
const sysfs = "/sys"

// IsServed reports whether a process serves the mount, so that the mount is dead once the process ends. That is a FUSE
// file system, a block device of nbd (rbd-nbd) or ublk, or a device on top of one.
func (m Mount) IsServed() bool { return m.isFUSE() || m.onServedDevice(sysfs) }

// Served reports whether a process serves the mount at path.
func Served(path string) bool {
	m, found, err := At(path)
	return err == nil && found && m.IsServed()
}

// onServedDevice reports whether a process serves the mount's device. If the mount is a device node, it reports this
// for the node's device.
func (m Mount) onServedDevice(sys string) bool {
	switch {
	case (m.FSType == "devtmpfs" || m.FSType == "tmpfs") && m.Root != "/": // a device node, unless it is a directory
		return isServedDevice(filepath.Join(sys, "class/block", filepath.Base(m.Root)), maxStacked)
	case m.Major != 0:
		return isServedDevice(filepath.Join(sys, "dev/block", strconv.Itoa(m.Major)+":"+strconv.Itoa(m.Minor)),
			maxStacked)
	case strings.HasPrefix(m.Source, "/dev/"): // for example btrfs, whose mounts have no device number
		node, err := filepath.EvalSymlinks(m.Source)
		if err != nil {
			node = m.Source
		}
		return isServedDevice(filepath.Join(sys, "class/block", filepath.Base(node)), maxStacked)
	}
	return false
}

// maxStacked bounds the number of devices on top of each other.
const maxStacked = 8

// servedName matches devices that a process serves: block devices of nbd and ublk, and the character device of ublk.
var servedName = regexp.MustCompile(`^(nbd|ublk[bc])[0-9]+$`)

// isServedDevice reports whether a directory of sysfs describes a block device that a process serves, a partition of
// one, or a device on top of one (LUKS, LVM).
func isServedDevice(dir string, depth int) bool {
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil || depth == 0 {
		return false
	}
	for name := range strings.SplitSeq(dir, "/") {
		if servedName.MatchString(name) {
			return true
		}
	}
	below, _ := filepath.Glob(filepath.Join(dir, "slaves/*"))
	for _, device := range below {
		if isServedDevice(device, depth-1) {
			return true
		}
	}
	return false
}

// nbdServers returns the processes or threads that have connected nbd devices. They may have ended, because the kernel
// itself can then serve the device from a socket.
func nbdServers(sys string) (pids []int) {
	files, _ := filepath.Glob(filepath.Join(sys, "block/nbd*/pid"))
	for _, file := range files {
		text, _ := os.ReadFile(file)
		if pid, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}
