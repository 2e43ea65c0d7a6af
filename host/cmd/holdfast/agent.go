package main

import (
	"context"
	"errors"
	"fmt"
	"os/signal"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/host/agent"
)

func newAgent(io streams, p *places) *cobra.Command {
	e := &equipment{}
	stopTasks := false
	timeout := 2 * time.Minute
	c := &cobra.Command{
		Use: "agent", Short: "Run jobs for good; the other commands speak to it",
		Long: "Run jobs for good. SIGTERM or SIGINT ends the agent and leaves all tasks running, for the next agent of this state directory to adopt; " +
			"with --stop-tasks it takes them down first, users of volumes before plugins, and the next agent starts them anew. " +
			"Without it the state directory keeps its own mounts, so that it cannot be removed.\n\n" +
			"Under systemd the unit needs KillMode=process, or systemd ends the tasks with the agent.",
		Args: counted(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(c.Context(), unix.SIGINT, unix.SIGTERM)
			defer stop()
			state := p.stateDir()
			st, err := openStation(ctx, state, p.runDir(state), e, p.logger(io, "info"))
			if err != nil {
				return err
			}
			fmt.Fprintf(io.out, "agent %s of node %s listens at %s\n", host.Version, st.agent.Node().Name, st.socket)
			err = errors.Join(serveUntil(ctx, c.Context(), st, stopTasks, timeout, p.logger(io, "info")), st.close())
			if err == nil && stopTasks {
				err = fold(st.layout)
			}
			return err
		},
	}
	e.flags(c)
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
	var err error
	if stopTasks {
		limited, done := context.WithTimeout(life, timeout)
		defer done()
		err = st.agent.TakeDown(limited)
	}
	cancel()
	return errors.Join(err, <-served)
}
