package launch

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"holdfast/internal/proc"
	"holdfast/internal/tracing"
	"holdfast/proto/bootstrap"
	"holdfast/registry"
)

// dialOptions override go-plugin's own: its dialer ignores the context and does not check the peer.
func (r *runner) dialOptions(opts Options) []grpc.DialOption {
	list := []grpc.DialOption{
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return dialPeer(ctx, r.address, r.child.pid)
		}),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(bootstrap.MaxMessage), grpc.MaxCallSendMsgSize(bootstrap.MaxMessage)),
		grpc.WithInitialWindowSize(bootstrap.Window), grpc.WithInitialConnWindowSize(bootstrap.Window),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second,
			},
			MinConnectTimeout: opts.StartTimeout,
		}),
	}
	if opts.TracerProvider != nil {
		list = append(list, grpc.WithStatsHandler(tracing.NewClientHandler(opts.TracerProvider)))
	}
	return list
}

// dialPeer connects to the socket and refuses any peer but the process of that pid.
func dialPeer(ctx context.Context, path string, pid int) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	cred, err := proc.Peer(conn)
	if err == nil && int(cred.Pid) != pid {
		err = registry.Errorf(registry.ErrDenied,
			"process %d (uid %d) listens at the shim's socket, not the shim (%d)", cred.Pid, cred.Uid, pid)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// checkNamespace refuses a shim if one of its threads is in another mount namespace than this host. If this host may
// not read the namespaces, it refuses nothing.
func checkNamespace(pid int) error {
	ours, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return nil
	}
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/ns/mnt", pid))
	for _, link := range threads {
		if theirs, err := os.Readlink(link); err == nil && theirs != ours {
			return registry.Errorf(registry.ErrUnsupported,
				"the shim is in a mount namespace of its own (%s, this host is in %s): "+
					"what it mounts would never reach this host and its tasks; start both in one, without unshare(1) "+
					"or nsenter(1) around the shim alone", theirs, ours)
		}
	}
	return nil
}
