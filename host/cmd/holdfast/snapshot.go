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

// snapshotKind has the differences between the commands for snapshots and those for group snapshots.
type snapshotKind struct {
	command string // snapshot or group-snapshot
	noun    string
	client  func(*control.Client) control.SnapshotClient
}

var (
	snapshots      = snapshotKind{"snapshot", "snapshot", (*control.Client).Snapshots}
	groupSnapshots = snapshotKind{"group-snapshot", "group snapshot", (*control.Client).GroupSnapshots}
)

func newSnapshot(p *program) *cobra.Command {
	create := newSnapshotCreate(p, snapshots, func(spec *host.SnapshotSpec, args []string) {
		spec.Volume, spec.ID = registry.VolumeID(args[0]), registry.SnapshotID(args[1])
	})
	create.Use, create.Short = "create VOLUME ID", "Take a snapshot of a volume and wait until it is ready to use"
	return group("snapshot", "Manage snapshots of volumes", create,
		newSnapshotList(p), newSnapshotStatus(p, snapshots), newSnapshotDiff(p),
		newSnapshotDelete(p, snapshots, "delete", "Delete snapshots; volumes created from them stay",
			control.SnapshotClient.Delete),
		newSnapshotDelete(p, snapshots, "deregister",
			"Remove the records of snapshots; the plugin keeps the snapshots", control.SnapshotClient.Deregister))
}

func newGroupSnapshot(p *program) *cobra.Command {
	create := newSnapshotCreate(p, groupSnapshots, func(spec *host.SnapshotSpec, args []string) {
		spec.ID = registry.SnapshotID(args[0])
		for _, id := range args[1:] {
			spec.Volumes = append(spec.Volumes, registry.VolumeID(id))
		}
	})
	create.Use = "create ID VOLUME..."
	create.Short = "Take snapshots of volumes at one point in time and wait until they are ready to use"
	create.Long = create.Short + `.

The volumes belong to one plugin. The ID of each snapshot is ID-VOLUME. Volumes can be
created from it; it is deleted only with the group.`
	return group("group-snapshot", "Manage snapshots of several volumes, taken at one point in time", create,
		newGroupSnapshotList(p), newSnapshotStatus(p, groupSnapshots),
		newSnapshotDelete(p, groupSnapshots, "delete",
			"Delete group snapshots with all their snapshots; volumes created from them stay",
			control.SnapshotClient.Delete),
		newSnapshotDelete(p, groupSnapshots, "deregister",
			"Remove the records of group snapshots; the plugin keeps their snapshots",
			control.SnapshotClient.Deregister))
}

// newSnapshotCreate returns a command to which the caller adds the usage. read reads the arguments into the spec.
func newSnapshotCreate(
	p *program, kind snapshotKind, read func(spec *host.SnapshotSpec, args []string),
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
				kind.noun, kind.line("status", spec.SnapshotName()))
			snap, err := callUntilSignal(c, p, wait, hint,
				func(ctx context.Context, client *control.Client) (host.Snapshot, error) {
					return kind.client(client).Create(ctx, spec)
				})
			return show(p, err, snap, writeTaken)
		},
	}
	snapshotNamespace(c, &namespace)
	waitFlag(c, &wait)
	c.Flags().StringVar(&name, "name", "", "name of the "+kind.noun+" at the plugin (default the ID)")
	c.Flags().StringArrayVar(&parameters, "parameter", nil, "parameter for the plugin, as key=value; may be repeated")
	c.Flags().StringArrayVar(&secrets, "secret", nil,
		"secret for the plugin: name=env:VARIABLE (of the agent) or name=file:PATH; repeatable "+
			"(default the volume's secrets)")
	return c
}

// writeTaken reports a snapshot or group snapshot that was created.
func writeTaken(to writer, s host.Snapshot) error {
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

// line returns a command for one snapshot, to copy.
func (k snapshotKind) line(verb string, n host.SnapshotName) string {
	return display.Command("holdfast "+k.command+" "+verb+" --namespace="+display.Quote(string(n.Namespace)),
		string(n.ID))
}

func snapshotNamespace(c *cobra.Command, to *string) {
	c.Flags().StringVar(to, "namespace", string(registry.DefaultNamespace), "namespace of the snapshot and its volumes")
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
		kind, at, _ := strings.Cut(text, ":")
		secret, known := map[string]registry.Secret{"env": {Env: at}, "file": {File: at}}[kind]
		if !known || at == "" { // do not print the text: it may be the secret itself
			return nil, usageError{fmt.Errorf("--secret %s: write %s=env:VARIABLE or %s=file:PATH", name, name, name)}
		}
		if out == nil {
			out = map[string]registry.Secret{}
		}
		out[name] = secret
	}
	return out, nil
}

