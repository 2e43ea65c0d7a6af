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

// callPlugin calls do within the time limit of the request. It gives up early if the plugin is gone for good. Work that
// has started continues, and a repeated request resumes it. node is the node on which a new volume is to be stored.
func callPlugin[T any](
	s *Server, r *http.Request, name host.VolumeName, plugin host.PluginID, node host.NodeName,
	do func(context.Context) (T, error),
) (T, error) {
	describeWait(r.Context(), func(ctx context.Context) string { return s.describeVolume(ctx, name, plugin) })
	ctx, cancel := context.WithCancelCause(r.Context())
	var watching sync.WaitGroup
	watching.Go(func() { cancel(s.awaitGone(ctx, name, plugin, node)) })
	out, wait, late, err := limited(ctx, r, do)
	cancel(nil)
	watching.Wait()
	reason, gone := "", context.Cause(ctx)
	switch {
	case late:
		reason = fmt.Sprintf("waited %v: %s", wait, s.unanswered(r.Context(), name, plugin))
	case err != nil && errors.Is(gone, registry.ErrUnavailable):
		reason = gone.Error()
	case errors.Is(err, registry.ErrUnavailable):
		if p := s.pluginOf(r.Context(), name, plugin); p != nil && p.failures() != "" {
			err = registry.Errorf(registry.ErrUnavailable, "%w; %s", err, p.failures())
		}
		return out, err
	default:
		return out, s.withEngines(name, err)
	}
	then := s.continues(r.Context(), name)
	if late {
		then = cmp.Or(then, "run the command again to resume")
	}
	if then != "" {
		reason += "; " + then
	}
	return out, registry.Errorf(registry.ErrUnavailable, "%s", reason)
}

// callWithin calls do within the time limit of the request. Work that has started continues after that.
func callWithin[T any](
	s *Server, r *http.Request, what string, do func(context.Context) (T, error),
) (T, error) {
	describeWait(r.Context(), func(context.Context) string { return noAnswer + "about " + what + " yet" })
	out, wait, late, err := limited(r.Context(), r, do)
	if late {
		then := "run the command again to resume"
		if problem := s.clusterProblem(r.Context()); problem != "" {
			then = problem + "; " + then
		}
		err = registry.Errorf(registry.ErrUnavailable, "waited %v for %s: %w; %s", wait, what, err, then)
	}
	return out, err
}

// askPlugin is callWithin for a plugin that a job runs on this or another node.
func askPlugin[T any](s *Server, r *http.Request, id host.PluginID, ask func(context.Context) (T, error)) (T, error) {
	return callWithin(s, r, "plugin "+string(id), func(ctx context.Context) (out T, err error) {
		if _, err = s.knownPlugin(ctx, id); err == nil || s.controlledElsewhere(ctx, host.VolumeName{}, id, "") {
			out, err = ask(ctx)
		}
		return out, err
	})
}

// continues returns a text that says that the volume's creation or deletion continues in the background. It is empty if
// none does.
func (s *Server) continues(ctx context.Context, name host.VolumeName) string {
	v := s.explainer().volume(ctx, name)
	switch {
	case v == nil:
		return ""
	case v.State == registry.VolumeDeleting:
		return fmt.Sprintf("the deletion continues in the background; see %s", VolumeCommand("status", name))
	case v.State == registry.VolumeCreating || v.Intent != nil && v.Intent.RPC == registry.CreateVolumeRPC:
		return fmt.Sprintf("the creation continues in the background; see %s; "+
			"to cancel it, and delete what was created: %s; "+
			"to remove only the record: %s", VolumeCommand("status", name), VolumeCommand("delete", name),
			VolumeCommand("deregister", name))
	}
	return ""
}

// pluginOf returns the plugin, or the plugin of the volume if plugin is empty. It returns nil if neither is known.
func (s *Server) pluginOf(ctx context.Context, name host.VolumeName, plugin host.PluginID) *Plugin {
	e := s.explainer()
	if v := e.volume(ctx, name); plugin == "" && v != nil {
		plugin = v.Plugin
	}
	if plugin == "" {
		return nil
	}
	p, err := s.plugin(ctx, plugin)
	if err != nil {
		return nil
	}
	return p
}

// goneInterval is the interval at which awaitGone checks whether the plugin may still start.
const goneInterval = 500 * time.Millisecond

