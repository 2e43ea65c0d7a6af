package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/host/agent/control"
	"holdfast/internal/display"
	"holdfast/internal/mount"
)

// runFlags are the flags of run.
type runFlags struct {
	agentFlags
	variables
	deleteVolumes bool
	stopTimeout   time.Duration
}

func newRun(p *program) *cobra.Command {
	f := &runFlags{}
	c := &cobra.Command{
		Use: "run FILE...", Short: "Run jobs in the foreground",
		Long: `Run job and volume files in the foreground. Plugins start first. Volumes are
created, or registered if they have an external_id, when their plugin is
healthy. Then the other jobs start.

The command ends on SIGINT, SIGTERM or SIGHUP. If all groups that run no plugin
belong to batch jobs, it also ends once these groups have ended. It stops users
of volumes first, then plugins. A second SIGINT or SIGTERM kills the tasks and
leaves their volumes mounted.

Exit codes: 0 success; 129, 130, 143 ended by a signal and everything was
released; 1 failure, or something was left behind.

Without --state-dir the state is in a temporary directory, which is removed
unless something is left. Volumes stay unless --delete-volumes is set. The
control socket, for --address of the other commands, is printed first.`,
		RunE: func(c *cobra.Command, args []string) error { return runForeground(c.Context(), p, f, args) },
	}
	f.agentFlags.flags(c)
	f.variables.flags(c)
	c.Flags().BoolVar(&f.deleteVolumes, "delete-volumes", false, "delete the created volumes at the end")
	c.Flags().DurationVar(&f.stopTimeout, "stop-timeout", 2*time.Minute,
		"how long stopping may take; then the tasks are killed")
	return c
}

// runForeground prepares the directories, and removes a temporary state directory at the end.
func runForeground(ctx context.Context, p *program, f *runFlags, paths []string) error {
	files, err := f.readFiles(paths)
	for _, f := range files {
		err = errors.Join(err, f.err)
	}
	if err != nil {
		return err
	}
	signals, stop := endSignals()
	defer stop()
	f.traces = p.traces.Provider()
	o := &foreground{flags: f, files: files, lines: newLines(p.out, p.json), signals: signals}
	layout, err := o.makeDirs(p)
	if err != nil {
		return err
	}
	opening, endOpening := cancelOnSignal(ctx, signals)
	o.service, err = openService(opening, layout, &f.agentFlags, p.logger("warn"))
	endOpening()
	o.firstSignal, _ = errors.AsType[interrupted](context.Cause(opening))
	if err != nil {
		return o.endUnopened(layout, err)
	}
	err = o.run(ctx)
	err = errors.Join(err, o.service.close(), removeSelfMounts(o.service.layout))
	err = errors.Join(err, o.removeState()) // after the mounts are gone
	if err == nil {
		o.lines.print("done: all tasks stopped and all volumes released")
	}
	if o.firstSignal.by != nil && err == nil {
		return o.firstSignal
	}
	return err
}

// makeDirs makes the run directory and, without --state-dir, a temporary state directory.
func (o *foreground) makeDirs(p *program) (l hooks.Layout, err error) {
	if p.state != "" {
		state := realPath(p.state)
		return hooks.Layout{State: state, Run: p.makeRunDir(state)}, nil
	}
	dir, err := os.MkdirTemp("", "holdfast-")
	if err != nil {
		return l, err
	}
	o.temporary = realPath(dir)
	l = hooks.Layout{State: o.temporary, Run: o.temporary + "/run"}
	if p.run != "" {
		l.Run = realPath(p.run)
	}
	return l, nil
}

// endUnopened returns the error of the command after the opening of the service has failed or a signal has ended it. If
// the state directory is temporary, endUnopened removes it, with the mounts that the shim may have made. A permanent
// one may be in use by an agent.
func (o *foreground) endUnopened(l hooks.Layout, err error) error {
	var left error
	if o.temporary != "" {
		left = errors.Join(removeSelfMounts(l), o.removeState())
	}
	switch {
	case o.firstSignal.by == nil:
		return errors.Join(err, left)
	case left != nil:
		return left
	}
	return o.firstSignal
}

// foreground is one run of the command.
type foreground struct {
	*service
	flags       *runFlags
	files       []file
	lines       *lines
	jobs        []parsedJob
	volumes     []host.VolumeSpec
	created     []host.VolumeSpec // created by this run and not deleted
	uncertain   []host.VolumeSpec // created by this run with an unknown outcome
	signals     chan os.Signal
	firstSignal interrupted
	temporary   string // the state directory, if it is removed at the end
	left        bool   // volumes or other things of this run remain
}

