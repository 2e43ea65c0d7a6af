package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/host/agent/control"
	"holdfast/internal/display"
	"holdfast/registry"
)

func newPlugin(p *program) *cobra.Command {
	return group("plugin", "Manage CSI plugins",
		statusCommand(p, "List plugins, or show one with its instances and tasks", (*control.Client).Plugins,
			writePlugins, (*control.Client).Plugin, writePlugin),
		newPluginCapacity(p), newPluginRoll(p), newPluginUses(p), newPluginForget(p))
}

func newPluginRoll(p *program) *cobra.Command {
	o := agent.RollOptions{}
	c := &cobra.Command{
		Use: "roll ID", Short: "Replace the running instances of a plugin",
		Long: `Replace the running instances of a plugin with new ones of the same jobs. A new
instance starts beside the old one. Once it is healthy, it gets the new calls.
The old one finishes its calls, and is stopped. A new instance that does not
become healthy is stopped, and the old one continues.

An old instance whose process serves mounts (FUSE) is kept until these are
unmounted. The command names the users of the mounts, and ends. With --drain,
these users are stopped, and placed again with the same volumes.

A plugin with roll = "stop_first" is stopped before its new instance starts. If
several jobs run the plugin, all get new instances, or none. --force also stops
old instances that are kept: their calls are cut off and sent to the new
instance, and the mounts that they serve break.`,
		RunE: func(c *cobra.Command, args []string) error {
			hint := "the roll continues; see " + display.Command("holdfast plugin status", args[0])
			ctx, client, stop := p.interruptible(c, 0)
			defer stop()
			plugin, err := client.RollPlugin(ctx, args[0], o)
			if err == nil {
				plugin, err = p.awaitRoll(ctx, client, plugin, o.Drain)
			}
			if err != nil {
				return withHint(err, hint)
			}
			if p.json {
				err = writeJSON(p.out, plugin.Rolls)
			}
			for _, r := range plugin.Rolls {
				if r.State == agent.RollFailed {
					return errors.Join(err, errReported)
				}
			}
			return err
		},
	}
	c.Flags().BoolVar(&o.Drain, "drain", false, "restart the allocs that use mounts of old instances")
	c.Flags().BoolVar(&o.Force, "force", false, "stop an old instance even if it has calls or serves mounts")
	return c
}

// awaitRoll waits until the rolls of a plugin are done or have failed. Without drain, it also returns once they wait
// only for users of mounts. It prints each change.
func (p *program) awaitRoll(
	ctx context.Context, client *control.Client, plugin control.Plugin, drain bool,
) (control.Plugin, error) {
	printed := map[string]string{}
	for {
		for _, r := range plugin.Rolls {
			if text := r.String(); printed[r.Job] != text && !p.json {
				printed[r.Job] = text
				fmt.Fprintln(p.out, text)
			}
		}
		switch {
		case !plugin.Rolling():
			return plugin, nil
		case plugin.Held() && !drain:
			p.remark("the old instance ends when the volumes that it serves are released; " +
				"to restart their users: " + display.Command("holdfast plugin roll --drain", plugin.ID))
			return plugin, nil
		}
		var err error
		plugin, err = acrossRestarts(ctx, client,
			func() (control.Plugin, error) { return client.AwaitRoll(ctx, plugin) })
		if err != nil {
			return plugin, err
		}
	}
}

func newPluginCapacity(p *program) *cobra.Command {
	var parameters, topology []string
	wait := time.Duration(0)
	c := &cobra.Command{
		Use: "capacity ID", Short: "Show how much space a plugin has for new volumes",
		RunE: func(c *cobra.Command, args []string) error {
			q := host.CapacityQuery{Plugin: host.PluginID(args[0])}
			var err error
			if q.Parameters, err = assignments("--parameter", parameters); err != nil {
				return err
			}
			if q.Topology, err = assignments("--topology", topology); err != nil {
				return err
			}
			client := p.client()
			client.Wait = wait
			capacity, err := client.PluginCapacity(c.Context(), q)
			return show(p, err, capacity, writeCapacity)
		},
	}
	waitFlag(c, &wait)
	c.Flags().StringArrayVar(&parameters, "parameter", nil,
		"only for volumes with this parameter, as key=value; may be repeated")
	c.Flags().StringArrayVar(&topology, "topology", nil,
		"only for volumes that are accessible from this segment, as key=value; may be repeated")
	return c
}

