package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"holdfast/host"
	"holdfast/host/agent/control"
	"holdfast/internal/display"
	"holdfast/registry"
)

func newSnapshotDiff(p *program) *cobra.Command {
	namespace, offset, wait := "", int64(0), time.Duration(0)
	c := &cobra.Command{
		Use: "diff [BASE] SNAPSHOT", Short: "List the blocks in which a snapshot differs from an earlier one",
		Long: `List the blocks in which a snapshot differs from an earlier one of the same
volume.

Without BASE, list the blocks that are allocated. The ranges are printed as they
come, in order. If the list ends early, continue it with --offset OFFSET+SIZE of
the last range.`,
		RunE: func(c *cobra.Command, args []string) error {
			q := host.BlockQuery{Offset: offset, Snapshot: snapshotName(namespace, args[len(args)-1])}
			if len(args) == 2 {
				q.Base = registry.SnapshotID(args[0])
			}
			out := blockWriter{to: p.out, json: p.json, delta: q.Base != ""}
			client := p.client()
			client.Wait = wait
			if err := client.Snapshots(control.Snapshots).Blocks(c.Context(), q, out.write); err != nil {
				return err
			}
			return out.end()
		},
	}
	namespaceFlag(c, "snapshot", &namespace)
	c.Flags().Int64Var(&offset, "offset", 0, "list blocks from this byte on")
	c.Flags().DurationVar(&wait, "wait", 30*time.Second, "how long to wait for the first block; 0 means no limit")
	return c
}

// blockWriter prints a list of blocks part by part, as lines or as one JSON document.
type blockWriter struct {
	to          io.Writer
	json, delta bool

	started       bool
	ranges, bytes int64
	last          host.Blocks // without its ranges
}

func (w *blockWriter) write(part host.Blocks) error {
	for _, r := range part.Ranges {
		if err := w.writeRange(r); err != nil {
			return err
		}
	}
	part.Ranges = nil
	w.last = part
	return nil
}

func (w *blockWriter) writeRange(r host.BlockRange) error {
	before, text := "", fmt.Sprintf("%-20d %d\n", r.Offset, r.Size)
	if w.json {
		encoded, err := json.Marshal(r)
		if err != nil {
			return err
		}
		before, text = ",\n", string(encoded)
	}
	if !w.started {
		before = w.heading()
	}
	w.started = true
	w.ranges, w.bytes = w.ranges+1, w.bytes+r.Size
	_, err := fmt.Fprint(w.to, before, text)
	return err
}

func (w *blockWriter) heading() string {
	if w.json {
		return "{\"ranges\": [\n"
	}
	return fmt.Sprintf("%-20s %s\n", "OFFSET", "SIZE")
}

func (w *blockWriter) end() error {
	before := ""
	if w.json {
		if !w.started {
			before = w.heading()
		}
		_, err := fmt.Fprintf(w.to, "%s],\n\"block_type\": %q, \"volume_capacity_bytes\": %d, \"total_bytes\": %d}\n",
			before, w.last.Type, w.last.Capacity, w.bytes)
		return err
	}
	what := "allocated"
	if w.delta {
		what = "changed"
	}
	_, err := fmt.Fprintf(w.to, "%d ranges, %s of %s %s\n", w.ranges,
		display.Bytes(w.bytes), cmp.Or(display.Size(w.last.Capacity), "a volume"), what)
	return err
}
