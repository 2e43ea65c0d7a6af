package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/docker/go-units"
	"github.com/hashicorp/go-hclog"

	"holdfast/examples/loopfs/internal/disk"
)

// options holds the values of the command line and the environment.
type options struct {
	data, backend, fsType, node, mode, endpoint, logLevel string
	capacity                                              byteSize
	maxVolumes                                            int64
	attach                                                bool
	topology                                              segments
}

func main() {
	o, err := parseOptions(os.Args[1:], os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
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

func parseOptions(args []string, out io.Writer) (options, error) {
	o := options{capacity: 1 << 30, topology: segments{}}
	host, err := os.Hostname()
	if err != nil {
		return o, fmt.Errorf("get the host name: %w", err)
	}
	f := flag.NewFlagSet("loopfs", flag.ContinueOnError)
	f.SetOutput(out)
	f.StringVar(&o.data, "data", envOr("LOOPFS_DATA", "./loopfs-data"), "`directory` of images and records")
	f.StringVar(&o.backend, "backend", "auto", "backend of new volumes: loop, dir, or auto")
	f.StringVar(&o.fsType, "fs-type", "ext4", "file system of volumes that request none: ext4 or xfs")
	f.StringVar(&o.node, "node-id", host, "`id` of this node")
	f.StringVar(&o.mode, "mode", "all", "services to serve: node, controller, or monolith (also called all)")
	f.StringVar(&o.endpoint, "endpoint", os.Getenv("CSI_ENDPOINT"),
		"unix socket `address` to serve on (unix:///run/csi.sock)")
	f.Var(&o.capacity, "capacity", "`bytes` for all volumes together, also as 64MiB or 2GiB")
	f.Int64Var(&o.maxVolumes, "max-volumes", 0, "limit on the `number` of volumes of this node; 0: none")
	f.BoolVar(&o.attach, "attach", false, "require ControllerPublishVolume before NodeStageVolume")
	f.Var(o.topology, "topology", "`key=value` of this node, besides its id; may be repeated")
	f.StringVar(&o.logLevel, "log-level", "info", "trace, debug, info, warn or error")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	return o, o.check(f.Args())
}

func envOr(key, fallback string) string {
	if v := os.Getenv(key); v != "" {
		return v
	}
	return fallback
}

func (o options) check(rest []string) error {
	switch {
	case len(rest) > 0:
		return fmt.Errorf("%q is not a flag", rest[0])
	case !slices.Contains([]string{"node", "controller", "monolith", "all"}, o.mode):
		return fmt.Errorf("mode %q is not one of node, controller, monolith, all", o.mode)
	case !slices.Contains(disk.FileSystems(), o.fsType):
		return fmt.Errorf("fs-type %q is not one of %q", o.fsType, disk.FileSystems())
	case o.maxVolumes < 0:
		return errors.New("max-volumes is negative")
	}
	return disk.CheckText("node id", o.node, maxNodeID)
}

func (o options) servesNode() bool       { return o.mode != "controller" }
func (o options) servesController() bool { return o.mode != "node" }

// segments is a flag with a part of a topology.
type segments map[string]string

func (s segments) String() string { return fmt.Sprint(map[string]string(s)) }

// Set parses key=value.
func (s segments) Set(text string) error {
	key, value, found := strings.Cut(text, "=")
	if !found || key == "" || value == "" {
		return errors.New("want key=value")
	}
	s[key] = value
	return nil
}

// byteSize is a flag with a number of bytes.
type byteSize int64

func (b *byteSize) String() string { return strconv.FormatInt(int64(*b), 10) }

// Set parses 1073741824, 1024MiB or 1GiB.
func (b *byteSize) Set(s string) error {
	n, err := units.RAMInBytes(s)
	if err != nil || n <= 0 {
		return errors.New("want a positive number of bytes, KiB, MiB, GiB or TiB")
	}
	*b = byteSize(n)
	return nil
}
