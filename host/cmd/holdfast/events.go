package main

import (
	"errors"
	"fmt"
	"io"
	"os/signal"

	"encoding/json"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/host/agent/control"
)

type writer = io.Writer

func newEvents(io streams, p *globalFlags) *cobra.Command {
	follow, after := false, uint64(0)
	c := &cobra.Command{
		Use: "events", Short: "List events of plugins and volumes", Args: counted(cobra.NoArgs),
		Long: "List events of plugins and volumes, one per line. With --json each line is a JSON object. To continue later, pass the number of the last event to --after.",
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(c.Context(), unix.SIGINT, unix.SIGTERM)
			defer stop()
			lines := json.NewEncoder(io.out)
			err := p.client().Events(ctx, after, follow, func(e host.Event) error {
				if p.json {
					return lines.Encode(e)
				}
				_, err := fmt.Fprintf(io.out, "%6d  %s  %s\n", e.Seq, when(e.At), clean(eventLine(e)))
				return err
			})
			if ctx.Err() != nil && !errors.Is(err, control.ErrNoAgent) {
				return nil
			}
			return err
		},
	}
	c.Flags().BoolVarP(&follow, "follow", "f", false, "print new events until interrupted")
	c.Flags().Uint64Var(&after, "after", 0, "print only events after this number")
	return c
}
