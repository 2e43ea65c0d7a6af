package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"holdfast/host"
	"holdfast/host/agent/control"
	"holdfast/registry"
)

// completionTimeout bounds the wait for an agent while the shell completes a word.
const completionTimeout = 2 * time.Second

// lister returns the possible values of an argument. before are the arguments before that one. The namespace may be
// empty.
type lister func(ctx context.Context, c *control.Client, before []string, namespace string) ([]string, error)

// ids maps each parent command to the lister of its argument ID.
var ids = map[string]lister{
	"job":            idsOf((*control.Client).Jobs, func(j control.Job) string { return j.ID }),
	"alloc":          idsOf((*control.Client).Allocs, func(a control.Alloc) string { return a.ID }),
	"plugin":         pluginIDs,
	"node":           idsOf((*control.Client).Nodes, func(n host.NodeStatus) string { return string(n.Name) }),
	"volume":         volumeIDs,
	"snapshot":       snapshotIDs(control.Snapshots),
	"group-snapshot": snapshotIDs(control.GroupSnapshots),
}

var pluginIDs = idsOf((*control.Client).Plugins, func(p control.Plugin) string { return p.ID })

// prepareArguments sets up the arguments of c and of all commands below it. The words in a usage line say how many
// arguments are accepted, how the shell completes them, and how IDs that the agent does not know are resolved. A
// command whose only argument is ID... runs once for each ID.
func prepareArguments(c *cobra.Command, p *program) {
	for _, sub := range c.Commands() {
		prepareArguments(sub, p)
	}
	usage, _, _ := strings.Cut(c.Use, " --")
	words := strings.Fields(usage)[1:]
	if c.Args == nil {
		c.Args = argumentCount(words)
	}
	for _, flag := range []string{"plugin", "external"} {
		if c.Flags().Lookup(flag) != nil {
			_ = c.RegisterFlagCompletionFunc(flag, // it fails only for unknown flags
				func(c *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
					return complete(c, p, pluginIDs, args)
				})
		}
	}
	listers := listersOf(c, words)
	if listers == nil {
		return
	}
	several := strings.HasSuffix(words[len(words)-1], "...")
	c.ValidArgsFunction = func(c *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		at := len(args)
		if several {
			at = min(at, len(listers)-1)
		}
		if at >= len(listers) || listers[at] == nil {
			return nil, cobra.ShellCompDirectiveDefault
		}
		values, directive := complete(c, p, listers[at], args)
		typed := args[at:] // the arguments typed for ID...
		return slices.DeleteFunc(values, func(v string) bool { return slices.Contains(typed, v) }), directive
	}
	run := p.resolving(c.RunE, listers)
	c.RunE = run
	if len(words) == 1 && several {
		c.RunE = func(c *cobra.Command, args []string) error {
			return each(args, func(arg string) error { return run(c, []string{arg}) })
		}
	}
}

// argumentCount makes a command accept arguments for the words in its usage line: [ID] is optional, and ID... accepts
// several. No argument may be empty.
func argumentCount(words []string) cobra.PositionalArgs {
	least, most := 0, len(words)
	for _, word := range words {
		if !strings.HasPrefix(word, "[") {
			least++
		}
		if strings.HasSuffix(word, "...") {
			most = math.MaxInt
		}
	}
	return func(c *cobra.Command, args []string) error {
		problem := ""
		switch n := len(args); {
		case n < least:
			problem = "too few arguments"
		case n > most:
			problem = fmt.Sprintf("unexpected argument %q", args[most])
		case slices.Contains(args, ""):
			problem = "empty argument"
		default:
			return nil
		}
		return usageError{fmt.Errorf("%s; usage: %s", problem, c.UseLine())}
	}
}

