package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"holdfast/host"
	"holdfast/internal/display"
)

func newEvents(p *program) *cobra.Command {
	follow, after := false, ""
	c := &cobra.Command{
		Use: "events", Short: "List events of plugins and volumes",
		Long: `List events of plugins and volumes, one per line. With --json each line is a
JSON object. To continue later, pass the number of the last event to --after.`,
		RunE: func(c *cobra.Command, _ []string) error {
			number, err := strconv.ParseUint(cmp.Or(after, "0"), 10, 64)
			if err != nil {
				return usageError{fmt.Errorf("--after %q: use the number of an event, which begins its line", after)}
			}
			lines := json.NewEncoder(p.out)
			return p.client().Events(c.Context(), number, follow, func(e host.Event) error {
				switch {
				case p.json:
					return lines.Encode(e)
				case e.Kind == host.EventResync && number > uint64(e.Seq):
					_, err := fmt.Fprintf(p.errs, "holdfast: there is no event %d yet; the last number is %d\n", number,
						e.Seq)
					return err
				case e.Kind == host.EventResync:
					_, err := fmt.Fprintf(p.errs, "holdfast: the events after %d, up to %d, are not kept any more\n",
						number, e.Seq)
					return err
				}
				_, err := fmt.Fprintf(p.out, "%6d  %s  %s\n", e.Seq, display.UTC(e.At), clean(e.Describe()))
				return err
			})
		},
	}
	c.Flags().BoolVarP(&follow, "follow", "f", false, "print new events until interrupted")
	c.Flags().StringVar(&after, "after", "", "print only events after this number")
	return c
}
