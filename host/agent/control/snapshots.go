package control

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"

	"holdfast/host"
	"holdfast/internal/display"
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

// snapshotKind has the functions of the host that the routes of snapshots, or of group snapshots, call.
type snapshotKind struct {
	noun, command      string
	create             func(context.Context, host.SnapshotSpec) (host.Snapshot, error)
	remove, deregister func(context.Context, host.SnapshotName) error
	list               func(context.Context, host.SnapshotQuery) ([]host.Snapshot, host.Seq, error)
}

func (s *Server) snapshotKinds() (snapshots, groups snapshotKind) {
	h := s.host
	return snapshotKind{"snapshot", "snapshot", h.CreateSnapshot, h.DeleteSnapshot, h.DeregisterSnapshot, h.Snapshots},
		snapshotKind{"group snapshot", "group-snapshot", h.CreateGroupSnapshot, h.DeleteGroupSnapshot,
			h.DeregisterGroupSnapshot, h.GroupSnapshots}
}

// post takes a snapshot. If the time limit of the request ends first, the error says how far the snapshot has come.
func (k snapshotKind) post(r *http.Request, spec host.SnapshotSpec) (any, error) {
	return callSnapshot(k, r, spec.SnapshotName(),
		func(ctx context.Context) (host.Snapshot, error) { return k.create(ctx, spec) })
}

func (k snapshotKind) delete(r *http.Request) (any, error) {
	name, remove := snapshotName(r), k.remove
	if isTrue(r, "deregister") {
		remove = k.deregister
	}
	return callSnapshot(k, r, name,
		func(ctx context.Context) (struct{}, error) { return struct{}{}, remove(ctx, name) })
}

// callSnapshot calls do within the time limit of the request. Work that has started continues after that.
func callSnapshot[T any](
	k snapshotKind, r *http.Request, name host.SnapshotName, do func(context.Context) (T, error),
) (T, error) {
	describeWait(r.Context(), func(ctx context.Context) string { return k.progress(ctx, name) })
	out, wait, late, err := limited(r.Context(), r, do)
	if late {
		err = registry.Errorf(registry.ErrUnavailable, "waited %v: %s; run the command again to resume", wait,
			k.progress(r.Context(), name))
	}
	return out, err
}

// progress says how far the work on a snapshot has come.
func (k snapshotKind) progress(ctx context.Context, name host.SnapshotName) string {
	what := k.noun + " " + name.String()
	list, _, err := k.list(ctx, host.SnapshotQuery{Name: name})
	if err != nil || len(list) == 0 {
		return "no answer about " + what
	}
	states := map[registry.SnapshotState]string{
		registry.SnapshotCreating:   "is not taken yet",
		registry.SnapshotProcessing: "was taken, and its plugin does not report ready_to_use yet",
		registry.SnapshotDeleting:   "is not deleted yet",
	}
	snap := list[0]
	text := what + " " + cmp.Or(states[snap.State], "is "+string(snap.State))
	if f := snap.Failure; f.Code != "" {
		text += fmt.Sprintf(": %s failed: %s: %s", f.RPC, f.Code, f.Detail)
	}
	return text + "; Holdfast keeps asking, see " + display.Command("holdfast "+k.command+" status --namespace="+
		display.Quote(string(name.Namespace)), string(name.ID))
}

func (k snapshotKind) getAll(r *http.Request) (any, error) {
	list, _, err := k.list(r.Context(), host.SnapshotQuery{Plugin: host.PluginID(r.URL.Query().Get("plugin"))})
	return append([]host.Snapshot{}, list...), err
}

func (k snapshotKind) get(r *http.Request) (any, error) {
	name := snapshotName(r)
	list, _, err := k.list(r.Context(), host.SnapshotQuery{Name: name})
	switch {
	case err != nil:
		return nil, err
	case len(list) == 0:
		return nil, registry.Errorf(registry.ErrNotFound, "%s %s not found; run holdfast %s list for a list", k.noun,
			name, k.command)
	}
	return list[0], nil
}

// getSnapshots lists the recorded snapshots or, with ?at=PLUGIN, all snapshots that the plugin has.
func (s *Server) getSnapshots(r *http.Request) (any, error) {
	id := host.PluginID(r.URL.Query().Get("at"))
	if id == "" {
		snapshots, _ := s.snapshotKinds()
		return snapshots.getAll(r)
	}
	list, err := askPlugin(s, r, id, func(ctx context.Context) ([]host.Snapshot, error) {
		return s.host.SnapshotsAtPlugin(ctx, id)
	})
	return append([]host.Snapshot{}, list...), err
}

// SnapshotClient manages either snapshots or group snapshots.
type SnapshotClient struct {
	*Client
	kind string // as it is written in paths
}

// Snapshots manages snapshots.
func (c *Client) Snapshots() SnapshotClient { return SnapshotClient{c, "/snapshot"} }

// GroupSnapshots manages group snapshots.
func (c *Client) GroupSnapshots() SnapshotClient { return SnapshotClient{c, "/group-snapshot"} }

func (c SnapshotClient) path(n host.SnapshotName, more url.Values) string {
	return namedPath(c.kind, n.Namespace, string(n.ID), "", more)
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

// List lists snapshots of a plugin, or all if plugin is empty.
func (c SnapshotClient) List(ctx context.Context, plugin string) ([]host.Snapshot, error) {
	return get[[]host.Snapshot](ctx, c.Client, c.kind+"s?"+url.Values{"plugin": {plugin}}.Encode())
}

// Get returns a snapshot.
func (c SnapshotClient) Get(ctx context.Context, n host.SnapshotName) (host.Snapshot, error) {
	return get[host.Snapshot](ctx, c.Client, c.path(n, nil))
}

// SnapshotsAt lists the snapshots that a plugin has, including those without a record.
func (c *Client) SnapshotsAt(ctx context.Context, plugin string) ([]host.Snapshot, error) {
	q := c.wait()
	q.Set("at", plugin)
	return get[[]host.Snapshot](ctx, c, "/snapshots?"+q.Encode())
}
