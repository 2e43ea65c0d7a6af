package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"holdfast/host"
	"holdfast/host/agent/control"
	"holdfast/internal/display"
	"holdfast/registry"
)

func newNode(p *program) *cobra.Command {
	return group("node", "Inspect and drain the nodes of a cluster",
		statusCommand(p, "List nodes, or show one",
			func(c *control.Client, ctx context.Context) ([]host.NodeStatus, error) {
				all, err := c.Nodes(ctx)
				p.warnStale(control.Stale(all))
				if len(all) > 0 && all[0].Unformed != "" {
					p.remark(clean(all[0].Unformed))
				}
				return all, err
			}, writeNodes,
			func(c *control.Client, ctx context.Context, id string) (host.NodeStatus, error) {
				n, err := c.Node(ctx, id)
				p.warnStale(n.Stale)
				return n, err
			}, writeNode),
		newNodeDrain(p), newNodeOutOfService(p), newNodeForget(p))
}

// warnStale prints why the shown state of the cluster may be outdated.
func (p *program) warnStale(why string) {
	if why != "" {
		p.remark("this may be outdated: " + clean(why))
	}
}

func newNodeDrain(p *program) *cobra.Command {
	off, deadline, reason := false, time.Duration(0), ""
	c := &cobra.Command{
		Use: "drain ID", Short: "Stop the allocs of a node, and refuse new claims there",
		Long: `Stop what runs on a node: users of volumes first, and plugins when the volumes
are released. The node takes no new claims until the drain is ended with --off.
Then its jobs run again.

The drain continues after the command. To follow it: holdfast node status ID.`,
		RunE: func(c *cobra.Command, args []string) error {
			if off && (deadline != 0 || reason != "") {
				return usageError{errors.New("--off ends a drain; --deadline and --reason are for its start")}
			}
			hint := fmt.Sprintf("the drain of node %s may or may not have changed; to check: %s; to resume, run the "+
				"command again", args[0], display.Command("holdfast node status", args[0]))
			ctx, client, stop := p.interruptible(c, 0)
			defer stop()
			n, err := client.DrainNode(ctx, args[0], off, deadline, reason)
			return showLine(p, withHint(err, hint), n, "node %s is %s", n.Name, control.NodeState(n))
		},
	}
	c.Flags().BoolVar(&off, "off", false, "end the drain")
	c.Flags().DurationVar(&deadline, "deadline", 0, "after this time, tasks that still run are killed; 0 means never")
	c.Flags().StringVar(&reason, "reason", "", "why, for other operators")
	return c
}

func newNodeOutOfService(p *program) *cobra.Command {
	confirm, reason := "", ""
	c := &cobra.Command{
		Use: "out-of-service ID --confirm ID", Short: "Release the volumes of a node whose machine is off",
		Long: `Declare that nothing runs on a node any more, because its machine is off or
destroyed. Its volumes are detached and its claims released, so that other nodes
can use them.

If the machine still runs, two nodes write to the same volumes and destroy their
data. A node that is alive is refused. A node that comes back unmounts these
volumes before it does anything else.`,
		RunE: func(c *cobra.Command, args []string) error {
			hint := fmt.Sprintf("node %s may or may not be out of service; to check: %s; to resume, run the command "+
				"again", args[0], display.Command("holdfast node status", args[0]))
			ctx, client, stop := p.interruptible(c, 0)
			defer stop()
			n, err := client.NodeOutOfService(ctx, args[0], confirm, reason)
			return showLine(p, withHint(err, hint), n,
				"node %s is %s; to see its claims being released: holdfast claim list", n.Name, control.NodeState(n))
		},
	}
	c.Flags().StringVar(&confirm, "confirm", "", "the ID of the node again, to confirm that it is off")
	c.Flags().StringVar(&reason, "reason", "", "why, for other operators")
	return c
}

func newNodeForget(p *program) *cobra.Command {
	reason := ""
	c := &cobra.Command{
		Use: "forget ID", Short: "Remove a node that never comes back",
		Long: `Remove a node from the list because it never comes back. The command refuses
if the node is alive, or if records depend on it: release its claims and
attachments with holdfast node out-of-service, and deregister the volumes and
snapshots that are stored on it.

If the node comes back after all, it unmounts its volumes and is listed again.`,
		RunE: func(c *cobra.Command, args []string) error {
			err := p.client().ForgetNode(c.Context(), args[0], reason)
			return showLine(p, err, map[string]string{"node": args[0]}, "node %s is forgotten", clean(args[0]))
		},
	}
	c.Flags().StringVar(&reason, "reason", "", "why, for other operators")
	return c
}

func writeNodes(to io.Writer, list []host.NodeStatus) error {
	t := newTable("ID", "STATE", "SINCE", "VERSION", "PLUGINS", "CLAIMS", "ATTACHMENTS")
	for _, n := range list {
		claims, attachments := 0, 0
		var names []string
		for _, p := range n.Plugins {
			claims, attachments = claims+p.Claims, attachments+p.Attachments
			if p.Registered() {
				names = append(names, string(p.Plugin))
			}
		}
		at := n.Since
		if !n.Alive {
			at = n.SuspectSince
		}
		t.add(n.Name, control.NodeState(n), age(at), n.Version, strings.Join(names, ", "), claims, attachments)
	}
	return t.write(to, "no nodes")
}

func writeNode(to io.Writer, n host.NodeStatus) error {
	var about factList
	about.add("ID", n.Name, "State", control.NodeState(n), "Cluster", n.Unformed, "By", n.By,
		"Reason", n.Reason, "Since", when(n.Since), "Deadline", when(n.Deadline), "Alive since", when(n.AliveSince),
		"Suspect since (seen here)", when(n.SuspectSince), "Version", n.Version, "Epoch", n.Epoch)
	if d := n.Drain; d.By != "" {
		about.add("When back", strings.TrimSuffix("drained by "+d.By+": "+d.Reason, ": "))
	}
	err := columns(to, about)
	t := newTable("PLUGIN", "NODE", "CONTROLLER", "EXECUTOR", "NODE ID", "TOPOLOGY", "CLAIMS", "ATTACHMENTS", "LIMIT")
	for _, p := range n.Plugins {
		topology := ""
		if len(p.Topology) > 0 {
			topology = p.Topology.String()
		}
		t.add(p.Plugin, p.Health(host.RoleNode), p.Health(host.RoleController), yesNo(p.Executor), p.NodeID, topology,
			p.Claims, p.Attachments, number(p.MaxVolumes))
	}
	fmt.Fprintln(to)
	err = errors.Join(err, t.write(to, "no plugins"))
	if n.Alive || n.Lost() || n.State == registry.NodeUnjoined {
		return err
	}
	_, failed := fmt.Fprintf(to, "\netcd does not hear from the node. Its claims stay until it is back. If its "+
		"machine is certainly off:\n  %s\n", control.OutOfServiceCommand(n.Name))
	return errors.Join(err, failed)
}
