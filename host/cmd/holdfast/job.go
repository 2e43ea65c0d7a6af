package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"holdfast/host/agent"
	"holdfast/host/agent/control"
	"holdfast/internal/display"
)

func newJob(p *program) *cobra.Command {
	return group("job", "Run, stop and inspect jobs", newJobRun(p), newJobPlan(p), newJobStop(p),
		newJobStart(p), newJobInspect(p), newJobLogs(p),
		statusCommand(p, "List jobs, or show one with its allocs", (*control.Client).Jobs, writeJobs,
			(*control.Client).Job, writeJob))
}

func newJobRun(p *program) *cobra.Command {
	v, o, wait := &variables{}, agent.SubmitOptions{}, false
	c := &cobra.Command{
		Use: "run FILE...", Short: "Run or update jobs",
		Long: `Run or update jobs. Running allocs of unchanged groups keep running.

Completed batch allocs of unchanged groups run again only with --rerun, or after
job stop. Failed allocs always run again.

With --wait the exit code is 1 if an alloc fails.`,
		RunE: func(c *cobra.Command, args []string) error {
			list, err := v.submissions(args, false)
			if err != nil {
				return err
			}
			return each(list, func(src control.Submission) error {
				job, err := p.client().RunJob(c.Context(), src, o)
				return p.reportSubmitted(c.Context(), job, err, wait)
			})
		},
	}
	v.flags(c)
	waitForJobFlag(c, &wait)
	c.Flags().BoolVar(&o.Rerun, "rerun", false, "run completed batch allocs again")
	c.Flags().BoolVar(&o.Force, "force", false, "update even if this stops a plugin whose mounts are in use")
	return c
}

func waitForJobFlag(c *cobra.Command, wait *bool) {
	c.Flags().BoolVar(wait, "wait", false, "wait until each alloc has ended, or runs and its plugins are healthy")
}

func newJobStart(p *program) *cobra.Command {
	wait := false
	c := &cobra.Command{
		Use: "start ID...", Short: "Start stopped jobs again",
		Long: `Start stopped or failed jobs again, from the text and variables of their current
version, which the agent has stored. Files that file() names are read again. A
version that had not taken over when the job was stopped is not started. A job
that has not ended keeps running. Complete batch jobs do not run again.

With --wait the exit code is 1 if an alloc fails.`,
		RunE: func(c *cobra.Command, args []string) error {
			job, err := p.client().StartJob(c.Context(), args[0])
			return p.reportSubmitted(c.Context(), job, err, wait)
		},
	}
	waitForJobFlag(c, &wait)
	return c
}

// reportSubmitted reports a submitted job, or the error of its submission.
func (p *program) reportSubmitted(ctx context.Context, job control.Job, err error, wait bool) error {
	if err != nil {
		return err
	}
	wasComplete := job.Status == agent.AllocComplete
	var failed error
	if wait {
		if job, err = p.awaitJob(ctx, job); err != nil {
			return err
		}
		failed = failedAlloc(job)
	}
	if p.json {
		return errors.Join(writeJSON(p.out, job), failed)
	}
	for _, w := range job.Warnings {
		fmt.Fprintln(p.errs, "warning:", w)
	}
	next := ""
	if !wait && !wasComplete {
		next = "; see " + display.Command("holdfast job status", job.ID)
	}
	fmt.Fprintf(p.out, "job %s: version %d, %s%s\n", job.ID, job.Version, job.Status, next)
	if r := job.Roll; r != nil && r.State == agent.RollStarting {
		fmt.Fprintf(p.out, "version %d follows once its plugins are healthy\n", r.Version)
	}
	if wasComplete {
		fmt.Fprintln(p.out, "no changes: all allocs are complete; use job run --rerun to run them again")
	}
	return failed
}

func newJobInspect(p *program) *cobra.Command {
	return &cobra.Command{
		Use: "inspect ID", Short: "Print a job as it was submitted",
		Long: `Print the file of a job as it was submitted. With --json also its version and
the values of its variables.`,
		RunE: func(c *cobra.Command, args []string) error {
			src, err := p.client().JobSource(c.Context(), args[0])
			return show(p, err, src, func(to io.Writer, src control.JobSource) error {
				_, err := fmt.Fprint(display.Exact(to), src.Text)
				return err
			})
		},
	}
}

func newJobPlan(p *program) *cobra.Command {
	v := &variables{}
	c := &cobra.Command{
		Use: "plan FILE", Short: "Show whether the volumes of a job could be mounted now, and why not",
		Long: `Show for each alloc of a job whether its volumes could be mounted now, and why
not. Nothing is changed.

The exit code is 1 if an alloc could not get its volumes.`,
		RunE: func(c *cobra.Command, args []string) error {
			src, err := v.readOne(args[0], false)
			if err != nil {
				return err
			}
			places, err := p.client().PlanJob(c.Context(), src)
			if err := show(p, err, places, writePlan); err != nil {
				return err
			}
			if slices.ContainsFunc(places, func(p agent.Placement) bool { return len(p.Reasons) > 0 }) {
				return errReported
			}
			return nil
		},
	}
	v.flags(c)
	return c
}

