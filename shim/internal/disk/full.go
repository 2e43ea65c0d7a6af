package disk

import (
	"errors"

	"golang.org/x/sys/unix"
)

// full says whether err is for want of room.
func full(err error) bool {
	return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT)
}
