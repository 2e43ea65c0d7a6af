package proc

import (
	"errors"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// Peer returns the credentials of the process at the other end of a unix connection, from the time when it called
// connect or listen (SO_PEERCRED in unix(7)).
func Peer(conn net.Conn) (cred *unix.Ucred, err error) {
	u, is := conn.(*net.UnixConn)
	if !is {
		return nil, errors.New("not a unix socket")
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return nil, err
	}
	var got error
	err = raw.Control(func(fd uintptr) { cred, got = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, os.NewSyscallError("SO_PEERCRED", got)); err != nil {
		return nil, err
	}
	return cred, nil
}
