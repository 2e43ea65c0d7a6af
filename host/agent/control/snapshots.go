package control

import (
	"context"
	"net/http"
	"net/url"

	"holdfast/host"
	"holdfast/registry"
)

func snapshotName(r *http.Request) host.SnapshotName {
	n := host.SnapshotName{Namespace: registry.Namespace(r.URL.Query().Get("namespace")),
		ID: registry.SnapshotID(r.PathValue("id"))}
	if n.Namespace == "" {
		n.Namespace = registry.DefaultNamespace
	}
	return n
}

// inTimeFor calls do within the time of the request. Work that has started continues.
func (s *Server) inTimeFor(r *http.Request, what string, do func(context.Context) error) error {
	wait, late, err := limited(r.Context(), r, do)
	if late {
		return registry.Errorf(registry.ErrUnavailable, "waited %v for %s: %w; run the command again to resume", wait, what,
			err)
	}
	return err
}

// postSnapshot takes a snapshot. If the time of the request ends first, the error says how far it has come.
func (s *Server) postSnapshot(r *http.Request) (any, error) {
	var spec host.SnapshotSpec
	if err := readBody(r, &spec); err != nil {
		return nil, err
	}
	var snap host.Snapshot
	err := s.inTimeFor(r, "snapshot "+spec.SnapshotName().String(), func(ctx context.Context) (err error) {
		snap, err = s.host.CreateSnapshot(ctx, spec)
		return err
	})
	return snap, err
}

func (s *Server) deleteSnapshot(r *http.Request) (any, error) {
	name, do := snapshotName(r), s.host.DeleteSnapshot
	if isTrue(r, "deregister") {
		do = s.host.DeregisterSnapshot
	}
	return struct{}{}, s.inTimeFor(r, "snapshot "+name.String(), func(ctx context.Context) error { return do(ctx, name) })
}

// getSnapshots lists the snapshots with a record or, with ?at=PLUGIN, those that the plugin has.
func (s *Server) getSnapshots(r *http.Request) (any, error) {
	if plugin := r.URL.Query().Get("at"); plugin != "" {
		list := []host.Snapshot{}
		err := s.inTimeFor(r, "plugin "+plugin, func(ctx context.Context) error {
			if _, err := s.knownPlugin(ctx, host.PluginID(plugin)); err != nil {
				return err
			}
			found, err := s.host.SnapshotsAtPlugin(ctx, host.PluginID(plugin))
			list = append(list, found...)
			return err
		})
		return list, err
	}
	list, _, err := s.host.Snapshots(r.Context(), host.SnapshotQuery{Plugin: host.PluginID(r.URL.Query().Get("plugin"))})
	return append([]host.Snapshot{}, list...), err
}

func (s *Server) getSnapshot(r *http.Request) (any, error) {
	name := snapshotName(r)
	list, _, err := s.host.Snapshots(r.Context(), host.SnapshotQuery{Name: name})
	switch {
	case err != nil:
		return nil, err
	case len(list) == 0:
		return nil, registry.Errorf(registry.ErrNotFound, "snapshot %s not found; run holdfast snapshot list for a list",
			name)
	}
	return list[0], nil
}

func snapshotPath(n host.SnapshotName, more url.Values) string {
	q := url.Values{"namespace": {string(n.Namespace)}}
	for k, v := range more {
		q[k] = v
	}
	return "/snapshot/" + segment(string(n.ID)) + "?" + q.Encode()
}

// CreateSnapshot takes a snapshot.
func (c *Client) CreateSnapshot(ctx context.Context, spec host.SnapshotSpec) (host.Snapshot, error) {
	return post[host.Snapshot](ctx, c, "/snapshots?"+c.wait().Encode(), spec)
}

// DeleteSnapshot deletes a snapshot at its plugin.
func (c *Client) DeleteSnapshot(ctx context.Context, n host.SnapshotName) error {
	return c.remove(ctx, snapshotPath(n, c.wait()))
}

// DeregisterSnapshot deletes the record of a snapshot. The plugin keeps the snapshot.
func (c *Client) DeregisterSnapshot(ctx context.Context, n host.SnapshotName) error {
	q := c.wait()
	q.Set("deregister", "true")
	return c.remove(ctx, snapshotPath(n, q))
}

// Snapshots lists snapshots of a plugin, or all if it is empty.
func (c *Client) Snapshots(ctx context.Context, plugin string) ([]host.Snapshot, error) {
	return get[[]host.Snapshot](ctx, c, "/snapshots?"+url.Values{"plugin": {plugin}}.Encode())
}

// SnapshotsAt lists the snapshots that a plugin has, also those without a record.
func (c *Client) SnapshotsAt(ctx context.Context, plugin string) ([]host.Snapshot, error) {
	q := c.wait()
	q.Set("at", plugin)
	return get[[]host.Snapshot](ctx, c, "/snapshots?"+q.Encode())
}

// Snapshot returns a snapshot.
func (c *Client) Snapshot(ctx context.Context, n host.SnapshotName) (host.Snapshot, error) {
	return get[host.Snapshot](ctx, c, snapshotPath(n, nil))
}