func writeCapacity(to io.Writer, c host.PluginCapacity) error {
	limit := func(bytes *int64) string {
		if bytes == nil {
			return "unknown"
		}
		return display.Bytes(*bytes)
	}
	return writeFacts(to, "Available", limit(&c.Available), "Largest volume", limit(c.Maximum), "Smallest volume",
		limit(c.Minimum))
}

// health formats a role as healthy/expected.
func health(p control.Plugin, role registry.Role) string {
	for _, r := range p.Roles {
		if r.Role == role {
			return fmt.Sprintf("%d/%d", r.Healthy, r.Expected)
		}
	}
	return ""
}

func writePlugins(to io.Writer, list []control.Plugin) error {
	t := newTable("ID", "PROVIDER", "VERSION", "CONTROLLERS", "NODES")
	for _, p := range list {
		t.add(p.ID, p.Provider, p.Version, health(p, registry.RoleController),
			health(p, registry.RoleNode))
	}
	return t.write(to, "no plugins")
}

func writePlugin(to io.Writer, p control.Plugin) error {
	var about factList
	about.add("ID", p.ID, "Provider", p.Provider, "Version", p.Version)
	for _, r := range p.Rolls {
		about.add("Roll", r)
	}
	for _, i := range p.Instances {
		if c := i.Storage; i.Active && c.Abnormal {
			about.add("Storage", fmt.Sprintf("unhealthy since %s: %s", when(c.Since), c.Text()))
		}
	}
	for _, t := range p.Tasks {
		if t.Problem != "" {
			about.add("Not healthy yet", fmt.Sprintf("task %s of alloc %s: %s", t.Task, short(t.Alloc), t.Problem))
		}
	}
	err := columns(to, about)
	roles := newTable("ROLE", "HEALTHY", "EXPECTED", "REASON")
	for _, r := range p.Roles {
		roles.add(r.Role, r.Healthy, r.Expected, r.Reason)
	}
	instances := newTable("ROLE", "ALLOC", "TASK", "ATTEMPT", "ACTIVE", "HEALTH", "CAUSE", "SINCE", "NODE ID",
		"MAX VOLUMES")
	for _, i := range p.Instances {
		f := i.Fingerprint
		instances.add(i.Role, short(i.Alloc), i.Task, i.Attempt, yesNo(i.Active), i.Health.State,
			control.WithDetail(i.Health.Cause, i.Health.Detail), age(i.Health.Since), f.NodeID, number(f.MaxVolumes))
	}
	tasks := newTable("ALLOC", "TASK", "JOB", "TYPE", "PHASE", "ATTEMPT", "CALLS", "SERVES", "RESTART REQUESTED")
	for _, t := range p.Tasks {
		request := ""
		if t.Restart != nil {
			request = fmt.Sprintf("of attempt %d: %s", t.Restart.Attempt,
				control.WithDetail(t.Restart.Cause, t.Restart.Detail))
		}
		var serves []string
		for _, v := range t.Volumes {
			serves = append(serves, v.String())
		}
		tasks.add(short(t.Alloc), t.Task, t.Job, t.Type, t.Phase, t.Attempt, t.Calls, strings.Join(serves, " "),
			request)
	}
	for _, part := range []struct {
		t    *table
		none string
	}{{roles, "no roles"}, {instances, "no instances"}, {tasks, "no tasks"}} {
		fmt.Fprintln(to)
		err = errors.Join(err, part.t.write(to, part.none))
	}
	return errors.Join(err, writeCapabilities(to, p))
}

// writeCapabilities lists the capabilities and the topology of all instances.
func writeCapabilities(to io.Writer, p control.Plugin) error {
	able, topology := map[string]bool{}, map[string]bool{}
	for _, i := range p.Instances {
		for _, c := range i.Fingerprint.Capabilities {
			able[string(c)] = true
		}
		for k, v := range i.Fingerprint.Topology {
			topology[k+"="+v] = true
		}
	}
	for _, part := range []struct {
		head string
		set  map[string]bool
	}{{"Capabilities", able}, {"Topology", topology}} {
		if len(part.set) == 0 {
			continue
		}
		fmt.Fprintf(to, "\n%s\n", part.head)
		for _, name := range slices.Sorted(maps.Keys(part.set)) {
			if _, err := fmt.Fprintln(to, "  "+clean(name)); err != nil {
				return err
			}
		}
	}
	return nil
}
