package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/spf13/cobra"

	"holdfast/host/agent/control"
	"holdfast/internal/display"
)

func newAlloc(io streams, p *globalFlags) *cobra.Command {
	status := statusCommand(io, p, "List allocs, or show the one whose ID starts with ID", (*control.Client).Allocs,
		writeAllocs,
		(*control.Client).Alloc, writeAlloc)
	return group("alloc", "Inspect allocs, read their logs, release their volumes", status, newAllocLogs(io, p), newAllocRelease(io, p))
}

func newAllocLogs(io streams, p *globalFlags) *cobra.Command {
	follow, stdout, stderr := false, false, false
	c := &cobra.Command{
		Use: "logs ID TASK", Short: "Print the logs of a task", Args: usageArgs(cobra.ExactArgs(2)),
		Long: "Print the standard output and standard error of a task. Control characters are escaped on a terminal.",
		RunE: func(c *cobra.Command, args []string) error {
			return copyLogs(c.Context(), p.client(), args[0], args[1], follow, io.logs(stdout, stderr))
		},
	}
	c.Flags().BoolVarP(&follow, "follow", "f", false, "follow the logs until the task ends")
	c.Flags().BoolVar(&stdout, "stdout", false, "print only standard output")
	c.Flags().BoolVar(&stderr, "stderr", false, "print only standard error, to standard output")
	c.MarkFlagsMutuallyExclusive("stdout", "stderr")
	return c
}

// logs returns the destination of each stream of a task.
func (io streams) logs(stdout, stderr bool) map[string]writer {
	out, errs := display.Exact(io.out), display.Exact(io.err)
	switch {
	case stdout:
		return map[string]writer{"stdout": out}
	case stderr:
		return map[string]writer{"stderr": out}
	}
	return map[string]writer{"stdout": out, "stderr": errs}
}

// copyLogs copies streams of a task, one after the other, or concurrently if it follows.
func copyLogs(ctx context.Context, client *control.Client, alloc, task string, follow bool,
	streams map[string]writer) error {
	errs := make([]error, 0, len(streams))
	if !follow {
		for _, name := range slices.Sorted(maps.Keys(streams)) { // stderr first: it is usually short
			errs = append(errs, client.Logs(ctx, alloc, task, name, false, streams[name]))
			if errs[len(errs)-1] != nil {
				break
			}
		}
		return errors.Join(errs...)
	}
	results := make(chan error, len(streams))
	for name, to := range streams {
		go func() { results <- client.Logs(ctx, alloc, task, name, true, to) }()
	}
	for range streams {
		errs = append(errs, <-results)
	}
	return errors.Join(errs...)
}

func writeAllocs(to io.Writer, list []control.Alloc) error {
	t := newTable("ID", "JOB", "GROUP", "INDEX", "STATE", "CREATED", "REASON")
	for _, a := range list {
		t.add(short(a.ID), a.Job, a.Group, a.Index, a.State, when(a.Created), a.Reason)
	}
	return t.write(to, "no allocs")
}

func writeAlloc(to io.Writer, a control.Alloc) error {
	about := []any{"ID", a.ID, "Job", a.Job, "Group", fmt.Sprintf("%s[%d]", a.Group, a.Index), "State", a.State}
	if len(a.Waiting) == 0 { // otherwise the notices contain it
		about = append(about, "Reason", a.Reason)
	}
	err := facts(to, append(about, "Created", when(a.Created), "Ended", when(a.Ended))...)
	err = errors.Join(err, writeNotices(to, a.Notices))
	tasks := newTable("TASK", "DRIVER", "PLUGIN", "STATE", "ATTEMPT", "RESTARTS", "PROCESS", "LAST EXIT", "REASON")
	for _, t := range a.Tasks {
		state := string(t.State)
		if t.Failed {
			state = "failed"
		}
		tasks.add(t.Name, t.Driver, t.Plugin, state, t.Attempt, t.Restarts, number(t.PID), exitText(t), t.Reason)
	}
	fmt.Fprintln(to)
	err = errors.Join(err, tasks.write(to, "no tasks"))
	if len(a.Volumes) > 0 {
		fmt.Fprintln(to)
		err = errors.Join(err, writeUses(to, a.Volumes))
	}
	if len(a.Notes) > 0 {
		notes := newTable("TIME", "TASK", "EVENT")
		for _, n := range a.Notes {
			notes.add(when(n.At), n.Task, n.Text)
		}
		fmt.Fprintln(to)
		err = errors.Join(err, notes.write(to, ""))
	}
	return err
}

func writeUses(to io.Writer, uses []control.AllocVolume) error {
	t := newTable("REQUEST", "VOLUME", "PLUGIN", "ACCESS", "ATTACH", "STAGE", "PUBLISH", "OPEN CALL")
	for _, u := range uses {
		call := ""
		if u.Intent != nil {
			call = fmt.Sprintf("%s, %s, try %d", u.Intent.RPC, u.Intent.Outcome, u.Intent.Attempt)
		}
		t.add(u.Request, u.Volume, u.Plugin, u.Access, u.Attached, u.Staged, u.Published, call)
	}
	return t.write(to, "no volumes")
}

func exitText(t control.Task) string {
	switch {
	case t.ExitCode == nil:
		return ""
	case t.Signal != 0:
		return fmt.Sprintf("signal %d", t.Signal)
	}
	return fmt.Sprintf("code %d", *t.ExitCode)
}

// number formats n; 0 means unknown.
func number[T int | int64](n T) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprint(n)
}
