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

func newSnapshot(io streams, p *globalFlags) *cobra.Command {
	return group("snapshot", "Manage snapshots of volumes", newSnapshotCreate(io, p), newSnapshotList(io, p),
		newSnapshotStatus(io, p),
		newSnapshotDelete(io, p, "delete", "Delete a snapshot; volumes created from it stay", (*control.Client).DeleteSnapshot),
		newSnapshotDelete(io, p, "deregister", "Remove the record of a snapshot; the plugin keeps the snapshot",
			(*control.Client).DeregisterSnapshot))
}

func newSnapshotCreate(io streams, p *globalFlags) *cobra.Command {
	namespace, name, wait := "", "", time.Duration(0)
	var parameters, secrets []string
	c := &cobra.Command{
		Use: "create VOLUME ID", Short: "Take a snapshot of a volume and wait until it is ready to use",
		Args: usageArgs(cobra.ExactArgs(2)),
		RunE: func(c *cobra.Command, args []string) error {
			spec := host.SnapshotSpec{Namespace: registry.Namespace(namespace), ID: registry.SnapshotID(args[1]),
				Name: name, Volume: registry.VolumeID(args[0])}
			var err error
			if spec.Parameters, err = assignments("--parameter", parameters); err != nil {
				return err
			}
			if spec.Secrets, err = secretReferences(secrets); err != nil {
				return err
			}
			hint := fmt.Sprintf("the plugin may still take the snapshot; to check: %s; to resume, run the command again",
				snapshotStatus(spec.SnapshotName()))
			snap, err := callUntilSignal(c, p, wait, hint,
				func(ctx context.Context, client *control.Client) (host.Snapshot, error) {
					return client.CreateSnapshot(ctx, spec)
				})
			return show(io, p, err, snap, func(to writer, s host.Snapshot) error {
				_, err := fmt.Fprintf(to, "snapshot %s of volume %s created by plugin %s (external ID %s)\n",
					s.SnapshotName(), s.Volume, s.Plugin, s.External)
				return err
			})
		},
	}
	snapshotNamespace(c, &namespace)
	waitFlag(c, &wait)
	c.Flags().StringVar(&name, "name", "", "name of the snapshot at the plugin (default the ID)")
	c.Flags().StringArrayVar(&parameters, "parameter", nil, "parameter for the plugin, as key=value; may be repeated")
	c.Flags().StringArrayVar(&secrets, "secret", nil,
		"secret for the plugin, as name=env:VARIABLE, name=file:PATH or name=callback:TEXT; may be repeated (default the volume's secrets)")
	return c
}

// snapshotStatus is the command that shows a snapshot.
func snapshotStatus(n host.SnapshotName) string {
	return display.Command("holdfast snapshot status --namespace="+display.Quote(string(n.Namespace)), string(n.ID))
}

func snapshotNamespace(c *cobra.Command, to *string) {
	c.Flags().StringVar(to, "namespace", string(registry.DefaultNamespace), "namespace of the snapshot and its volume")
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
		return nil, usageError{errors.New("--secret: write name=env:VARIABLE, name=file:PATH or name=callback:TEXT")}
	}
	var out map[string]registry.Secret
	for name, text := range texts {
		kind, at, _ := strings.Cut(text, ":")
		secret, known := map[string]registry.Secret{"env": {Env: at}, "file": {File: at}, "callback": {Callback: at}}[kind]
		if !known || at == "" { // the text may be the secret itself
			return nil, usageError{fmt.Errorf("--secret %s: write %s=env:VARIABLE, %s=file:PATH or %s=callback:TEXT", name,
				name, name, name)}
		}
		if out == nil {
			out = map[string]registry.Secret{}
		}
		out[name] = secret
	}
	return out, nil
}

func newSnapshotList(io streams, p *globalFlags) *cobra.Command {
	plugin, external, wait := "", "", time.Duration(0)
	c := &cobra.Command{
		Use: "list", Short: "List snapshots", Args: usageArgs(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			client := p.client()
			client.Wait = wait
			if external != "" && plugin != "" {
				return usageError{errors.New("use either --plugin or --external")}
			}
			if external != "" {
				list, err := client.SnapshotsAt(c.Context(), external)
				return show(io, p, err, list, writeSnapshots)
			}
			list, err := client.Snapshots(c.Context(), plugin)
			return show(io, p, err, list, writeSnapshots)
		},
	}
	c.Flags().StringVar(&plugin, "plugin", "", "list only snapshots of this plugin")
	c.Flags().StringVar(&external, "external", "",
		"ask this plugin which snapshots it has, also those that Holdfast has no record of")
	waitFlag(c, &wait)
	return c
}

func newSnapshotStatus(io streams, p *globalFlags) *cobra.Command {
	namespace := ""
	c := &cobra.Command{
		Use: "status ID", Short: "Show a snapshot", Args: usageArgs(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, args []string) error {
			name := host.SnapshotName{Namespace: registry.Namespace(namespace), ID: registry.SnapshotID(args[0])}
			snap, err := p.client().Snapshot(c.Context(), name)
			return show(io, p, err, snap, writeSnapshot)
		},
	}
	snapshotNamespace(c, &namespace)
	return c
}

func newSnapshotDelete(io streams, p *globalFlags, verb, short string,
	do func(*control.Client, context.Context, host.SnapshotName) error) *cobra.Command {
	namespace, wait := "", time.Duration(0)
	c := &cobra.Command{
		Use: verb + " ID", Short: short, Args: usageArgs(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, args []string) error {
			name := host.SnapshotName{Namespace: registry.Namespace(namespace), ID: registry.SnapshotID(args[0])}
			hint := fmt.Sprintf("snapshot %s may or may not be deleted; to check: %s; to resume, run the command again", name,
				snapshotStatus(name))
			_, err := callUntilSignal(c, p, wait, hint,
				func(ctx context.Context, client *control.Client) (struct{}, error) {
					return struct{}{}, do(client, ctx, name)
				})
			return show(io, p, err, map[string]string{"namespace": namespace, "id": args[0]},
				func(to writer, _ map[string]string) error {
					_, err := fmt.Fprintf(to, "snapshot %s %s\n", name,
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
		t.add(s.Namespace, s.ID, s.Volume, s.Plugin, s.State, size(s.Size), when(s.Taken), string(s.External))
	}
	return t.write(to, "no snapshots")
}

func writeSnapshot(to io.Writer, s host.Snapshot) error {
	list := []any{"ID", s.ID, "Namespace", s.Namespace, "Name", s.Name, "Volume", s.Volume, "Plugin", s.Plugin,
		"External ID", string(s.External), "State", s.State, "Size", size(s.Size), "Taken", when(s.Taken),
		"Since", when(s.Since)}
	if s.Group != "" {
		list = append(list, "Group snapshot", string(s.Group))
	}
	if s.Failure.Code != "" {
		list = append(list, "Last error", fmt.Sprintf("%s: %s: %s", s.Failure.RPC, s.Failure.Code, s.Failure.Detail))
	}
	return facts(to, list...)
}
