package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/spf13/cobra"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent"
)

// agentOptions are the flags of the agent.
type agentOptions struct {
	agentFlags
	config, recovery string
	stopTasks        bool
	stopTimeout      time.Duration
}

func newAgent(p *program) *cobra.Command {
	o := &agentOptions{}
	c := &cobra.Command{
		Use: "agent", Short: "Run the agent",
		Long: `Run the agent. SIGTERM, SIGINT and SIGHUP end it and leave its tasks running;
the next agent of this state directory adopts them. With --stop-tasks the agent
stops all tasks before it ends, users of volumes before plugins.

The agent refuses to start if tasks are running whose records are lost
(agent.db, or shim.db for tasks that use volumes). --recover=adopt rebuilds the
records and adopts the tasks. --recover=stop stops them and deletes their jobs.
Mounts of lost records stay until holdfast doctor --repair removes them.

The configuration file of --config has most flags as keys, with underscores:
log_level = "debug". Flags and variables of the environment have precedence.
A cluster block makes the node share volumes with other nodes, through etcd.

A systemd unit needs KillMode=process, or systemd kills the tasks with the
agent. With Type=notify, the agent tells systemd when it listens.`,
		RunE: func(c *cobra.Command, _ []string) error { return o.run(c, p) },
	}
	o.agentFlags.flags(c)
	c.Flags().StringVar(&o.config, "config", "", "configuration file; packages install "+defaultConfig)
	c.Flags().StringVar(&o.recovery, "recover", "",
		"handling of running tasks whose records are lost: adopt or stop (default: refuse to start)")
	c.Flags().BoolVar(&o.stopTasks, "stop-tasks", false, "stop all tasks when the agent ends")
	c.Flags().DurationVar(&o.stopTimeout, "stop-timeout", 2*time.Minute, "time limit for --stop-tasks")
	return c
}

// run runs the agent until a signal ends it.
func (o *agentOptions) run(c *cobra.Command, p *program) (err error) {
	signals, stop := endSignals()
	defer stop()
	systemd := newNotifier()
	var places flagPlaces
	if o.config != "" {
		o.cluster, places, err = readConfig(c, o.config)
		if err = errors.Join(err, p.checkLevel(), checkFlags(c.Flags())); err != nil {
			return places.locate(err)
		}
	}
	if o.recover, err = agent.ParseRecovery(o.recovery); err != nil {
		return usageError{fmt.Errorf("--recover %w", err)}
	}
	ctx, done := cancelOnSignal(c.Context(), signals)
	defer done()
	state, log := p.stateDir(), p.logger("info")
	o.traces = p.traces.Provider()
	st, err := openService(ctx, hooks.Layout{State: state, Run: p.makeRunDir(state)}, &o.agentFlags, log)
	if _, ended := errors.AsType[interrupted](err); ended && !o.stopTasks {
		return nil // as at a signal after the opening
	}
	if err != nil {
		return places.locate(err)
	}
	fmt.Fprintf(p.out, "agent %s on node %s is listening on %s\n", host.Version, st.agent.Node().Name, st.socket)
	unregister := context.AfterFunc(ctx, func() { _ = systemd.send("STOPPING=1") })
	defer unregister()
	notifyErr := systemd.send("READY=1")
	serveErr := serveUntil(ctx, c.Context(), st, o.stopTasks, o.stopTimeout, log)
	if err := errors.Join(notifyErr, serveErr, st.close()); err != nil {
		return err
	}
	if o.stopTasks {
		return removeSelfMounts(st.layout)
	}
	return nil
}

// serveUntil serves until ctx ends. With stopTasks, it then stops all tasks before it returns. root outlives ctx and is
// the context of that stop.
func serveUntil(
	ctx, root context.Context, st *service, stopTasks bool, timeout time.Duration, log hclog.Logger,
) error {
	life, cancel := context.WithCancel(root)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	served := make(chan error, 1)
	wg.Go(func() { served <- st.serve(life) })
	wg.Go(func() {
		_ = st.agent.Notes(life, func(n agent.Note) error {
			if n.Failed {
				log.Error(noteLine(n))
			} else {
				log.Info(noteLine(n))
			}
			return nil
		})
	})
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	log.Info(stopMessage(context.Cause(ctx), st.agent.Allocs(), stopTasks))
	var err error
	if stopTasks {
		limited, done := context.WithTimeout(life, timeout)
		defer done()
		err = st.agent.StopAll(limited)
	}
	cancel()
	return errors.Join(err, <-served)
}

// stopMessage returns the line that is logged when the agent ends.
func stopMessage(why error, all []*agent.AllocRecord, stopTasks bool) string {
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