// awaitGone returns ErrUnavailable once no node runs the plugin's controller and all its jobs on this node have ended.
// It returns nil when ctx ends.
func (s *Server) awaitGone(
	ctx context.Context, name host.VolumeName, plugin host.PluginID, node host.NodeName,
) error {
	tick := time.NewTicker(goneInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		p := s.pluginOf(ctx, name, plugin)
		if p == nil || !p.gone() || s.controlledElsewhere(ctx, name, host.PluginID(p.ID), node) {
			continue
		}
		text, start := fmt.Sprintf("plugin %q is not running: %s", p.ID, p.describeJobs()), Notice{}
		start.startCommands(p)
		for _, c := range start.Commands {
			text += fmt.Sprintf("; to %s: %s", c.Purpose, c.Line)
		}
		return registry.Errorf(registry.ErrUnavailable, "%s", text)
	}
}

// controlledElsewhere reports whether another living node of the cluster runs a controller that can make calls for the
// volume. For a new volume, node is the node on which it is to be stored.
func (s *Server) controlledElsewhere(
	ctx context.Context, name host.VolumeName, id host.PluginID, node host.NodeName,
) bool {
	if v := s.explainer().volume(ctx, name); v != nil {
		node = v.Node
	}
	nodes, _, err := s.host.Nodes(ctx, host.NodeQuery{})
	return err == nil && slices.ContainsFunc(nodes, func(n host.NodeStatus) bool {
		return n.Alive && string(n.Name) != s.agent.Node().Name &&
			slices.ContainsFunc(n.Plugins, func(p registry.NodePluginStatus) bool {
				return p.Plugin == id && p.Health(host.RoleController) != "" && (!p.Local || n.Name == node)
			})
	})
}

// limited calls do within the time limit of the request, if it has one. late reports that the limit was reached.
func limited[T any](
	ctx context.Context, r *http.Request, do func(context.Context) (T, error),
) (out T, wait time.Duration, late bool, err error) {
	if wait, err = waitOf(r); err != nil {
		return out, 0, false, err
	}
	if wait == 0 {
		out, err = do(ctx)
		return out, 0, false, err
	}
	until := time.Now().Add(wait)
	limit, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	out, err = do(limit)
	return out, wait, err != nil && time.Until(until) <= skew && ctx.Err() == nil, err
}

// waitOf returns the time limit of the request; 0: none.
func waitOf(r *http.Request) (time.Duration, error) {
	wait, err := time.ParseDuration(cmp.Or(r.URL.Query().Get("wait"), "0s"))
	if err != nil || wait < 0 {
		return 0, registry.Invalid("wait: %q is not a duration", r.URL.Query().Get("wait"))
	}
	return wait, nil
}

// unanswered describes the call without an answer and, if known, why etcd or the plugin does not answer.
func (s *Server) unanswered(ctx context.Context, name host.VolumeName, plugin host.PluginID) string {
	return withProblem(s.describeCall(ctx, name, plugin), s.clusterProblem(ctx))
}

func (s *Server) describeCall(ctx context.Context, name host.VolumeName, plugin host.PluginID) string {
	e := s.explainer()
	if v := e.volume(ctx, name); v != nil {
		plugin = v.Plugin
		for _, w := range v.Waiting {
			if w.Alloc == "" && w.Code != "" {
				return w.String()
			}
		}
	}
	if plugin == "" {
		return noAnswer + "from the plugin (see holdfast plugin status)"
	}
	if text := s.describeExecutor(ctx, e.volume(ctx, name), plugin); text != "" {
		return text
	}
	p := e.plugin(ctx, plugin)
	if !p.running() {
		return fmt.Sprintf("plugin %q is not running (see holdfast plugin status): %s", plugin, p.describeJobs())
	}
	text := fmt.Sprintf(noAnswer+"from plugin %q (see %s)", plugin, pluginCommand(plugin))
	return strings.Join(append([]string{text}, p.describe(false)...), "; ")
}

// describeExecutor names the other node for which a controller call of the plugin waits. v is the call's volume, or
// nil. The text is empty if this node makes the call, or if there is no cluster.
func (s *Server) describeExecutor(ctx context.Context, v *host.VolumeStatus, plugin host.PluginID) string {
	nodes, _, err := s.host.Nodes(ctx, host.NodeQuery{})
	if err != nil {
		return ""
	}
	return executorText(nodes, host.NodeName(s.self.Node.Name), v, plugin)
}

func executorText(nodes []host.NodeStatus, self host.NodeName, v *host.VolumeStatus, plugin host.PluginID) string {
	local := false
	for _, n := range nodes {
		for _, p := range n.Plugins {
			if p.Plugin != plugin {
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
				return text + ", is suspect: etcd does not hear of it"
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