// parsedJob is a parsed job with its source.
type parsedJob struct {
	job *host.Job
	src agent.Source
}

// plugins lists the plugins that the job runs.
func (p parsedJob) plugins() (ids []host.PluginID) {
	for _, g := range p.job.Groups {
		for _, t := range g.Tasks {
			if len(t.Sealed) > 0 {
				ids = append(ids, t.Plugin)
			}
		}
	}
	return ids
}

// removeState removes a temporary state directory, unless something has to stay in it.
func (o *foreground) removeState() error {
	if o.temporary == "" || o.left {
		return nil
	}
	if err := mount.RemoveTree(o.temporary); err != nil {
		return fmt.Errorf("cannot remove %s: %w", o.temporary, err)
	}
	return nil
}

// run runs the agent during the work, and then stops all allocs.
func (o *foreground) run(ctx context.Context) error {
	if err := o.parse(ctx); err != nil {
		return err
	}
	atStart, err := o.host.Status(ctx)
	if err != nil {
		return err
	}
	o.lines.print("state in %s, control socket %s", o.layout.State, o.socket)
	life, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var serveErr error // set once served is closed
	served := make(chan struct{})
	wg.Go(func() {
		defer close(served)
		serveErr = o.serve(life)
	})
	wg.Go(func() { _ = o.agent.Notes(life, o.lines.note) })
	finish := o.followEvents(life, atStart.Index)

	var failed error
	if o.firstSignal.by == nil {
		failed = o.work(life, served)
	}
	stopped := o.shutDown(life)
	if err := finish(); err != nil {
		o.lines.print("event stream ended early: %v", err)
	}
	cancel()
	<-served
	return errors.Join(failed, stopped, serveErr)
}

