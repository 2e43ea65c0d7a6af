package main

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"holdfast/host/agent/control"
	"holdfast/internal/display"
)

func newAlloc(p *program) *cobra.Command {
	status := statusCommand(p, "List allocs, or show one by its ID or a prefix of it", (*control.Client).Allocs,
		writeAllocs,
		(*control.Client).Alloc, writeAlloc)
	return group("alloc", "Manage allocs, read their logs, run commands in them",
		status, newAllocLogs(p), newAllocExec(p), newAllocRestart(p), newAllocStop(p),
		newAllocRelease(p))
}

func newAllocRestart(p *program) *cobra.Command {
	force := false
	c := &cobra.Command{
		Use: "restart ID [TASK]", Short: "Restart the tasks of an alloc, or one of them",
		Long: `Restart the running tasks of an alloc, or one of them. The volumes of the alloc
stay mounted. The restart policy of the job does not count this restart.`,
		RunE: func(c *cobra.Command, args []string) error {
			tasks, err := p.client().RestartAlloc(c.Context(), args[0], strings.Join(args[1:], ""), force)
			return showLine(p, err, map[string]any{"id": args[0], "tasks": tasks}, "alloc %s: restarting %s", args[0],
				join(tasks, ", "))
		},
	}
	c.Flags().BoolVar(&force, "force", false,
		"restart a plugin even if its process serves mounts; these break")
	return c
}

func newAllocStop(p *program) *cobra.Command {
	force := false
	c := &cobra.Command{
		Use: "stop ID...", Short: "Stop allocs; their jobs place others instead",
		Long: `Stop allocs and release their volumes. Each job that is not stopped places
another alloc instead.`,
		RunE: func(c *cobra.Command, args []string) error {
			err := p.client().StopAlloc(c.Context(), args[0], force)
			return showLine(p, err, map[string]string{"id": args[0]}, "alloc %s is stopping", args[0])
		},
	}
	c.Flags().BoolVar(&force, "force", false, "stop even if it runs a plugin whose volumes are in use")
	return c
}

func writeAllocs(to io.Writer, list []control.Alloc) error {
	t := newTable("ID", "JOB", "GROUP", "INDEX", "STATE", "CREATED", "REASON")
	for _, a := range list {
		t.add(short(a.ID), a.Job, a.Group, a.Index, a.State, age(a.Created), a.Reason)
	}
	return t.write(to, "no allocs")
}

func writeAlloc(to io.Writer, a control.Alloc) error {
	var about factList
	about.add("ID", a.ID, "Job", a.Job, "Group", fmt.Sprintf("%s[%d]", a.Group, a.Index), "State", a.State)
	if len(a.Waiting) == 0 { // otherwise the notices contain the reason
		about.add("Reason", a.Reason)
	}
	about.add("Created", when(a.Created), "Ended", when(a.Ended))
	err := columns(to, about)
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
	err = errors.Join(err, tasks.write(to, "no tasks"), writeDriverNotes(to, a.Tasks))
	if len(a.Volumes) > 0 {
		fmt.Fprintln(to)
		err = errors.Join(err, writeUses(to, a.Volumes))
	}
	if len(a.Notes) > 0 {
		notes := newTable("TIME", "TASK", "EVENT")
		for _, n := range a.Notes {
			notes.add(display.UTC(n.At), n.Task, n.Text)
		}
		fmt.Fprintln(to)
		err = errors.Join(err, notes.write(to, ""))
	}
	return err
}

// writeDriverNotes writes what the machine does not enforce or provide for the tasks.
func writeDriverNotes(to io.Writer, tasks []control.Task) error {
	notes := newTable("TASK", "WARNING")
	for _, t := range tasks {
		for _, n := range t.Notes {
			notes.add(t.Name, n)
		}
	}
	if len(notes.rows) == 1 {
		return nil
	}
	fmt.Fprintln(to)
	return notes.write(to, "")
}

func writeUses(to io.Writer, uses []control.AllocVolume) error {
	t := newTable("REQUEST", "VOLUME", "PLUGIN", "ACCESS", "ATTACH", "STAGE", "PUBLISH", "OPEN CALL")
	for _, u := range uses {
		t.add(u.Request, u.Volume, u.Plugin, u.Access, u.Attached, u.Staged, u.Published, callText(u.Intent))
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
