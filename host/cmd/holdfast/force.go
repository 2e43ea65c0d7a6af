package main

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"holdfast/host"
	"holdfast/host/agent/control"
	"holdfast/internal/display"
)

const withoutPlugins = "continue without plugins that are gone for good"

// forceFlags are the flags of commands that may lose data.
type forceFlags struct {
	force, dryRun bool
	confirm       string
	wait          time.Duration
}

// flags adds the flags to a command. force says what --force does, and object is the kind of object whose ID --confirm
// repeats.
func (f *forceFlags) flags(c *cobra.Command, force, object string) {
	c.Flags().BoolVar(&f.force, "force", false, force)
	c.Flags().StringVar(&f.confirm, "confirm", "",
		"with --force: the ID of the "+object+" again, to accept that data may be lost")
	c.Flags().BoolVar(&f.dryRun, "dry-run", false, "only print what would be done")
	waitFlag(c, &f.wait)
}

// options returns the options of the flags. inOrder is the command that does the same without force; if there is one,
// --force or --dry-run is required.
func (f *forceFlags) options(inOrder string) (host.Force, error) {
	switch {
	case f.confirm != "" && !f.force:
		return host.Force{}, usageError{errors.New("--confirm needs --force")}
	case inOrder != "" && !f.force && !f.dryRun:
		return host.Force{}, usageError{fmt.Errorf("a release needs --force; without force, run: %s",
			inOrder)}
	}
	return host.Force{Confirm: f.confirm, DryRun: f.dryRun}, nil
}

func newAllocRelease(p *program) *cobra.Command {
	f := forceFlags{}
	c := &cobra.Command{
		Use: "release ID --force --confirm ID", Short: "Release the volumes of an alloc whose plugin is gone for good",
		Long: `Release the volumes of a stopped alloc whose plugin or backend is gone for good.

Calls that fail, or have no healthy plugin, are skipped. A mount in use is never
unmounted. Recently written data may be lost.`,
		RunE: func(c *cobra.Command, args []string) error {
			o, err := f.options("holdfast job stop")
			if err != nil {
				return err
			}
			ctx, client, stop := p.interruptible(c, f.wait)
			defer stop()
			steps, err := client.ForceRelease(ctx, args[0], o)
			if !f.dryRun {
				err = withHint(err,
					"the release continues; to check: "+display.Command("holdfast alloc status", args[0]))
			}
			return show(p, err, steps, writeSteps(f.dryRun, "alloc "+args[0]+" released"))
		},
	}
	f.flags(c, withoutPlugins, "alloc")
	return c
}

func newVolumeDetach(p *program) *cobra.Command {
	f, namespace, node := forceFlags{}, "", ""
	c := &cobra.Command{
		Use: "detach ID", Short: "Detach an unused volume from nodes",
		Long: `Detach an unused volume from all nodes, or from the one that --node names, even
if that node is gone.

Before a detach from another node, the fence command of the agent runs for that
node. Without a fence command, or if the plugin is gone, --force and --confirm
are needed. A detach from this node needs no fence.`,
		RunE: func(c *cobra.Command, args []string) error {
			o, err := f.options("")
			if err != nil {
				return err
			}
			name := volumeName(namespace, args[0])
			ctx, client, stop := p.interruptible(c, f.wait)
			defer stop()
			steps, err := client.DetachVolume(ctx, name, node, o)
			if !f.dryRun {
				err = withHint(err, fmt.Sprintf("the detach of volume %s may continue; to check: %s; "+
					"to repeat it, run the command again", name, control.VolumeCommand("status", name)))
			}
			return show(p, err, steps, writeSteps(f.dryRun, fmt.Sprintf("volume %s detached", name)))
		},
	}
	c.Flags().StringVar(&node, "node", "", "name of the only node to detach from")
	namespaceFlag(c, "volume", &namespace)
	f.flags(c, withoutPlugins, "volume")
	return c
}

// writeSteps returns a function that prints steps. Its last line is done or, for a dry run, that nothing was done.
func writeSteps(dryRun bool, done string) func(io.Writer, []host.ReleaseStep) error {
	return func(to io.Writer, steps []host.ReleaseStep) error {
		for _, s := range steps {
			fmt.Fprintln(to, clean(s.String()))
		}
		if dryRun {
			done = "nothing was done"
		}
		_, err := fmt.Fprintln(to, done)
		return err
	}
}