// parse parses all files, and reports the errors of all together.
func (o *foreground) parse(ctx context.Context) error {
	var errs []error
	for _, f := range o.files {
		src := host.Source{Name: f.Name, Text: f.Text}
		if f.volume {
			spec, diags, err := o.host.ParseVolume(ctx, src, control.ParseOptions(f.Source))
			errs = append(errs, err)
			o.lines.warn(diags)
			o.volumes = append(o.volumes, spec)
			continue
		}
		job, diags, err := o.host.Parse(ctx, src, control.ParseOptions(f.Source))
		o.lines.warn(diags)
		if err == nil {
			var warnings []string
			warnings, err = o.agent.Check(job)
			for _, w := range warnings {
				o.lines.print("%s: %s", f.Name, w)
			}
			if p, is := errors.AsType[*agent.Problems](err); is {
				p.File = f.Name
			} else if err != nil {
				err = fmt.Errorf("%s: %w", f.Name, err)
			}
		}
		errs = append(errs, err)
		o.jobs = append(o.jobs, parsedJob{job, f.Source})
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return o.checkDuplicates()
}

// checkDuplicates returns an error if two files define the same job or volume, because the second would replace the
// first.
func (o *foreground) checkDuplicates() error {
	seen := map[string]string{}
	for _, p := range o.jobs {
		if first, has := seen[p.job.ID]; has {
			return usageError{fmt.Errorf("job %q is defined in both %s and %s", p.job.ID, first, p.src.Name)}
		}
		seen[p.job.ID] = p.src.Name
	}
	names := map[host.VolumeName]bool{}
	for _, v := range o.volumes {
		if names[v.VolumeName()] {
			return usageError{fmt.Errorf("volume %s is defined in two files", v.VolumeName())}
		}
		names[v.VolumeName()] = true
	}
	return nil
}

// work submits all jobs and volumes, and waits for the last batch job, a signal, or the end of the servers.
func (o *foreground) work(life context.Context, served <-chan struct{}) error {
	ctx, cancel := context.WithCancelCause(life)
	defer cancel(nil)
	done := make(chan error, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { done <- o.runJobs(ctx) })
	select {
	case err := <-done:
		return err
	case s := <-o.signals:
		o.interrupt(s)
		cancel(errSignal)
		<-done
		return o.failures(life)
	case <-served: // its error is not one of the work
		return nil
	}
}

// interrupt records the first signal.
func (o *foreground) interrupt(s os.Signal) {
	o.firstSignal = interrupted{by: s}
	o.lines.print("%v: stopping all tasks; a second SIGINT or SIGTERM kills them", s)
}

var errSignal = errors.New("interrupted by a signal")

// runJobs starts plugins, then volumes, then users, and waits for batch jobs. It ends when a plugin has failed for
// good.
func (o *foreground) runJobs(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	if err := o.removeJobs(ctx, o.jobs); err != nil {
		return err
	}
	if err := o.submit(ctx, func(p parsedJob) bool { return len(p.plugins()) > 0 }); err != nil {
		return err
	}
	wg.Go(func() {
		if o.agent.Await(ctx, o.pluginFailed) == nil {
			cancel(o.failures(ctx))
		}
	})
	if err := o.createVolumesThenSubmitUsers(ctx); err != nil {
		return err
	}
	endsItself := o.usersAreBatch()
	err := o.agent.Await(ctx, func(all []*agent.AllocRecord) bool {
		return endsItself && usersEnded(o.ownJobs(), all)
	})
	if err != nil {
		return err
	}
	return o.failures(ctx)
}

// createVolumesThenSubmitUsers creates the volumes, and then submits the jobs that run no plugin.
func (o *foreground) createVolumesThenSubmitUsers(ctx context.Context) error {
	for _, spec := range o.volumes {
		runs := func(p parsedJob) bool { return slices.Contains(p.plugins(), spec.Plugin) }
		if !slices.ContainsFunc(o.jobs, runs) {
			o.lines.print("volume %s: no file runs its plugin %q; to add one: holdfast --address %s job run FILE",
				spec.VolumeName(), spec.Plugin, display.Quote(o.socket))
		}
		if err := o.createVolume(ctx, spec); err != nil {
			return err
		}
	}
	return o.submit(ctx, func(p parsedJob) bool { return len(p.plugins()) == 0 })
}

func (o *foreground) submit(ctx context.Context, wanted func(parsedJob) bool) error {
	for _, p := range o.jobs {
		if !wanted(p) {
			continue
		}
		if _, err := o.agent.Submit(ctx, p.job, p.src, o.host, agent.SubmitOptions{}); err != nil {
			return fmt.Errorf("%s: %w", p.src.Name, err)
		}
	}
	return nil
}

// shutDown stops all allocs in order. After a second signal or the time limit, it kills all tasks.
func (o *foreground) shutDown(life context.Context) error {
	ctx, cancel := context.WithTimeoutCause(life, o.flags.stopTimeout,
		fmt.Errorf("the shutdown took longer than %v", o.flags.stopTimeout))
	defer cancel()
	ctx, force := context.WithCancelCause(ctx)
	defer force(nil)
	done := make(chan error, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { done <- o.stopInOrder(ctx) })
	err := o.awaitStop(done, force)
	if len(o.uncertain) > 0 || err != nil {
		o.reportVolumes()
	}
	if err == nil {
		return nil
	}
	o.left = true
	o.lines.print("killing tasks without releasing their volumes")
	limited, stop := context.WithTimeout(life, 30*time.Second)
	defer stop()
	err = errors.Join(err, o.agent.KillAll(limited))
	o.lines.print("state kept; to release the remaining volumes, run again with --state-dir %s and the job files of "+
		"the plugins", display.Quote(o.layout.State))
	return err
}

// awaitStop waits until all allocs are stopped. A second SIGINT or SIGTERM calls force. A second SIGHUP does not,
// because shells repeat the SIGHUP of the kernel.
func (o *foreground) awaitStop(done <-chan error, force context.CancelCauseFunc) error {
	for {
		select {
		case err := <-done:
			return err
		case s := <-o.signals:
			switch {
			case o.firstSignal.by == nil:
				o.interrupt(s)
			case s != unix.SIGHUP:
				force(errForced)
			}
		}
	}
}

func (o *foreground) stopInOrder(ctx context.Context) error {
	if err := o.agent.StopUsers(ctx); err != nil {
		return err
	}
	var errs []error
	if o.flags.deleteVolumes {
		errs = append(errs, o.deleteVolumes(ctx))
	} else {
		errs = append(errs, o.recheckUncertain(ctx))
	}
	if err := o.agent.StopAll(ctx); err != nil {
		return errors.Join(append(errs, err)...)
	}
	return errors.Join(append(errs, o.removeJobs(ctx, nil))...)
}

// removeJobs stops and deletes all jobs except those in keep. An earlier run may have left other jobs.
func (o *foreground) removeJobs(ctx context.Context, keep []parsedJob) error {
	var errs []error
	for _, j := range o.agent.Jobs() {
		if !slices.ContainsFunc(keep, func(p parsedJob) bool { return p.job.ID == j.Job.ID }) {
			errs = append(errs, o.agent.StopJob(ctx, j.Job.ID, o.host, agent.StopOptions{Purge: true, Force: true}))
		}
	}
	return errors.Join(errs...)
}
