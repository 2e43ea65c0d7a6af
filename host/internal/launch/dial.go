package launch

import (
	"context"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"holdfast/proto/bootstrap"
	"holdfast/registry"
)

// dialOptions are added after go-plugin's own and so override them: its dialer ignores the context and checks nobody.
func (r *runner) dialOptions(timeout time.Duration) []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return dialPeer(ctx, r.address, r.child.pid)
		}),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(bootstrap.MaxMessage), grpc.MaxCallSendMsgSize(bootstrap.MaxMessage)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second,
			},
			MinConnectTimeout: timeout,
		}),
	}
}

// dialPeer connects to the socket and refuses whoever listens there but the process of that pid.
func dialPeer(ctx context.Context, path string, pid int) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	if err := checkPeer(conn.(*net.UnixConn), pid); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

func checkPeer(conn *net.UnixConn, pid int) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if credErr != nil {
		return os.NewSyscallError("SO_PEERCRED", credErr)
	}
	if int(cred.Pid) != pid {
		return registry.Errorf(registry.ErrDenied, "process %d (uid %d) listens at the shim's socket, not the shim (%d)",
			cred.Pid, cred.Uid, pid)
	}
	return nil
}