func writePlan(to io.Writer, places []agent.Placement) error {
	t := newTable("GROUP", "INDEX", "ALLOC", "FEASIBLE", "REQUEST", "KIND", "REASON")
	for _, p := range places {
		if len(p.Reasons) == 0 {
			t.add(p.Group, p.Index, short(p.Alloc), "yes", "", "", "")
		}
		for _, r := range p.Reasons {
			t.add(p.Group, p.Index, short(p.Alloc), "no", r.Request, string(r.Kind), r.Detail)
		}
	}
	return t.write(to, "no allocs")
}

// awaitJob waits until the allocs of the job's version have ended or are running with healthy plugins. If job shows a
// roll that is starting, and that roll has failed meanwhile, the error says why.
func (p *program) awaitJob(ctx context.Context, job control.Job) (control.Job, error) {
	client := p.client()
	settled, err := acrossRestarts(ctx, client, func() (control.Job, error) { return client.AwaitJob(ctx, job.ID) })
	if err != nil || job.Roll == nil || job.Roll.State != agent.RollStarting {
		return settled, err
	}
	if r := settled.Roll; r != nil && r.Version == job.Roll.Version && r.Failed != "" {
		return settled, errors.New(r.String())
	}
	return settled, nil
}

// failedAlloc returns the error of the first failed alloc of a job.
func failedAlloc(j control.Job) error {
	for _, a := range j.Allocs {
		if a.State == "failed" && !a.Replaced {
			err := fmt.Errorf("alloc %s failed: %s", a.ID, a.Reason)
			if slices.ContainsFunc(a.Tasks, control.Task.Ran) {
				err = fmt.Errorf("%w; to see its output: %s", err, display.Command("holdfast job logs --tail 20", j.ID))
			}
			return err
		}
	}
	return nil
}

func newJobStop(p *program) *cobra.Command {
	o, wait := agent.StopOptions{}, false
	c := &cobra.Command{
		Use: "stop ID...", Short: "Stop jobs and release their volumes",
		RunE: func(c *cobra.Command, args []string) error {
			client := p.client()
			status := "is stopping"
			if err := client.StopJob(c.Context(), args[0], o); err != nil {
				return err
			}
			if wait {
				status = "stopped"
				_, err := acrossRestarts(c.Context(), client, func() (struct{}, error) {
					return struct{}{}, client.AwaitStopped(c.Context(), args[0])
				})
				if err != nil {
					return err
				}
			}
			return showLine(p, nil, map[string]string{"id": args[0]}, "job %s %s", args[0], status)
		},
	}
	c.Flags().BoolVar(&o.Purge, "purge", false, "delete the records of the job and its allocs")
	c.Flags().BoolVar(&wait, "wait", false, "wait until its tasks have ended and its volumes are released")
	c.Flags().BoolVar(&o.Force, "force", false, "stop even if it runs a plugin whose volumes are in use")
	return c
}

func writeJobs(to io.Writer, jobs []control.Job) error {
	t := newTable("ID", "TYPE", "STATUS", "VERSION", "GROUPS", "SUBMITTED", "REASON")
	for _, j := range jobs {
		t.add(j.ID, j.Type, j.Status, j.Version, len(j.Groups), age(j.Submitted), cmp.Or(j.Waits, j.Reason))
	}
	return t.write(to, "no jobs")
}

func writeJob(to io.Writer, j control.Job) error {
	var about factList
	about.add("ID", j.ID, "Namespace", j.Namespace, "Type", j.Type, "Status", j.Status, "Version", j.Version,
		"Stopped", yesNo(j.Stopped), "Submitted", when(j.Submitted))
	about.addKnown("Waits", j.Waits)
	if j.Roll != nil {
		about.add("Plugin roll", j.Roll)
	}
	err := columns(to, about)
	groups := newTable("GROUP", "COUNT", "PLUGINS", "VOLUMES", "ALLOCS")
	for _, g := range j.Groups {
		groups.add(g.Name, g.Count, join(g.Plugins, ","), join(g.Volumes, ","), g.Counts())
	}
	fmt.Fprintln(to)
	err = errors.Join(err, groups.write(to, "no groups"))
	fmt.Fprintln(to)
	return errors.Join(err, writeAllocs(to, j.Allocs))
}

func join[T ~string](list []T, separator string) string {
	texts := make([]string, len(list))
	for i, t := range list {
		texts[i] = string(t)
	}
	return strings.Join(texts, separator)
}
