// Command csifake is the scriptable CSI plugin of package csifake as a process of its own.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
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

func parse(flags *flag.FlagSet, args []string) (csifake.Config, error) {
	cfg := csifake.Config{Die: die, Log: hclog.New(&hclog.LoggerOptions{Name: "csifake", Output: os.Stderr})}
	var role, caps, topology, volumes, state, nodeID, endpoint string
	flags.StringVar(&endpoint, "endpoint", os.Getenv("CSI_ENDPOINT"), "unix socket, as unix:///path or as a path")
	flags.StringVar(&cfg.Journal, "journal", "", "file to append every call to")
	flags.StringVar(&cfg.ScriptFile, "script", "", "JSON list of rules; read again for every call")
	flags.StringVar(&state, "state", "", "file that keeps what exists; shared by the plugins of one storage system")
	flags.StringVar(&role, "roles", "monolith", "node, controller or monolith")
	flags.StringVar(&caps, "caps", "", "capabilities with commas between; a number is sent as it is; ALL is all usual ones")
	flags.StringVar(&nodeID, "node-id", "node-1", "answer of NodeGetInfo; may be empty")
	flags.StringVar(&cfg.Name, "name", "", "name of the provider")
	flags.StringVar(&cfg.Version, "version", "", "version of the provider")
	flags.StringVar(&cfg.Instance, "instance", "", "name in the journal")
	flags.Int64Var(&cfg.MaxVolumes, "max-volumes", 0, "per node; 0 is no limit")
	flags.Int64Var(&cfg.Capacity, "capacity", 0, "of the backend, in bytes")
	flags.StringVar(&topology, "topology", "", "segments of this node, as key=value,key=value")
	flags.StringVar(&volumes, "volumes", "", "ids that exist from the start, with commas between")
	flags.BoolVar(&cfg.AnyVolume, "any-volume", false, "every volume id exists")
	flags.BoolVar(&cfg.Mounts, "mounts", false, "make real mounts")
	flags.StringVar(&cfg.DataDir, "data", "", "with --mounts: directory for the data of volumes; default is a tmpfs each")
	flags.BoolVar(&cfg.Blind, "blind", false, "touch and look at no path")
	if err := flags.Parse(args); err != nil {
		return cfg, err
	}
	if endpoint == "" {
		return cfg, fmt.Errorf("no socket: give --endpoint or CSI_ENDPOINT")
	}
	cfg.Socket, cfg.Role, cfg.Backend = csifake.SocketPath(endpoint), csifake.Role(role), csifake.NewBackend(state)
	cfg.NodeID = nodeID
	if nodeID == "" {
		cfg.NodeID = csifake.Empty
	}
	cfg.Caps, cfg.Volumes = split(caps), split(volumes)
	if caps == "ALL" {
		cfg.Caps = csifake.AllCaps
	}
	cfg.Topology = map[string]string{}
	for _, pair := range split(topology) {
		k, v, _ := strings.Cut(pair, "=")
		cfg.Topology[k] = v
	}
	return cfg, nil
}

func split(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(s, ",")
}

// die is what a crash is: nothing after it happens.
func die() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}
