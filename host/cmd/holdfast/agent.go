package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"holdfast/host"
	"holdfast/host/agent"
)

func newAgent(io streams, p *places) *cobra.Command {
	e := &equipment{}
	stopTasks := false
	timeout, recovery := 2*time.Minute, ""
	c := &cobra.Command{
		Use: "agent", Short: "Run jobs for good; the other commands speak to it",
		Long: "Run jobs for good. SIGTERM, SIGINT or SIGHUP (unless nohup ignores it) ends the agent and leaves all tasks running, for the next agent of this state directory to adopt; " +
			"with --stop-tasks it takes them down first, users of volumes before plugins, and the next agent starts them anew. " +
			"Without it the state directory keeps its own mounts, so that it cannot be removed.\n\n" +
			"An agent refuses to start if its agent.db was lost, damaged or replaced by an older one while tasks run. " +
			"With --recover it makes the records again from what lies beside them in the state directory: --recover=adopt goes on with these tasks, " +
			"--recover=stop stops them, users of volumes before plugins, and forgets their jobs. " +
			"It also refuses to start if shim.db is lost while tasks use volumes. " +
			"With --recover it goes on with these tasks or stops them; their mounts stay until holdfast doctor --repair takes them down.\n\n" +
			"Under systemd the unit needs KillMode=process, or systemd ends the tasks with the agent.",
		Args: counted(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			signals, stop := endSignals()
			defer stop()
			var err error
			if e.recover, err = agent.ParseRecovery(recovery); err != nil {
				return usageError{fmt.Errorf("--recover %w", err)}
			}
			ctx, done := untilSignal(c.Context(), signals)
			defer done()
			state := p.stateDir()
			st, err := openStation(ctx, state, p.runDir(state), e, p.logger(io, "info"))
			if err != nil {
				return err
			}
			fmt.Fprintf(io.out, "agent %s on node %s is listening on %s\n", host.Version, st.agent.Node().Name, st.socket)
			err = errors.Join(serveUntil(ctx, c.Context(), st, stopTasks, timeout, p.logger(io, "info")), st.close())
			if err == nil && stopTasks {
				err = fold(st.layout)
			}
			return err
		},
	}
	e.flags(c)
	c.Flags().StringVar(&recovery, "recover", "",
		"what to do with tasks that agent.db does not know, or whose volumes shim.db does not: adopt or stop (default: refuse to start)")
	c.Flags().BoolVar(&stopTasks, "stop-tasks", false, "take everything down at the end")
	c.Flags().DurationVar(&timeout, "stop-timeout", timeout, "how long that may take")
	return c
}

// serveUntil serves until ctx ends; then, if it is to, it takes everything down first.
func serveUntil(ctx, whole context.Context, st *station, stopTasks bool, timeout time.Duration, log hostLogger) error {
	life, cancel := context.WithCancel(whole)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	served := make(chan error, 1)
	wg.Go(func() { served <- st.serve(life) })
	wg.Go(func() {
		_ = st.agent.Notes(life, func(n agent.Note) error {
			log.Info(noteLine(n))
			return nil
		})
	})
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	log.Info(farewell(context.Cause(ctx), st.agent.Allocs(), stopTasks))
	var err error
	if stopTasks {
		limited, done := context.WithTimeout(life, timeout)
		defer done()
		err = st.agent.TakeDown(limited)
	}
	cancel()
	return errors.Join(err, <-served)
}

// farewell says why the agent ends, and what becomes of its tasks.
func farewell(why error, all []*agent.AllocRecord, stopTasks bool) string {
	tasks := 0
	for _, r := range all {
		for _, t := range r.Tasks {
			if t.State == agent.TaskRunning {
				tasks++
			}
		}
	}
	if stopTasks {
		return fmt.Sprintf("%v: stopping %d running tasks", why, tasks)
	}
	return fmt.Sprintf("%v: %d tasks keep running; the next agent adopts them", why, tasks)
}
