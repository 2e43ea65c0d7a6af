package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"holdfast/host"
	"holdfast/internal/display"
	"holdfast/registry"
)

// skew is the tolerance when a deadline of the request is checked, because the shim's timer may fire earlier than the
// agent's.
const skew = 100 * time.Millisecond

// target is what a call is about: a volume or, if that has no record yet, its plugin and the node that is to store it.
type target struct {
	volume host.VolumeName
	plugin host.PluginID // empty: that of the volume
	node   host.NodeName // of a new volume; empty: any
	// removal means that the call deletes or deregisters the volume.
	removal bool
}

// callPlugin calls do within the time limit of the request. It gives up early if the plugin is gone for good. Work that
// has started continues, and a repeated request resumes it. It adds to an error what is known
// of the plugin and the volume.
func callPlugin[T any](s *Server, r *http.Request, t target, do func(context.Context) (T, error)) (T, error) {
	setWaitDescription(r.Context(), func(ctx context.Context) string { return s.describeWait(ctx, t) })
	ctx, cancel := context.WithCancelCause(r.Context())
	var watching sync.WaitGroup
	watching.Go(func() { cancel(s.awaitGone(ctx, t)) })
	out, expired, err := callWithLimit(ctx, r, do)
	cancel(nil)
	watching.Wait()
	switch cause := context.Cause(ctx); {
	case expired > 0:
		err = registry.Errorf(registry.ErrUnavailable, "waited %v: %s; %s", expired, s.describeCall(r.Context(), t),
			cmp.Or(s.describeBackground(r.Context(), t), resumeAdvice))
	case err != nil && errors.Is(cause, registry.ErrUnavailable): // awaitGone has found that the plugin is gone
		err = cause
		if background := s.describeBackground(r.Context(), t); background != "" {
			err = registry.Errorf(registry.ErrUnavailable, "%w; %s", cause, background)
		}
	case errors.Is(err, registry.ErrUnavailable):
		if p := s.pluginOf(r.Context(), t); p != nil && p.failures() != "" {
			err = registry.Errorf(registry.ErrUnavailable, "%w; %s", err, p.failures())
		}
	}
	return out, s.withEngines(t.volume, err)
}

const resumeAdvice = "run the command again to resume"

// callWithin calls do within the time limit of the request. Work that has started continues after the limit. subject is
// what the call is about, as in "plugin p".
func callWithin[T any](
	s *Server, r *http.Request, subject string, do func(context.Context) (T, error),
) (T, error) {
	setWaitDescription(r.Context(), func(context.Context) string { return noAnswer + "about " + subject + " yet" })
	out, expired, err := callWithLimit(r.Context(), r, do)
	if expired > 0 {
		advice := resumeAdvice
		if problem := s.clusterProblem(r.Context()); problem != "" {
			advice = problem + "; " + advice
		}
		err = registry.Errorf(registry.ErrUnavailable, "waited %v for %s: %w; %s", expired, subject, err, advice)
	}
	return out, err
}

// askPlugin is callWithin for a question to a plugin. It fails if neither this node nor another one runs the plugin.
func askPlugin[T any](s *Server, r *http.Request, id host.PluginID, ask func(context.Context) (T, error)) (T, error) {
	return callWithin(s, r, "plugin "+string(id), func(ctx context.Context) (out T, err error) {
		if _, err = s.knownPlugin(ctx, id); err == nil || s.controlledElsewhere(ctx, target{plugin: id}) {
			out, err = ask(ctx)
		}
		return out, err
	})
}

// describeBackground says that the creation or deletion of a volume continues in the background. It is empty if neither
// does.
func (s *Server) describeBackground(ctx context.Context, t target) string {
	v, err := s.volume(ctx, t.volume)
	if err != nil {
		return ""
	}
	name := t.volume
	creating := v.State == registry.VolumeCreating || v.Intent != nil && v.Intent.RPC == registry.CreateVolumeRPC
	switch {
	case v.State == registry.VolumeDeleting:
		return fmt.Sprintf("the deletion continues in the background; see %s", VolumeCommand("status", name))
	case creating && t.removal:
		return "the creation continues in the background, and nothing was cancelled or deleted; " +
			"run the command again when the plugin answers"
	case creating:
		return fmt.Sprintf("the creation continues in the background; see %s; "+
			"to delete what it creates, once the plugin answers: %s; "+
			"to remove only the record: %s", VolumeCommand("status", name), VolumeCommand("delete", name),
			VolumeCommand("deregister", name))
	}
	return ""
}

// pluginOf returns the plugin of a target. It returns nil if the plugin is not known.
func (s *Server) pluginOf(ctx context.Context, t target) *Plugin {
	if t.plugin == "" {
		v, err := s.volume(ctx, t.volume)
		if err != nil {
			return nil
		}
		t.plugin = v.Plugin
	}
	p, err := s.plugin(ctx, t.plugin)
	if err != nil {
		return nil
	}
	return p
}

// goneInterval is the interval at which awaitGone checks whether the plugin may still start.
const goneInterval = 500 * time.Millisecond

// awaitGone returns ErrUnavailable once no node runs the plugin's controller and all its jobs on this node have ended.
// It returns nil when ctx ends.
func (s *Server) awaitGone(ctx context.Context, t target) error {
	tick := time.NewTicker(goneInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		p := s.pluginOf(ctx, t)
		if p == nil || !p.gone() {
			continue
		}
		if t.plugin = host.PluginID(p.ID); s.controlledElsewhere(ctx, t) {
			continue
		}
		text := fmt.Sprintf("plugin %q is not running: %s", p.ID, p.describeJobs())
		var advice Notice
		advice.addStartCommands(p)
		for _, c := range advice.Commands {
			text += fmt.Sprintf("; to %s: %s", c.Purpose, c.Line)
		}
		return registry.Errorf(registry.ErrUnavailable, "%s", text)
	}
}

