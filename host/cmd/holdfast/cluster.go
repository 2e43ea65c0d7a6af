package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
)

// defaultConfig is the configuration file that packages install.
const defaultConfig = "/etc/holdfast/agent.hcl"

func newCluster(p *program) *cobra.Command {
	return group("cluster", "Manage this node's membership of a cluster", newClusterMigrate(p),
		newClusterLeave(p))
}

// memberFlags select the node whose state a command changes. The agent of that node must not run.
type memberFlags struct{ config, node, shim string }

func (f *memberFlags) register(c *cobra.Command) {
	c.Flags().StringVar(&f.config, "config", defaultConfig, "configuration file of the agent")
	c.Flags().StringVar(&f.node, "node", "",
		"name of this node (default: that of the configuration file, or the host name)")
	c.Flags().StringVar(&f.shim, "shim", "", "shim binary (default holdfast-shim beside this program or in PATH)")
}

// complete sets missing flags to the agent's settings. It returns the cluster block, which is empty if there is none.
// With optional, the configuration file may be missing.
func (f *memberFlags) complete(c *cobra.Command, optional bool) (cluster string, err error) {
	a, _, err := c.Root().Find([]string{"agent"})
	if err != nil {
		return "", err
	}
	cluster, _, err = readConfig(a, f.config)
	missing := errors.Is(err, os.ErrNotExist)
	switch {
	case missing && !optional:
		return "", fmt.Errorf("%w; name the configuration file of the agent with --config FILE", err)
	case err != nil && !missing:
		return "", err
	}
	if f.node = cmp.Or(f.node, a.Flag("node").Value.String()); f.node == "" {
		if f.node, err = os.Hostname(); err != nil {
			return "", fmt.Errorf("name of this node: %w; set --node", err)
		}
	}
	binary, err := findShim(cmp.Or(f.shim, a.Flag("shim").Value.String()))
	if err != nil {
		return "", err
	}
	f.shim = binary.Path
	return cluster, nil
}

func (f *memberFlags) noCluster() error {
	return usageError{fmt.Errorf("%s has no cluster block", f.config)}
}

func newClusterMigrate(p *program) *cobra.Command {
	f := memberFlags{}
	c := &cobra.Command{
		Use: "migrate", Short: "Move this node's volumes into its cluster",
		Long: `Move the volumes, snapshots and claims of this node into the cluster that its
configuration file names. The agent must not run; its tasks may. Start the agent
afterwards. The command fails while calls are unfinished. It can be repeated if
it was interrupted.

Secrets are not moved: the cluster stores references, not values. The command
lists them before it moves anything. Put each at the same place on all nodes
that run the plugin. A secret that a volume file gives by value is in a file
below the state directory: copy that file.`,
		RunE: repeatable(func(ctx context.Context, c *cobra.Command, _ []string) error {
			text, err := f.complete(c, false)
			if err == nil && text == "" {
				err = f.noCluster()
			}
			if err != nil {
				return err
			}
			var secrets []secretUse
			moved, err := migrate(ctx, f.shim, p.stateDir(), f.node, text, func(all []secretUse) {
				secrets = all
				listSecrets(p.remark, all)
			})
			if err != nil {
				return err
			}
			if p.json {
				return writeJSON(p.out, map[string]any{"node": f.node, "moved": moved,
					"secrets": append([]secretUse{}, secrets...)})
			}
			fmt.Fprintf(p.out, "moved %d records of node %s; start the agent\n", moved, f.node)
			if len(secrets) > 0 {
				fmt.Fprintf(p.out, "before another node uses these volumes, it needs the secrets above at the same "+
					"places (files with mode 0600)\n")
			}
			return nil
		}),
	}
	f.register(c)
	return c
}