func newSnapshotList(p *program) *cobra.Command {
	plugin, external, wait := "", "", time.Duration(0)
	c := &cobra.Command{
		Use: "list", Short: "List snapshots",
		RunE: func(c *cobra.Command, _ []string) error {
			client := p.client()
			client.Wait = wait
			if external != "" && plugin != "" {
				return usageError{errors.New("use either --plugin or --external")}
			}
			if external != "" {
				list, err := client.SnapshotsAt(c.Context(), external)
				return show(p, err, list, writeSnapshots)
			}
			list, err := client.Snapshots().List(c.Context(), plugin)
			return show(p, err, list, writeSnapshots)
		},
	}
	c.Flags().StringVar(&plugin, "plugin", "", "list only snapshots of this plugin")
	c.Flags().StringVar(&external, "external", "",
		"ask this plugin which snapshots it has, also those that Holdfast has no record of")
	waitFlag(c, &wait)
	return c
}

func newGroupSnapshotList(p *program) *cobra.Command {
	plugin := ""
	c := &cobra.Command{
		Use: "list", Short: "List group snapshots",
		RunE: func(c *cobra.Command, _ []string) error {
			list, err := p.client().GroupSnapshots().List(c.Context(), plugin)
			return show(p, err, list, writeGroups)
		},
	}
	c.Flags().StringVar(&plugin, "plugin", "", "list only group snapshots of this plugin")
	return c
}

func newSnapshotStatus(p *program, kind snapshotKind) *cobra.Command {
	namespace := ""
	c := &cobra.Command{
		Use: "status ID", Short: "Show a " + kind.noun,
		RunE: func(c *cobra.Command, args []string) error {
			name := host.SnapshotName{Namespace: registry.Namespace(namespace), ID: registry.SnapshotID(args[0])}
			snap, err := kind.client(p.client()).Get(c.Context(), name)
			return show(p, err, snap, writeSnapshot)
		},
	}
	snapshotNamespace(c, &namespace)
	return c
}

func newSnapshotDelete(p *program, kind snapshotKind, verb, short string,
	do func(control.SnapshotClient, context.Context, host.SnapshotName) error) *cobra.Command {
	namespace, wait := "", time.Duration(0)
	c := &cobra.Command{
		Use: verb + " ID...", Short: short,
		RunE: func(c *cobra.Command, args []string) error {
			name := host.SnapshotName{Namespace: registry.Namespace(namespace), ID: registry.SnapshotID(args[0])}
			hint := interruptedDelete(verb, fmt.Sprintf("%s %s", kind.noun, name), kind.line("status", name))
			_, err := callUntilSignal(c, p, wait, hint,
				func(ctx context.Context, client *control.Client) (struct{}, error) {
					return struct{}{}, do(kind.client(client), ctx, name)
				})
			return show(p, err, map[string]string{"namespace": namespace, "id": args[0]},
				func(to writer, _ map[string]string) error {
					_, err := fmt.Fprintf(to, "%s %s %s\n", kind.noun, name,
						map[string]string{"delete": "deleted", "deregister": "deregistered"}[verb])
					return err
				})
		},
	}
	snapshotNamespace(c, &namespace)
	waitFlag(c, &wait)
	return c
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
	list := []any{"ID", s.ID, "Namespace", s.Namespace, "Name", s.Name}
	for _, m := range s.Members {
		list = append(list, "Snapshot",
			fmt.Sprintf("%s of volume %s (external ID %s, %s)", s.MemberID(m.Volume), m.Volume, string(m.External),
				display.Size(m.Size)))
	}
	if !s.IsGroup() {
		list = append(list, "Volume", s.Volume, "Size", display.Size(s.Size))
	}
	list = append(list, "Plugin", s.Plugin, "External ID", string(s.External), "State", s.State, "Taken", when(s.Taken),
		"Since", when(s.Since))
	if s.Group != "" {
		list = append(list, "Group snapshot", string(s.Group))
	}
	if s.Failure.Code != "" {
		list = append(list, "Last error", fmt.Sprintf("%s: %s: %s", s.Failure.RPC, s.Failure.Code, s.Failure.Detail))
	}
	if s.State == registry.SnapshotDeleting {
		kind := snapshots
		if s.IsGroup() {
			kind = groupSnapshots
		}
		list = append(list, "Next", fmt.Sprintf("Holdfast repeats the deletion; to see what is in the way: %s; "+
			"to remove only the record: %s", kind.line("delete", s.SnapshotName()),
			kind.line("deregister", s.SnapshotName())))
	}
	return facts(to, list...)
}