// controlledElsewhere reports whether another living node of the cluster runs a controller that can make the call. The
// target names its plugin.
func (s *Server) controlledElsewhere(ctx context.Context, t target) bool {
	if v, err := s.volume(ctx, t.volume); err == nil {
		t.node = v.Node
	}
	nodes, _, err := s.host.Nodes(ctx, host.NodeQuery{})
	return err == nil && slices.ContainsFunc(nodes, func(n host.NodeStatus) bool {
		return n.Alive && string(n.Name) != s.agent.Node().Name &&
			slices.ContainsFunc(n.Plugins, func(p registry.NodePluginStatus) bool {
				return p.Plugin == t.plugin && p.Health(host.RoleController) != "" && (!p.Local || n.Name == t.node)
			})
	})
}

// callWithLimit calls do within the time limit of the request, if it has one. expired is the limit if it was reached,
// else 0.
func callWithLimit[T any](
	ctx context.Context, r *http.Request, do func(context.Context) (T, error),
) (out T, expired time.Duration, err error) {
	limit, err := timeLimit(r)
	if err != nil {
		return out, 0, err
	}
	if limit == 0 {
		out, err = do(ctx)
		return out, 0, err
	}
	until := time.Now().Add(limit)
	bounded, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	out, err = do(bounded)
	if err != nil && time.Until(until) <= skew && ctx.Err() == nil {
		return out, limit, err
	}
	return out, 0, err
}

// timeLimit returns the time limit of the request; 0: none.
func timeLimit(r *http.Request) (time.Duration, error) {
	wait, err := time.ParseDuration(cmp.Or(query(r, "wait"), "0s"))
	if err != nil || wait < 0 {
		return 0, registry.Invalid("wait: %q is not a duration", query(r, "wait"))
	}
	return wait, nil
}

// describeWait says what the call waits for.
func (s *Server) describeWait(ctx context.Context, t target) string {
	if v, err := s.volume(ctx, t.volume); err == nil {
		if w, waits := v.CallWait(); waits {
			return w.String()
		}
	}
	return s.describeCall(ctx, t)
}

// describeCall says who does not answer the call and, if known, why.
func (s *Server) describeCall(ctx context.Context, t target) string {
	return withProblem(s.describePluginCall(ctx, t), s.clusterProblem(ctx))
}

// describePluginCall is describeCall without a problem of the cluster.
func (s *Server) describePluginCall(ctx context.Context, t target) string {
	v, _ := s.volume(ctx, t.volume) // nil after an error
	if v != nil {
		t.plugin = v.Plugin
		for _, w := range v.Waiting {
			if w.Alloc == "" && w.Code != "" {
				return w.String()
			}
		}
	}
	if t.plugin == "" {
		return noAnswer + "from the plugin (see holdfast plugin status)"
	}
	if text := s.describeExecutor(ctx, v, t.plugin); text != "" {
		return text
	}
	p, _ := s.plugin(ctx, t.plugin) // after an error, it has only its jobs
	if !p.running() {
		return fmt.Sprintf("plugin %q is not running (see holdfast plugin status): %s", t.plugin, p.describeJobs())
	}
	text := fmt.Sprintf(noAnswer+"from plugin %q (see %s)", t.plugin, pluginCommand(t.plugin))
	lines := []string{text}
	if !p.allHealthy() {
		lines = append(lines, p.describe()...)
	}
	if failures := p.failures(); failures != "" {
		lines = append(lines, failures)
	}
	return strings.Join(lines, "; ")
}

// describeExecutor says which other node makes a controller call of the plugin, and why it may not answer, or that no
// node makes the call. v is the call's volume, or nil. The text is empty if this node makes the call, or if there is no
// cluster.
func (s *Server) describeExecutor(ctx context.Context, v *host.VolumeStatus, plugin host.PluginID) string {
	nodes, _, err := s.host.Nodes(ctx, host.NodeQuery{})
	if err != nil {
		return ""
	}
	return executorText(nodes, host.NodeName(s.self.Node.Name), v, plugin)
}

// executorText is describeExecutor for a list of nodes. self is the name of this node.
func executorText(nodes []host.NodeStatus, self host.NodeName, v *host.VolumeStatus, plugin host.PluginID) string {
	local := false
	for _, n := range nodes {
		for _, p := range n.Plugins {
			if p.Plugin != plugin || !p.Registered() {
				continue
			}
			local = local || p.Local && n.Name == self
			if !p.Executor && (v == nil || v.Node != n.Name) {
				continue
			}
			text := fmt.Sprintf("node %s, which makes the controller calls of plugin %q (see %s)", n.Name, plugin,
				display.Command("holdfast node status", string(n.Name)))
			switch {
			case n.Name == self:
				return ""
			case !n.Alive && NodeState(n) == "suspect":
				return text + ", is suspect: etcd does not hear from it"
			case !n.Alive && v != nil && v.Node == n.Name:
				return fmt.Sprintf("%s, is %s, and only that node can change the volume; to remove its record: %s",
					text, NodeState(n), VolumeCommand("deregister", v.VolumeName()))
			case !n.Alive:
				return text + ", is " + NodeState(n)
			}
			return noAnswer + "from " + text
		}
	}
	if local || len(nodes) < 2 {
		return ""
	}
	return fmt.Sprintf("no node makes the controller calls of plugin %q: the call waits for a node with a healthy "+
		"controller of the plugin (see holdfast node list); if none runs it, run the plugin's job on a node: "+
		"holdfast job run FILE", plugin)
}
