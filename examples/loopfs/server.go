package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"

	"holdfast/examples/loopfs/internal/disk"
	mounttable "holdfast/internal/mount"
)

// stopTimeout is the limit for running calls after SIGTERM. The next start completes or undoes what they leave.
const stopTimeout = 5 * time.Second

// run serves until the context ends.
func run(ctx context.Context, o options, log hclog.Logger) error {
	path, err := socketPath(o.endpoint)
	if err != nil {
		return err
	}
	store, err := disk.OpenStore(o.data)
	if err != nil {
		return err
	}
	defer store.Close()
	server, err := build(o, store, log)
	if err != nil {
		return err
	}
	listener, err := listen(ctx, path)
	if err != nil {
		return err
	}
	log.Info("serving", "endpoint", path, "mode", o.mode, "data", store.Path(), "node", o.node, "attach", o.attach)
	return serve(ctx, server, listener)
}

// build recovers from a kill and registers the services of the mode.
func build(o options, store *disk.Store, log hclog.Logger) (*grpc.Server, error) {
	making, why, err := disk.Choose(o.backend)
	if err != nil {
		return nil, err
	}
	log.Info("backend for new volumes", "backend", making, "because", why)
	pool, err := disk.NewPool(store, disk.Backends(store), making, int64(o.capacity))
	if err != nil {
		return nil, err
	}
	pool.FileSystem = o.fsType
	server := grpc.NewServer(grpc.UnaryInterceptor(logCalls(log)), grpc.StreamInterceptor(logStreams(log)))
	csi.RegisterIdentityServer(server, &identity{pool: pool})
	if err := recoverPool(pool, log); err != nil {
		return nil, err
	}
	if o.servesController() {
		csi.RegisterControllerServer(server, &controller{pool: pool, attach: o.attach, maxVolumes: o.maxVolumes})
		csi.RegisterGroupControllerServer(server, &groups{pool: pool})
		if making == disk.LoopBackend {
			csi.RegisterSnapshotMetadataServer(server, &metadata{pool: pool})
		}
	}
	if o.servesNode() {
		n := &node{pool: pool, id: o.node, attach: o.attach, maxVolumes: o.maxVolumes, topology: o.topology, log: log}
		n.topology[topologyKey] = n.id
		if err := n.start(); err != nil {
			return nil, err
		}
		csi.RegisterNodeServer(server, n)
	}
	return server, nil
}

func recoverPool(pool *disk.Pool, log hclog.Logger) error {
	cleared, err := pool.Recover()
	if len(cleared) > 0 {
		log.Info("removed incomplete volumes", "volumes", cleared)
	}
	return err
}

// start registers the node in the data directory and recovers from a reboot.
func (n *node) start() error {
	if err := disk.MountPossible(); err != nil {
		return err
	}
	if err := n.pool.AddNode(disk.Node{ID: n.id, Topology: n.topology}); err != nil {
		return err
	}
	return n.recover()
}

// serve answers calls until the context ends, and then waits for running ones.
func serve(ctx context.Context, server *grpc.Server, listener net.Listener) error {
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	hard := time.AfterFunc(stopTimeout, server.Stop)
	defer hard.Stop()
	server.GracefulStop()
	if err := <-ended; !errors.Is(err, grpc.ErrServerStopped) { // stopped before Serve
		return err
	}
	return nil
}

// socketPath parses a CSI endpoint. Only unix sockets are supported.
func socketPath(endpoint string) (string, error) {
	path, ok := strings.CutPrefix(endpoint, "unix://")
	switch {
	case endpoint == "":
		return "", errors.New("no endpoint: set CSI_ENDPOINT or --endpoint to unix:///path/to/csi.sock")
	case !ok && strings.Contains(endpoint, ":"), !strings.HasPrefix(path, "/"):
		return "", fmt.Errorf("endpoint %q is not of the form unix:///path/to/csi.sock", endpoint)
	case len(path) > 107:
		return "", fmt.Errorf("the socket path has %d bytes; the limit is 107", len(path))
	}
	return path, nil
}

// listen makes the socket. It replaces a socket that no process serves.
func listen(ctx context.Context, path string) (net.Listener, error) {
	answers, err := mounttable.RemoveStaleSocket(path)
	if err != nil {
		return nil, err
	}
	if answers {
		return nil, fmt.Errorf("another process serves on %s", path)
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	return l, nil
}
