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

func (s *Server) postSnapshot(r *http.Request) (any, error) {
	return s.takeSnapshot(r, "snapshot", s.host.CreateSnapshot)
}

func (s *Server) postGroupSnapshot(r *http.Request) (any, error) {
	return s.takeSnapshot(r, "group snapshot", s.host.CreateGroupSnapshot)
}

// takeSnapshot takes a snapshot. If the time of the request ends first, the error says how far it has come.
func (s *Server) takeSnapshot(
	r *http.Request, what string, take func(context.Context, host.SnapshotSpec) (host.Snapshot, error),
) (any, error) {
	var spec host.SnapshotSpec
	if err := readBody(r, &spec); err != nil {
		return nil, err
	}
	var snap host.Snapshot
	err := s.inTimeFor(r, what+" "+spec.SnapshotName().String(), func(ctx context.Context) (err error) {
		snap, err = take(ctx, spec)
		return err
	})
	return snap, err
}

func (s *Server) deleteSnapshot(r *http.Request) (any, error) {
	return s.removeSnapshot(r, "snapshot", s.host.DeleteSnapshot, s.host.DeregisterSnapshot)
}

func (s *Server) deleteGroupSnapshot(r *http.Request) (any, error) {
	return s.removeSnapshot(r, "group snapshot", s.host.DeleteGroupSnapshot, s.host.DeregisterGroupSnapshot)
}

func (s *Server) removeSnapshot(
	r *http.Request, what string, remove, deregister func(context.Context, host.SnapshotName) error,
) (any, error) {
	name := snapshotName(r)
	if isTrue(r, "deregister") {
		remove = deregister
	}
	return struct{}{}, s.inTimeFor(r, what+" "+name.String(), func(ctx context.Context) error { return remove(ctx, name) })
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
	return listSnapshots(r, s.host.Snapshots)
}

func (s *Server) getGroupSnapshots(r *http.Request) (any, error) {
	return listSnapshots(r, s.host.GroupSnapshots)
}

// snapshotLister lists snapshots or group snapshots.
type snapshotLister func(context.Context, host.SnapshotQuery) ([]host.Snapshot, host.Seq, error)

func listSnapshots(r *http.Request, lister snapshotLister) (any, error) {
	list, _, err := lister(r.Context(), host.SnapshotQuery{Plugin: host.PluginID(r.URL.Query().Get("plugin"))})
	return append([]host.Snapshot{}, list...), err
}

func (s *Server) getSnapshot(r *http.Request) (any, error) {
	return oneSnapshot(r, s.host.Snapshots, "snapshot %s not found; run holdfast snapshot list for a list")
}

func (s *Server) getGroupSnapshot(r *http.Request) (any, error) {
	return oneSnapshot(r, s.host.GroupSnapshots, "group snapshot %s not found; run holdfast group-snapshot list for a list")
}

func oneSnapshot(r *http.Request, lister snapshotLister, missing string) (any, error) {
	name := snapshotName(r)
	list, _, err := lister(r.Context(), host.SnapshotQuery{Name: name})
	switch {
	case err != nil:
		return nil, err
	case len(list) == 0:
		return nil, registry.Errorf(registry.ErrNotFound, missing, name)
	}
	return list[0], nil
}

// SnapshotClient manages snapshots, or group snapshots.
type SnapshotClient struct {
	*Client
	kind string // as in paths
}

// Snapshots manages snapshots.
func (c *Client) Snapshots() SnapshotClient { return SnapshotClient{c, "/snapshot"} }

// GroupSnapshots manages group snapshots.
func (c *Client) GroupSnapshots() SnapshotClient { return SnapshotClient{c, "/group-snapshot"} }

func (c SnapshotClient) path(n host.SnapshotName, more url.Values) string {
	q := url.Values{"namespace": {string(n.Namespace)}}
	for k, v := range more {
		q[k] = v
	}
	return c.kind + "/" + segment(string(n.ID)) + "?" + q.Encode()
}

// Create takes a snapshot.
func (c SnapshotClient) Create(ctx context.Context, spec host.SnapshotSpec) (host.Snapshot, error) {
	return post[host.Snapshot](ctx, c.Client, c.kind+"s?"+c.wait().Encode(), spec)
}

// Delete deletes a snapshot at its plugin.
func (c SnapshotClient) Delete(ctx context.Context, n host.SnapshotName) error {
	return c.remove(ctx, c.path(n, c.wait()))
}

// Deregister deletes the record of a snapshot. The plugin keeps the snapshot.
func (c SnapshotClient) Deregister(ctx context.Context, n host.SnapshotName) error {
	q := c.wait()
	q.Set("deregister", "true")
	return c.remove(ctx, c.path(n, q))
}

// List lists snapshots of a plugin, or all if it is empty.
func (c SnapshotClient) List(ctx context.Context, plugin string) ([]host.Snapshot, error) {
	return get[[]host.Snapshot](ctx, c.Client, c.kind+"s?"+url.Values{"plugin": {plugin}}.Encode())
}

// Get returns a snapshot.
func (c SnapshotClient) Get(ctx context.Context, n host.SnapshotName) (host.Snapshot, error) {
	return get[host.Snapshot](ctx, c.Client, c.path(n, nil))
}

// SnapshotsAt lists the snapshots that a plugin has, also those without a record.
func (c *Client) SnapshotsAt(ctx context.Context, plugin string) ([]host.Snapshot, error) {
	q := c.wait()
	q.Set("at", plugin)
	return get[[]host.Snapshot](ctx, c, "/snapshots?"+q.Encode())
}
