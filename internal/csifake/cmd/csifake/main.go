// Command csifake is the scriptable CSI plugin of package csifake as a process of its own.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/hashicorp/go-hclog"

	"holdfast/internal/csifake"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "csifake:", err)
		os.Exit(1)
	}
}

func run() error {
	cfg, err := parse(flag.CommandLine, os.Args[1:])
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	p, err := csifake.New(cfg)
	if err != nil {
		return err
	}
	fmt.Println("csifake: listening on", p.Socket())
	return p.Run(ctx)
}

// words are values of flags that still have to be parsed.
type words struct {
	role, caps, mutable, topology, volumes, state, nodeID, endpoint, mount, block string
}

func parse(flags *flag.FlagSet, args []string) (csifake.Config, error) {
	cfg := csifake.Config{Die: csifake.KillProcess,
		Log: hclog.New(&hclog.LoggerOptions{Name: "csifake", Output: os.Stderr})}
	var w words
	w.declare(flags, &cfg)
	if err := flags.Parse(args); err != nil {
		return cfg, err
	}
	if w.endpoint == "" {
		return cfg, fmt.Errorf("no socket: give --endpoint or CSI_ENDPOINT")
	}
	w.fill(&cfg)
	return cfg, nil
}

func (w *words) declare(flags *flag.FlagSet, cfg *csifake.Config) {
	flags.StringVar(&w.endpoint, "endpoint", os.Getenv("CSI_ENDPOINT"), "unix socket, as unix:///path or as a path")
	flags.StringVar(&cfg.Journal, "journal", "", "file to append every call to")
	flags.StringVar(&cfg.ScriptFile, "script", "", "JSON list of rules; read again for every call")
	flags.StringVar(&w.state, "state", "", "file that keeps what exists; shared by the plugins of one storage system")
	flags.StringVar(&w.role, "roles", "monolith", "node, controller or monolith")
	flags.StringVar(&w.caps, "caps", "",
		"capabilities with commas between; a number is sent as it is; ALL stands for all that are not alpha")
	flags.StringVar(&w.mutable, "mutable", "",
		"keys of mutable_parameters that it knows, with commas between; default is any key")
	flags.StringVar(&cfg.Spec, "spec", "",
		"version of CSI on which the plugin is built, 1.0 to 1.14; it lacks the --caps of others")
	flags.StringVar(&w.nodeID, "node-id", "node-1", "answer of NodeGetInfo; may be empty")
	flags.StringVar(&cfg.Name, "name", "", "name of the provider")
	flags.StringVar(&cfg.Version, "version", "", "version of the provider")
	flags.StringVar(&cfg.Instance, "instance", "", "name in the journal")
	flags.Int64Var(&cfg.MaxVolumes, "max-volumes", 0, "per node; 0 is no limit")
	flags.Int64Var(&cfg.Capacity, "capacity", 0, "of the backend, in bytes")
	flags.StringVar(&w.topology, "topology", "", "segments of this node, as key=value,key=value")
	flags.StringVar(&w.volumes, "volumes", "", "ids that exist from the start, with commas between")
	flags.Func("ids", "form of the ids of new volumes: slashes or 1KiB; short ones if it is not given",
		func(form string) error {
			cfg.IDs = csifake.IDForm(form)
			return nil
		})
	flags.BoolVar(&cfg.AnyVolume, "any-volume", false, "every volume id exists")
	flags.BoolVar(&cfg.Forgetful, "forgetful", false, "after a kill, start with an empty --state; mounts stay")
	flags.BoolVar(&cfg.Mounts, "mounts", false, "make real mounts")
	flags.StringVar(&cfg.DataDir, "data", "",
		"with --mounts: directory for the data of volumes; default is a tmpfs each")
	flags.StringVar(&w.mount, "mount", "",
		"with --mounts: tmpfs, bind (of --data) or fuse, which dies with this process")
	flags.StringVar(&w.block, "block", "", "with --mounts: what a block volume is: loop, node (a device node) or file")
	flags.BoolVar(&cfg.Blind, "blind", false, "touch and look at no path")
}

func (w words) fill(cfg *csifake.Config) {
	cfg.Socket, cfg.Endpoint = csifake.SocketPath(w.endpoint), os.Getenv("CSI_ENDPOINT")
	cfg.Role, cfg.Backend = csifake.Role(w.role), csifake.NewBackend(w.state)
	cfg.Mount, cfg.Block = csifake.MountKind(w.mount), csifake.BlockKind(w.block)
	cfg.NodeID = w.nodeID
	if w.nodeID == "" {
		cfg.NodeID = csifake.Empty
	}
	cfg.Caps, cfg.Volumes = split(w.caps), split(w.volumes)
	if at := slices.Index(cfg.Caps, "ALL"); at >= 0 {
		cfg.Caps = slices.Replace(cfg.Caps, at, at+1, csifake.AllCaps...)
	}
	cfg.Mutable = split(w.mutable)
	cfg.Topology = map[string]string{}
	for _, pair := range split(w.topology) {
		k, v, _ := strings.Cut(pair, "=")
		cfg.Topology[k] = v
	}
}

func split(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(s, ",")
}
