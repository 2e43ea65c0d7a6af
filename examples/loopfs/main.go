package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"slices"
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

	"holdfast/examples/loopfs/internal/disk"
	mounttable "holdfast/internal/mount"
)

// options holds the values of the command line.
type options struct {
	data, backend, fsType, node, mode, endpoint, logLevel string
	capacity                                              int64
	maxVolumes                                            int
	attach                                                bool
	topology                                              map[string]string
}

func main() {
	o := options{capacity: 1 << 30, topology: map[string]string{}}
	host, _ := os.Hostname() // without one --node-id is required
	flag.StringVar(&o.data, "data", "./loopfs-data", "`directory` of images and records")
	flag.StringVar(&o.backend, "backend", "auto", "backend of new volumes: loop, dir, or auto")
	flag.StringVar(&o.fsType, "fs-type", "ext4", "file system of volumes that request none: ext4 or xfs")
	flag.StringVar(&o.node, "node-id", host, "`id` of this node")
	flag.StringVar(&o.mode, "mode", "all", "services to serve: node, controller or all")
	flag.StringVar(&o.endpoint, "endpoint", os.Getenv("CSI_ENDPOINT"), "unix socket `address` to serve on")
	flag.Func("capacity", "`bytes` for all volumes together, also as 64MiB or 2GiB (default 1GiB)", func(s string) error {
		n, err := parseSize(s)
		o.capacity = n
		return err
	})
	flag.IntVar(&o.maxVolumes, "max-volumes", 0, "limit on the `number` of volumes of this node; 0: none")
	flag.BoolVar(&o.attach, "attach", false, "require ControllerPublishVolume before NodeStageVolume")
	flag.Func("topology", "`key=value` of this node, besides its id; may be repeated", o.addSegment)
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
	case !slices.Contains([]string{"node", "controller", "all"}, o.mode):
		return fmt.Errorf("mode %q is not one of node, controller, all", o.mode)
	case !slices.Contains(disk.FileSystems(), o.fsType):
		return fmt.Errorf("fs-type %q is not one of %q", o.fsType, disk.FileSystems())
	case !strings.HasPrefix(o.endpoint, "unix:///"):
		return fmt.Errorf("endpoint %q: set CSI_ENDPOINT or --endpoint to unix:///path/to/csi.sock", o.endpoint)
	}
	return disk.CheckText("node id", o.node, maxNodeID)
}

// parseSize parses 1073741824, 1024MiB or 1GiB.
func parseSize(s string) (int64, error) {
	n, err := units.RAMInBytes(s)
	if err != nil || n <= 0 {
		return 0, errors.New("want a positive number of bytes, KiB, MiB, GiB or TiB")
	}
	return n, nil
}

// addSegment parses key=value, a part of a topology.
func (o options) addSegment(text string) error {
	key, value, found := strings.Cut(text, "=")
	if !found || key == "" || value == "" {
		return errors.New("want key=value")
	}
	o.topology[key] = value
	return nil
}

// run completes or removes what a kill left, and serves until the context ends.
func run(ctx context.Context, o options, log hclog.Logger) error {
	backend, why, err := disk.Choose(o.backend)
	if err != nil {
		return err
	}
	pool, err := disk.Open(o.data, backend, o.capacity, o.fsType)
	if err != nil {
		return err
	}
	defer pool.Close()
	removed, err := pool.Recover()
	if err != nil {
		return err
	}
	log.Info("backend for new volumes", "backend", backend, "because", why, "removed incomplete", removed)
	server := grpc.NewServer(grpc.UnaryInterceptor(unary(log)), grpc.StreamInterceptor(stream(log)))
	csi.RegisterIdentityServer(server, &identity{pool: pool})
	if o.mode != "node" {
		csi.RegisterControllerServer(server, &controller{pool: pool, attach: o.attach, maxVolumes: o.maxVolumes})
		csi.RegisterGroupControllerServer(server, &groups{pool: pool})
		if backend == disk.LoopBackend {
			csi.RegisterSnapshotMetadataServer(server, &metadata{pool: pool})
		}
	}
	if o.mode != "controller" {
		n := &node{pool: pool, id: o.node, attach: o.attach, maxVolumes: o.maxVolumes, topology: o.topology}
		n.topology[topologyKey] = n.id
		if err := errors.Join(disk.MountPossible(), pool.AddNode(disk.Node{ID: n.id, Topology: n.topology})); err != nil {
			return err
		}
		csi.RegisterNodeServer(server, n)
	}
	listener, err := listen(ctx, strings.TrimPrefix(o.endpoint, "unix://"))
	if err != nil {
		return err
	}
	log.Info("serving", "endpoint", listener.Addr(), "mode", o.mode, "data", pool.Path(), "node", o.node)
	return serve(ctx, server, listener)
}

// stopTimeout is the limit for running calls after SIGTERM. The next start completes or undoes what they leave.
const stopTimeout = 5 * time.Second

// serve answers calls until the context ends, and then waits for running ones.
func serve(ctx context.Context, server *grpc.Server, listener net.Listener) error {
	stopped := context.AfterFunc(ctx, func() {
		hard := time.AfterFunc(stopTimeout, server.Stop)
		defer hard.Stop()
		server.GracefulStop()
	})
	defer stopped()
	return server.Serve(listener)
}

// listen makes the socket. It replaces a socket that no process serves.
func listen(ctx context.Context, path string) (net.Listener, error) {
	answers, err := mounttable.RemoveStaleSocket(path)
	if err == nil && answers {
		err = fmt.Errorf("another process serves on %s", path)
	}
	if err != nil {
		return nil, err
	}
	return (&net.ListenConfig{}).Listen(ctx, "unix", path)
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
