package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"holdfast/host"
	"holdfast/host/agent/control"
	"holdfast/internal/display"
	"holdfast/registry"
)

func newSnapshot(p *program) *cobra.Command {
	create := newSnapshotCreate(p, control.Snapshots, func(spec *host.SnapshotSpec, args []string) {
		spec.Volume, spec.ID = registry.VolumeID(args[0]), registry.SnapshotID(args[1])
	})
	create.Use, create.Short = "create VOLUME ID", "Take a snapshot of a volume and wait until it is ready to use"
	return group("snapshot", "Manage snapshots of volumes", create,
		newList(p, "snapshots", listSnapshots(control.Snapshots), writeSnapshots, (*control.Client).SnapshotsAt,
			writeSnapshots),
		newSnapshotStatus(p, control.Snapshots), newSnapshotDiff(p),
		newSnapshotDelete(p, control.Snapshots, "delete", "Delete snapshots; volumes created from them stay",
			control.SnapshotClient.Delete),
		newSnapshotDelete(p, control.Snapshots, "deregister",
			"Remove the records of snapshots; the plugin keeps the snapshots", control.SnapshotClient.Deregister))
}

func newGroupSnapshot(p *program) *cobra.Command {
	create := newSnapshotCreate(p, control.GroupSnapshots, func(spec *host.SnapshotSpec, args []string) {
		spec.ID = registry.SnapshotID(args[0])
		for _, id := range args[1:] {
			spec.Volumes = append(spec.Volumes, registry.VolumeID(id))
		}
	})
	create.Use = "create ID VOLUME..."
	create.Short = "Take snapshots of volumes at one point in time and wait until they are ready to use"
	create.Long = `Take snapshots of volumes at one point in time and wait until they are ready to
use.

The volumes belong to one plugin. The ID of each snapshot is ID-VOLUME. Volumes
can be created from each snapshot. A snapshot is deleted only with its group.`
	return group("group-snapshot", "Manage snapshots of several volumes, taken at one point in time", create,
		newList(p, "group snapshots", listSnapshots(control.GroupSnapshots), writeGroups, nil, writeGroups),
		newSnapshotStatus(p, control.GroupSnapshots),
		newSnapshotDelete(p, control.GroupSnapshots, "delete",
			"Delete group snapshots with all their snapshots; volumes created from them stay",
			control.SnapshotClient.Delete),
		newSnapshotDelete(p, control.GroupSnapshots, "deregister",
			"Remove the records of group snapshots; the plugin keeps their snapshots",
			control.SnapshotClient.Deregister))
}

// newSnapshotCreate returns a command to which the caller adds the usage. read reads the arguments into the spec.
func newSnapshotCreate(
	p *program, kind control.SnapshotKind, read func(spec *host.SnapshotSpec, args []string),
) *cobra.Command {
	namespace, name, wait := "", "", time.Duration(0)
	var parameters, secrets []string
	c := &cobra.Command{
		RunE: func(c *cobra.Command, args []string) error {
			spec := host.SnapshotSpec{Namespace: registry.Namespace(namespace), Name: name}
			read(&spec, args)
			var err error
			if spec.Parameters, err = assignments("--parameter", parameters); err != nil {
				return err
			}
			if spec.Secrets, err = secretReferences(secrets); err != nil {
				return err
			}
			hint := fmt.Sprintf("the plugin may still take the %s; to check: %s; to resume, run the command again",
				kind.Noun(), kind.CommandLine("status", spec.SnapshotName()))
			ctx, client, stop := p.interruptible(c, wait)
			defer stop()
			snap, err := client.Snapshots(kind).Create(ctx, spec)
			return show(p, withHint(err, hint), snap, writeTaken)
		},
	}
	namespaceFlag(c, kind.Noun()+" and its volumes", &namespace)
	waitFlag(c, &wait)
	c.Flags().StringVar(&name, "name", "", "name of the "+kind.Noun()+" at the plugin (default the ID)")
	c.Flags().StringArrayVar(&parameters, "parameter", nil, "parameter for the plugin, as key=value; may be repeated")
	c.Flags().StringArrayVar(&secrets, "secret", nil,
		"secret for the plugin: name=env:VARIABLE (of the agent) or name=file:PATH; may be repeated "+
			"(default the volume's secrets)")
	return c
}

// writeTaken reports a snapshot or group snapshot that was created.
func writeTaken(to io.Writer, s host.Snapshot) error {
	if !s.IsGroup() {
		_, err := fmt.Fprintf(to, "snapshot %s of volume %s created by plugin %s (external ID %s)\n",
			s.SnapshotName(), s.Volume, s.Plugin, s.External)
		return err
	}
	_, err := fmt.Fprintf(to, "group snapshot %s of %d volumes created by plugin %s (external ID %s)\n",
		s.SnapshotName(), len(s.Members), s.Plugin, s.External)
	for _, m := range s.Members {
		if err == nil {
			_, err = fmt.Fprintf(to, "  snapshot %s of volume %s\n", s.MemberID(m.Volume), m.Volume)
		}
	}
	return err
}

