package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"holdfast/host"
	"holdfast/host/agent/control"
)

func newShim(p *program) *cobra.Command {
	return group("shim", "Inspect or replace the shim", newShimStatus(p), newShimSwap(p),
		newShimRollback(p),
		newShimHistory(p))
}

func newShimStatus(p *program) *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Show the active shim",
		RunE: func(c *cobra.Command, _ []string) error {
			shim, err := p.client().Shim(c.Context())
			return show(p, err, shim, writeShim)
		},
	}
}

func writeShim(to io.Writer, s control.Shim) error {
	serves := "since " + when(s.Since)
	if !s.Serving {
		serves = "no, since " + when(s.Since) + "; calls wait"
	}
	var about factList
	about.add("Serving", serves, "SHA-256", s.SHA256)
	if s.Failures > 0 {
		about.add("Consecutive failures", s.Failures, "Last failure", s.Reason)
	}
	if !s.Serving && !s.Next.IsZero() {
		about.add("Next start", when(s.Next), "To repair", "holdfast shim swap PATH")
	}
	if !s.Bakes.IsZero() {
		about.add("Previous shim", "standby until "+when(s.Bakes))
	}
	if swap := s.Swap; swap != nil {
		about.add("Swap", fmt.Sprintf("to %s, by %s, started %s", cmp.Or(swap.Path, "a stored binary"), swap.By,
			when(swap.Began)), "Swap step", fmt.Sprintf("%s, since %s", swap.Step, when(swap.Since)))
	}
	if s.Serving {
		about.add("Version", s.Version, "Process", s.PID, "Generation", s.Generation, "Index", s.Index, "Protocol",
			s.Protocol, "Schema", s.Schema, "Open calls", s.OpenIntents, "Instances", s.Instances, "Allocs", s.Allocs)
		about.addKnown("Cluster", s.ClusterProblem)
	}
	return columns(to, about)
}

func newShimSwap(p *program) *cobra.Command {
	sum := ""
	c := &cobra.Command{
		Use: "swap PATH", Short: "Replace the shim without interrupting tasks",
		Long: `Replace the shim with the binary at PATH. Tasks, mounts and plugins are not
affected; calls wait for a few milliseconds. The previous shim stays on standby
and takes over if the new one dies.`,
		RunE: func(c *cobra.Command, args []string) error {
			path, err := filepath.Abs(args[0])
			if err != nil {
				return err
			}
			return p.swap(c.Context(), control.SwapRequest{Path: path, SHA256: sum})
		},
	}
	c.Flags().StringVar(&sum, "sha256", "", "expected digest of the binary (default: the content of PATH.sha256; "+
		"without that file, the binary is trusted)")
	return c
}

func newShimRollback(p *program) *cobra.Command {
	return &cobra.Command{
		Use: "rollback", Short: "Replace the shim with the previous one",
		Long: `Replace the shim with the binary that ran before it, until a swap or an upgrade.
The agent keeps copies of the last three binaries. A binary that cannot read the
state is refused before anything stops.`,
		RunE: func(c *cobra.Command, _ []string) error {
			now, err := p.client().Shim(c.Context())
			switch {
			case err != nil:
				return err
			case now.Previous == "":
				return errors.New("there is no previous shim; to run another binary: holdfast shim swap PATH")
			}
			return p.swap(c.Context(), control.SwapRequest{SHA256: now.Previous})
		},
	}
}

func newShimHistory(p *program) *cobra.Command {
	return &cobra.Command{
		Use: "history", Short: "List swaps, newest first",
		RunE: func(c *cobra.Command, _ []string) error {
			list, err := p.client().Swaps(c.Context())
			views := make([]swapJSON, len(list))
			for i, r := range list {
				views[i] = swapJSONOf(r)
			}
			return show(p, err, views, func(to io.Writer, _ []swapJSON) error { return writeSwaps(to, list) })
		},
	}
}

// swapJSON is a report with durations as text.
type swapJSON struct {
	host.SwapReport
	Hold  string     `json:"hold"`
	Steps []stepJSON `json:"steps"`
}

type stepJSON struct {
	Step host.SwapStep `json:"step"`
	Took string        `json:"took"`
}

func swapJSONOf(r host.SwapReport) swapJSON {
	s := swapJSON{SwapReport: r, Hold: r.Hold.String(), Steps: []stepJSON{}}
	for _, step := range r.Steps {
		s.Steps = append(s.Steps, stepJSON{step.Step, step.Took.String()})
	}
	return s
}

// swap asks the agent for a swap, and writes the report as JSON or as text.
func (p *program) swap(ctx context.Context, ask control.SwapRequest) error {
	report, err := p.client().Swap(ctx, ask)
	if err != nil {
		return err
	}
	now, err := p.client().Shim(ctx)
	if err != nil {
		now.SHA256 = report.To // the swap is done, even if the request above has failed
	}
	return show(p, nil, swapJSONOf(report), func(to io.Writer, _ swapJSON) error {
		return writeSwapped(to, report, now.ShimState)
	})
}

// writeSwapped writes which shim serves now, and the report of the swap.
func writeSwapped(to io.Writer, s host.SwapReport, now host.ShimState) error {
	fmt.Fprintf(to, "now serving %s", short(now.SHA256))
	if s.From == s.To {
		fmt.Fprint(to, ", the same binary as before")
	}
	if !now.Bakes.IsZero() {
		fmt.Fprintf(to, "; until %s, %s takes over again if it dies", when(now.Bakes), short(s.From))
	}
	fmt.Fprint(to, "\n\n")
	return writeFacts(to, "Outcome", s.Outcome, "From", short(s.From), "To", short(s.To), "Protocol", s.Protocol,
		"Generation", s.Generation,
		"Steps", stepsText(s.Steps), "Calls held", s.Held, "Held at most", s.Hold.Round(100*time.Microsecond),
		"Warnings", strings.Join(s.Warnings, "; "))
}

func stepsText(steps []host.SwapStepTime) string {
	list := make([]string, len(steps))
	for i, s := range steps {
		list[i] = fmt.Sprintf("%s %s", s.Step, s.Took.Round(100*time.Microsecond))
	}
	return strings.Join(list, ", ")
}

func writeSwaps(to io.Writer, list []host.SwapReport) error {
	t := newTable("BEGAN", "BY", "FROM", "TO", "GENERATION", "OUTCOME", "CALLS HELD", "HELD AT MOST", "FAILED STEP",
		"REASON", "STEPS")
	for _, s := range list {
		t.add(age(s.Began), s.By, short(s.From), short(s.To), number(int64(s.Generation)), s.Outcome, number(s.Held),
			s.Hold.Round(100*time.Microsecond),
			s.Failed, s.Reason, stepsText(s.Steps))
	}
	return t.write(to, "no swaps")
}