func newClusterLeave(p *program) *cobra.Command {
	f, force, confirm := memberFlags{}, false, ""
	c := &cobra.Command{
		Use: "leave", Short: "Remove this node from its cluster",
		Long: `End this node's membership of the cluster of its configuration file. The agent
must not run. Remove the cluster block before you start it again: the node is
then in no cluster and knows no volumes.

The command refuses while the node has claims, attachments or mounts, stores
volumes, or makes the controller calls of a plugin; the error says what to do.
The command can be repeated if it was interrupted.

If the cluster is gone for good, --force deletes its records on this node
without etcd. The volumes stay at their plugins, which may keep them attached
to this node. Register those that you need.`,
		RunE: repeatable(func(ctx context.Context, c *cobra.Command, _ []string) error {
			text, err := f.complete(c, force)
			switch {
			case err != nil:
				return err
			case confirm != "" && !force:
				return usageError{errors.New("--confirm belongs to --force")}
			case text == "" && !force:
				return f.noCluster()
			}
			args := []string{"-leave", f.node, "-state", p.stateDir()}
			if force {
				args = append(args, "-lost", "-confirm", confirm)
			}
			var answer struct{ Left string }
			err = runShim(ctx, f.shim, text, args, func(d *json.Decoder) error { return d.Decode(&answer) })
			return showLine(p, err, map[string]string{"node": f.node, "left": answer.Left},
				"node %s has left cluster %s; remove the cluster block from %s before you start the agent", f.node,
				clean(answer.Left), f.config)
		}),
	}
	f.register(c)
	c.Flags().BoolVar(&force, "force", false, "the cluster is gone for good: do not contact etcd")
	c.Flags().StringVar(&confirm, "confirm", "", "ID of the cluster whose records are deleted on this node")
	return c
}

// secretUse is a secret that other nodes will need, as the shim describes it.
type secretUse struct {
	Of       string `json:"of"` // the volume or snapshot, for people
	Plugin   string `json:"plugin"`
	Key      string `json:"key"`
	Env      string `json:"env,omitempty"`
	File     string `json:"file,omitempty"`
	Callback string `json:"callback,omitempty"`
}

// listSecrets calls remark with lines that say which secrets each node needs, and at which place.
func listSecrets(remark func(string), all []secretUse) {
	if len(all) == 0 {
		return
	}
	remark("secrets are not moved; each node that runs the plugin needs them at the same place:")
	for _, s := range all {
		place := "file " + s.File
		switch {
		case s.Env != "":
			place = "environment variable " + s.Env + " of the agent"
		case s.Callback != "":
			place = "callback " + s.Callback + " of the host"
		}
		remark(fmt.Sprintf("  %s, plugin %s: secret %q in %s", clean(s.Of), clean(s.Plugin), s.Key, clean(place)))
	}
}

// migrate runs the shim binary to move the records of a state, and returns their number. Before the move, it calls
// before with the secrets that other nodes will need.
func migrate(
	ctx context.Context, shim, state, node, cluster string, before func([]secretUse),
) (moved int, err error) {
	var answer struct {
		Secrets []secretUse
		Moved   *int
	}
	err = runShim(ctx, shim, cluster, []string{"-migrate", node, "-state", state}, func(d *json.Decoder) error {
		for answer.Moved == nil {
			if err := d.Decode(&answer); err != nil {
				return err
			}
			if answer.Moved == nil {
				before(answer.Secrets)
			}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return *answer.Moved, nil
}

// runShim runs the shim binary with a cluster block, and passes its output to read until it ends.
func runShim(
	ctx context.Context, shim, cluster string, args []string, read func(*json.Decoder) error,
) error {
	cmd, explain := shimCommand(ctx, shim, args)
	cmd.Stdin = strings.NewReader(cluster)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return err
	}
	readErr := read(json.NewDecoder(out))
	switch err := cmd.Wait(); {
	case err != nil:
		return explain(err)
	case readErr != nil:
		return fmt.Errorf("%s is not a shim: %w; set --shim", shim, readErr)
	}
	return nil
}
