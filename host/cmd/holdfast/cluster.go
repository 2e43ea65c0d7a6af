package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
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
be repeated.

Secrets are not moved: nodes share where they are, but not their values. The
command lists them before it moves anything. Put each at the same place on all
nodes that run the plugin. A secret that was written out in a volume file is in
a file below the state directory, which has to be copied.`,
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
			var secrets []secretUse
			moved, err := migrate(ctx, binary.Path, p.stateDir(), node, text, func(all []secretUse) {
				secrets = all
				listSecrets(io.err, all)
			})
			if err != nil {
				return err
			}
			if p.json {
				return writeJSON(io.out, map[string]any{"node": node, "moved": moved,
					"secrets": append([]secretUse{}, secrets...)})
			}
			fmt.Fprintf(io.out, "moved %d records of node %s; start the agent\n", moved, node)
			if len(secrets) > 0 {
				fmt.Fprintf(io.out, "before another node uses these volumes, it needs the secrets above at the same "+
					"places (files with mode 0600)\n")
			}
			return nil
		},
	}
	c.Flags().StringVar(&config, "config", defaultConfig, "configuration file of the agent")
	c.Flags().StringVar(&node, "node", "",
		"name of this node (default: that of the configuration file, or the host name)")
	c.Flags().StringVar(&shim, "shim", "", "shim binary (default holdfast-shim beside this program or in PATH)")
	return c
}

// secretUse is a secret that other nodes will need, as the shim describes it.
type secretUse struct {
	Of       string `json:"of"`
	Plugin   string `json:"plugin"`
	Key      string `json:"key"`
	Env      string `json:"env,omitempty"`
	File     string `json:"file,omitempty"`
	Callback string `json:"callback,omitempty"`
}

// listSecrets says where each node needs which secrets.
func listSecrets(to io.Writer, all []secretUse) {
	if len(all) == 0 {
		return
	}
	fmt.Fprintln(to, "secrets are not moved; each node that runs the plugin needs them at the same place:")
	for _, s := range all {
		place := "file " + s.File
		switch {
		case s.Env != "":
			place = "environment variable " + s.Env + " of the agent"
		case s.Callback != "":
			place = "callback " + s.Callback + " of the host"
		}
		fmt.Fprintf(to, "  %s, plugin %s: secret %q in %s\n", clean(s.Of), clean(s.Plugin), s.Key, clean(place))
	}
}

// migrate has the shim binary move the records of a state. It returns their number, and calls before with the secrets
// that other nodes will need.
func migrate(
	ctx context.Context, shim, state, node, cluster string, before func([]secretUse),
) (moved int, err error) {
	var errs bytes.Buffer
	cmd := exec.CommandContext(ctx, shim, "-migrate", node, "-state", state)
	cmd.Stdin, cmd.Stderr, cmd.WaitDelay = strings.NewReader(cluster), &errs, shimExitTimeout
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGTERM) }
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return 0, err
	}
	var answer struct {
		Secrets []secretUse
		Moved   *int
	}
	var unread error
	for d := json.NewDecoder(out); answer.Moved == nil && unread == nil; {
		if unread = d.Decode(&answer); unread == nil && answer.Moved == nil {
			before(answer.Secrets)
		}
	}
	switch err := cmd.Wait(); {
	case err != nil:
		return 0, errors.New(cmp.Or(strings.TrimPrefix(strings.TrimSpace(errs.String()), "holdfast-shim: "),
			err.Error()))
	case unread != nil:
		return 0, fmt.Errorf("%s is not a shim: %w; set --shim", shim, unread)
	}
	return *answer.Moved, nil
}