// assignments parses the values of a flag of the form key=value.
func assignments(flag string, list []string) (map[string]string, error) {
	var out map[string]string
	for _, text := range list {
		key, value, found := strings.Cut(text, "=")
		if !found || key == "" {
			return nil, usageError{fmt.Errorf("%s %q: write key=value", flag, text)}
		}
		if out == nil {
			out = map[string]string{}
		}
		out[key] = value
	}
	return out, nil
}

// secretReferences parses the values of --secret.
func secretReferences(list []string) (map[string]registry.Secret, error) {
	texts, err := assignments("--secret", list)
	if err != nil {
		return nil, usageError{errors.New("--secret: write name=env:VARIABLE or name=file:PATH")}
	}
	var out map[string]registry.Secret
	for name, text := range texts {
		if out == nil {
			out = map[string]registry.Secret{}
		}
		switch kind, at, _ := strings.Cut(text, ":"); {
		case kind == "env" && at != "":
			out[name] = registry.Secret{Env: at}
		case kind == "file" && at != "":
			out[name] = registry.Secret{File: at}
		default: // do not print the text: it may be the secret itself
			return nil, usageError{fmt.Errorf("--secret %s: write %[1]s=env:VARIABLE or %[1]s=file:PATH", name)}
		}
	}
	return out, nil
}

func newSnapshotStatus(p *program, kind control.SnapshotKind) *cobra.Command {
	namespace := ""
	c := &cobra.Command{
		Use: "status ID", Short: "Show a " + kind.Noun(),
		RunE: func(c *cobra.Command, args []string) error {
			snap, err := p.client().Snapshots(kind).Get(c.Context(), snapshotName(namespace, args[0]))
			return show(p, err, snap, writeSnapshot)
		},
	}
	namespaceFlag(c, kind.Noun(), &namespace)
	return c
}

func snapshotName(namespace, id string) host.SnapshotName {
	return host.SnapshotName{Namespace: registry.Namespace(namespace), ID: registry.SnapshotID(id)}
}

func listSnapshots(kind control.SnapshotKind) listFunc[host.Snapshot] {
	return func(c *control.Client, ctx context.Context, plugin string) ([]host.Snapshot, error) {
		return c.Snapshots(kind).List(ctx, plugin)
	}
}

func newSnapshotDelete(p *program, kind control.SnapshotKind, verb, short string,
	do func(control.SnapshotClient, context.Context, host.SnapshotName) error) *cobra.Command {
	return newDelete(p, string(kind), verb, short, snapshotName,
		func(c *control.Client, ctx context.Context, n host.SnapshotName) error {
			return do(c.Snapshots(kind), ctx, n)
		})
}

func writeSnapshots(to io.Writer, list []host.Snapshot) error {
	t := newTable("NAMESPACE", "ID", "VOLUME", "PLUGIN", "STATE", "SIZE", "TAKEN", "EXTERNAL ID")
	for _, s := range list {
		t.add(s.Namespace, s.ID, s.Volume, s.Plugin, s.State, display.Size(s.Size), age(s.Taken), string(s.External))
	}
	return t.write(to, "no snapshots")
}

func writeGroups(to io.Writer, list []host.Snapshot) error {
	t := newTable("NAMESPACE", "ID", "VOLUMES", "PLUGIN", "STATE", "TAKEN", "EXTERNAL ID")
	for _, s := range list {
		t.add(s.Namespace, s.ID, len(s.Members), s.Plugin, s.State, age(s.Taken), string(s.External))
	}
	return t.write(to, "no group snapshots")
}

func writeSnapshot(to io.Writer, s host.Snapshot) error {
	var about factList
	about.add("ID", s.ID, "Namespace", s.Namespace, "Name", s.Name)
	for _, m := range s.Members {
		about.add("Snapshot", fmt.Sprintf("%s of volume %s (external ID %s, %s)", s.MemberID(m.Volume), m.Volume,
			string(m.External), display.Size(m.Size)))
	}
	if !s.IsGroup() {
		about.add("Volume", s.Volume, "Size", display.Size(s.Size))
	}
	about.add("Plugin", s.Plugin, "External ID", string(s.External), "State", s.State, "Taken", when(s.Taken),
		"Known since", when(s.Since))
	about.addKnown("Group snapshot", string(s.Group))
	if s.Failure.Code != "" {
		about.add("Last error", fmt.Sprintf("%s: %s: %s", s.Failure.RPC, s.Failure.Code, s.Failure.Detail))
	}
	if s.State == registry.SnapshotDeleting {
		kind := control.Snapshots
		if s.IsGroup() {
			kind = control.GroupSnapshots
		}
		about.add("Next", fmt.Sprintf("Holdfast repeats the deletion; to repeat it now and see its error: %s; "+
			"to remove only the record: %s", kind.CommandLine("delete", s.SnapshotName()),
			kind.CommandLine("deregister", s.SnapshotName())))
	}
	return columns(to, about)
}
