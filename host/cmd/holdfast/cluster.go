package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// defaultConfig is the configuration file that packages install.
const defaultConfig = "/etc/holdfast/agent.hcl"

func newCluster(io streams, p *globalFlags) *cobra.Command {
	return group("cluster", "Manage this node's membership of a cluster", newClusterMigrate(io, p))
}

func newClusterMigrate(io streams, p *globalFlags) *cobra.Command {
	config, node, shim := "", "", ""
	c := &cobra.Command{
		Use: "migrate", Short: "Move this node's volumes into its cluster", Args: usageArgs(cobra.NoArgs),
		Long: `Move the volumes, snapshots and claims of a node that shares nothing into the
cluster of its configuration file. The agent must not run; its tasks may. Start
the agent afterwards. Unfinished calls are refused. An interrupted migration can
be repeated.`,
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(c.Context(), unix.SIGINT, unix.SIGTERM)
			defer stop()
			a, _, err := c.Root().Find([]string{"agent"})
			if err != nil {
				return err
			}
			text, err := (placesOf{}).readConfig(a, config)
			switch {
			case err != nil:
				return err
			case text == "":
				return usageError{fmt.Errorf("%s has no cluster block", config)}
			}
			host, err := os.Hostname()
			if err != nil {
				return fmt.Errorf("name of this node: %w; set --node", err)
			}
			binary, err := findShim(cmp.Or(shim, a.Flag("shim").Value.String()))
			if err != nil {
				return err
			}
			node = cmp.Or(node, a.Flag("node").Value.String(), host)
			moved, err := migrate(ctx, binary.Path, p.stateDir(), node, text)
			if err != nil {
				return err
			}
			if p.json {
				return writeJSON(io.out, map[string]any{"node": node, "moved": moved})
			}
			fmt.Fprintf(io.out, "moved %d records of node %s; start the agent\n", moved, node)
			return nil
		},
	}
	c.Flags().StringVar(&config, "config", defaultConfig, "configuration file of the agent")
	c.Flags().StringVar(&node, "node", "", "name of this node (default: that of the configuration file, or the host name)")
	c.Flags().StringVar(&shim, "shim", "", "shim binary (default holdfast-shim beside this program or in PATH)")
	return c
}

// migrate has the shim binary move the records of a state. It returns their number.
func migrate(ctx context.Context, shim, state, node, cluster string) (moved int, err error) {
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(ctx, shim, "-migrate", node, "-state", state)
	cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.WaitDelay = strings.NewReader(cluster), &out, &errs, shimExitTimeout
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGTERM) }
	if err := cmd.Run(); err != nil {
		return 0, errors.New(cmp.Or(strings.TrimPrefix(strings.TrimSpace(errs.String()), "holdfast-shim: "), err.Error()))
	}
	if moved, err = strconv.Atoi(strings.TrimSpace(out.String())); err != nil {
		return 0, fmt.Errorf("%s is not a shim: %w; set --shim", shim, err)
	}
	return moved, nil
}
