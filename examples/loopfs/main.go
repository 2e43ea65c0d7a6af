package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/docker/go-units"
	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/internal/mount"
)

// options holds the values of the command line.
type options struct {
	data, backend, node, endpoint, logLevel string
	capacity                                int64
}

func main() {
	o := options{capacity: 1 << 30}
	host, _ := os.Hostname() // without one --node-id is required
	flag.StringVar(&o.data, "data", "./loopfs-data", "`directory` of volumes and snapshots")
	flag.StringVar(&o.backend, "backend", "auto", "backend of new volumes: loop, dir, or auto")
	flag.StringVar(&o.node, "node-id", host, "`id` of this node")
	flag.StringVar(&o.endpoint, "endpoint", os.Getenv("CSI_ENDPOINT"), "unix socket `address` to serve on")
	flag.Func("capacity", "`bytes` for all volumes together, also as 64MiB or 2GiB (default 1GiB)",
		func(s string) (err error) {
			o.capacity, err = units.RAMInBytes(s)
			return err
		})
	flag.StringVar(&o.logLevel, "log-level", "info", "trace, debug, info, warn or error")
	flag.Parse()
	if err := o.check(flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "loopfs:", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	log := hclog.New(&hclog.LoggerOptions{Name: "loopfs", Output: os.Stderr, Level: hclog.LevelFromString(o.logLevel)})
	if err := run(ctx, o, log); err != nil {
		log.Error("stopped", "error", err)
		os.Exit(1)
	}
}

func (o options) check(rest []string) error {
	switch {
	case len(rest) > 0:
		return fmt.Errorf("%q is not a flag", rest[0])
	case o.capacity <= 0:
		return errors.New("capacity: want a positive number of bytes, KiB, MiB, GiB or TiB")
	case !strings.HasPrefix(o.endpoint, "unix:///"):
		return fmt.Errorf("endpoint %q: set CSI_ENDPOINT or --endpoint to unix:///path/to/csi.sock", o.endpoint)
	}
	return checkID("node id", o.node, 256)
}

// driver implements all services. It keeps no state in memory.
type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedGroupControllerServer
	csi.UnimplementedSnapshotMetadataServer
	csi.UnimplementedNodeServer
	store
	node       string
	newVolumes string // backend of new volumes
	capacity   int64  // of all volumes and snapshots, in bytes
}

// stopTimeout is the limit for running calls after SIGTERM. The next start completes or undoes what they leave.
const stopTimeout = 5 * time.Second

// run completes or removes what a kill left, and serves until the context ends. Then it waits for running calls.
func run(ctx context.Context, o options, log hclog.Logger) error {
	backend, why, err := chooseBackend(o.backend)
	if err == nil {
		err = mountPossible()
	}
	if err != nil {
		return err
	}
	store, err := openStore(o.data)
	if err != nil {
		return err
	}
	d := &driver{store: store, node: o.node, newVolumes: backend, capacity: o.capacity}
	if err := d.recover(log); err != nil {
		return err
	}
	log.Info("backend for new volumes", "backend", backend, "because", why)
	server := grpc.NewServer(grpc.UnaryInterceptor(unary(log)), grpc.StreamInterceptor(stream(log)),
		grpc.WaitForHandlers(true)) // a call that is ended by Stop thaws what it has frozen
	csi.RegisterIdentityServer(server, d)
	csi.RegisterControllerServer(server, d)
	csi.RegisterGroupControllerServer(server, d)
	csi.RegisterNodeServer(server, d)
	if backend == loopBackend {
		csi.RegisterSnapshotMetadataServer(server, d)
	}
	socket := strings.TrimPrefix(o.endpoint, "unix://")
	if served, err := mount.RemoveStaleSocket(socket); err != nil {
		return err
	} else if served {
		return fmt.Errorf("another process serves on %s", socket)
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", socket)
	if err != nil {
		return err
	}
	log.Info("serving", "endpoint", listener.Addr(), "data", d.path, "node", o.node)
	stopped := context.AfterFunc(ctx, func() {
		hard := time.AfterFunc(stopTimeout, server.Stop)
		defer hard.Stop()
		server.GracefulStop()
	})
	defer stopped()
	return server.Serve(listener)
}

// codeOf maps system errors to gRPC codes.
var codeOf = map[error]codes.Code{
	unix.ENOTDIR: codes.InvalidArgument, unix.ELOOP: codes.InvalidArgument, unix.ENAMETOOLONG: codes.InvalidArgument,
	unix.ENOSPC: codes.ResourceExhausted, unix.EBUSY: codes.FailedPrecondition,
	context.DeadlineExceeded: codes.DeadlineExceeded, context.Canceled: codes.Canceled,
}

// statusOf converts an error to a gRPC status.
func statusOf(err error) error {
	if s, ok := status.FromError(err); ok {
		return s.Err()
	}
	for kind, code := range codeOf {
		if errors.Is(err, kind) {
			return status.Error(code, err.Error())
		}
	}
	return status.Error(codes.Internal, err.Error())
}

// unary converts errors to statuses and logs each call without its arguments.
func unary(log hclog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		began := time.Now()
		answer, err := next(ctx, req)
		var volume string
		if v, ok := req.(interface{ GetVolumeId() string }); ok {
			volume = v.GetVolumeId()
		}
		return answer, ended(log, info.FullMethod, volume, began, err)
	}
}

func stream(log hclog.Logger) grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		began := time.Now()
		return ended(log, info.FullMethod, "", began, next(srv, stream))
	}
}

// ended logs the end of a call and returns its status.
func ended(log hclog.Logger, method, volume string, began time.Time, err error) error {
	fields := []any{"method", method, "volume", fmt.Sprintf("%.64s", volume), "took", time.Since(began)}
	err = statusOf(err)
	if err == nil {
		log.Debug("call", fields...)
	} else {
		log.Warn("call failed", append(fields, "code", status.Code(err), "error", status.Convert(err).Message())...)
	}
	return err
}