// listersOf returns the listers for the words in the usage line of a command. A lister is nil if the ID is new.
func listersOf(c *cobra.Command, words []string) (listers []lister) {
	for _, word := range words {
		switch strings.Trim(word, "[].") {
		case "ID":
			list := ids[c.Parent().Name()]
			if c.Name() == "create" {
				list = nil
			}
			listers = append(listers, list)
		case "PLUGIN":
			listers = append(listers, pluginIDs)
		case "SNAPSHOT", "BASE":
			listers = append(listers, ids["snapshot"])
		case "TASK":
			list := taskNames
			if c.Parent().Name() == "job" {
				list = jobTaskNames
			}
			listers = append(listers, list)
		case "VOLUME":
			list := volumeIDs
			if c.Parent().Name() == "plugin" {
				list = endpointVolumes
			}
			listers = append(listers, list)
		case "ALLOC":
			listers = append(listers, claimants)
		case "EXTERNAL_ID":
			listers = append(listers, externalIDs)
		}
	}
	return listers
}

// complete returns the values of a lister for the shell. Without an agent there are none.
func complete(c *cobra.Command, p *program, list lister, args []string) ([]string, cobra.ShellCompDirective) {
	values, err := list.known(c, p, args)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return values, cobra.ShellCompDirectiveNoFileComp
}

// known returns the values of a lister, in the namespace of the command's flag.
func (list lister) known(c *cobra.Command, p *program, args []string) ([]string, error) {
	ctx, cancel := context.WithTimeout(c.Context(), completionTimeout)
	defer cancel()
	namespace := ""
	if f := c.Flags().Lookup("namespace"); f != nil {
		namespace = f.Value.String()
	}
	client := p.client()
	client.Waiting = nil
	return list(ctx, client, args, namespace)
}

// values returns the value of each item, and leaves out empty ones. It returns err unchanged.
func values[T any](items []T, err error, of func(T) string) (out []string, _ error) {
	for _, item := range items {
		if v := of(item); v != "" {
			out = append(out, v)
		}
	}
	return out, err
}

// idsOf returns a lister of objects without a namespace.
func idsOf[T any](list func(*control.Client, context.Context) ([]T, error), id func(T) string) lister {
	return func(ctx context.Context, c *control.Client, _ []string, _ string) ([]string, error) {
		all, err := list(c, ctx)
		return values(all, err, id)
	}
}

func taskNames(ctx context.Context, c *control.Client, before []string, _ string) ([]string, error) {
	a, err := c.Alloc(ctx, before[len(before)-1])
	return values(a.Tasks, err, func(t control.Task) string { return string(t.Name) })
}

func jobTaskNames(ctx context.Context, c *control.Client, before []string, _ string) ([]string, error) {
	j, err := c.Job(ctx, before[len(before)-1])
	names, err := values(newestTasks(j), err, func(t jobTask) string { return t.task })
	slices.Sort(names)
	return slices.Compact(names), err
}

// claimants lists the allocs with claims on a volume.
func claimants(ctx context.Context, c *control.Client, before []string, namespace string) ([]string, error) {
	all, err := c.Claims(ctx)
	return values(all, err, func(claim control.Claim) string {
		if claim.Name != volumeName(namespace, before[len(before)-1]) {
			return ""
		}
		return string(claim.Alloc)
	})
}

func externalIDs(ctx context.Context, c *control.Client, before []string, _ string) ([]string, error) {
	all, err := c.VolumesAt(ctx, before[len(before)-1])
	return values(all, err, func(v host.PluginVolume) string { return string(v.External) })
}

func endpointVolumes(ctx context.Context, c *control.Client, before []string, _ string) ([]string, error) {
	all, err := c.EndpointUses(ctx, before[len(before)-1])
	return values(all, err, func(u host.EndpointUse) string { return string(u.Volume.External) })
}

func volumeIDs(ctx context.Context, c *control.Client, _ []string, namespace string) ([]string, error) {
	all, err := c.Volumes(ctx, "")
	return values(all, err, func(v control.Volume) string {
		if v.Namespace != registry.Namespace(namespace) {
			return ""
		}
		return string(v.ID)
	})
}

func snapshotIDs(kind control.SnapshotKind) lister {
	return func(ctx context.Context, c *control.Client, _ []string, namespace string) ([]string, error) {
		all, err := c.Snapshots(kind).List(ctx, "")
		return values(all, err, func(s host.Snapshot) string {
			if s.Namespace != registry.Namespace(namespace) {
				return ""
			}
			return string(s.ID)
		})
	}
}
