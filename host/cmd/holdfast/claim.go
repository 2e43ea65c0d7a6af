package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"holdfast/host"
	"holdfast/host/agent/control"
	"holdfast/internal/display"
)

func newClaim(p *program) *cobra.Command {
	return group("claim", "Inspect and release claims on volumes", newClaimList(p), newClaimExplain(p),
		newClaimRelease(p))
}

func newClaimList(p *program) *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List claims on volumes",
		RunE: func(c *cobra.Command, _ []string) error {
			client := p.client()
			list, err := client.Claims(c.Context())
			if err == nil {
				var nodes []host.NodeStatus
				nodes, err = client.Nodes(c.Context())
				p.warnStale(control.Stale(nodes))
			}
			return show(p, err, list, writeClaims)
		},
	}
}

func writeClaims(to io.Writer, list []control.Claim) error {
	t := newTable("VOLUME", "NAMESPACE", "ALLOC", "REQUEST", "NODE", "NODE STATE", "ACCESS", "SINCE")
	for _, c := range list {
		t.add(c.Name.ID, c.Name.Namespace, short(c.Alloc), c.Request, c.Node, c.NodeState, c.Usage.Access, age(c.Since))
	}
	return t.write(to, "no claims")
}

func newClaimExplain(p *program) *cobra.Command {
	namespace := ""
	c := &cobra.Command{
		Use: "explain VOLUME", Short: "Say who holds a volume, what waits for it, and what happens next",
		Long: `Say who holds a volume, where it is attached, which allocs of this node wait for
it, since when, and what happens next. For allocs of another node, run this
command there.`,
		RunE: func(c *cobra.Command, args []string) error {
			e, err := p.client().ExplainClaims(c.Context(), volumeName(namespace, args[0]))
			p.warnStale(e.Stale)
			return show(p, err, e, writeExplanation)
		},
	}
	namespaceFlag(c, "volume", &namespace)
	return c
}

func writeExplanation(to io.Writer, e control.ClaimExplanation) error {
	var about factList
	about.add("Volume", e.VolumeName(), "State", e.State, "Plugin", e.Plugin, "Executor", e.Executor)
	if e.Intent != nil {
		about.add("Open call", callText(e.Intent)+", since "+when(e.Intent.Since))
	}
	err := columns(to, about)
	fmt.Fprintln(to)
	err = errors.Join(err, writeClaims(to, e.Claims))
	if len(e.Attachments) > 0 {
		t := newTable("ATTACHED TO", "NODE ID", "STATE", "DETACH ASKED BY")
		for _, a := range e.Attachments {
			t.add(a.Node, a.NodeID, a.State, a.DetachingBy)
		}
		fmt.Fprintln(to)
		err = errors.Join(err, t.write(to, ""))
	}
	err = errors.Join(err, writeNotices(to, e.Notices))
	if e.Nodes > 1 {
		fmt.Fprintln(to, "\nAllocs of other nodes may wait for the volume too: run this command there to see them.")
	}
	return err
}

func newClaimRelease(p *program) *cobra.Command {
	f, namespace := forceFlags{}, ""
	c := &cobra.Command{
		Use:   "release VOLUME ALLOC --force --confirm ALLOC",
		Short: "Release the claims of an alloc that cannot be stopped",
		Long: `Release the claims of an alloc on a volume. The volume is detached from the
alloc's node first.

An alloc cannot be stopped if its node is not alive, or if its node is this one
and the agent has no record of the alloc. If the volume is still mounted on the
node, two writers may destroy its data. To release any other claim, stop its
alloc.`,
		RunE: func(c *cobra.Command, args []string) error {
			o, err := f.options("holdfast alloc stop")
			if err != nil {
				return err
			}
			name := volumeName(namespace, args[0])
			ctx, client, stop := p.interruptible(c, f.wait)
			defer stop()
			steps, err := client.ReleaseClaim(ctx, name, args[1], o)
			if !f.dryRun {
				err = withHint(err, "the release may continue; to check: "+
					display.ObjectCommand("holdfast claim explain", name.Namespace, string(name.ID)))
			}
			return show(p, err, steps,
				writeSteps(f.dryRun, fmt.Sprintf("claim of alloc %s on volume %s released", args[1], name)))
		},
	}
	namespaceFlag(c, "volume", &namespace)
	f.flags(c, "release the claim although its alloc cannot be stopped", "alloc")
	return c
}
