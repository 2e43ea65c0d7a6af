package control

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"holdfast/host"
	"holdfast/internal/display"
	"holdfast/registry"
)

func snapshotName(r *http.Request) host.SnapshotName {
	return host.SnapshotName{Namespace: namespaceOf(r), ID: registry.SnapshotID(r.PathValue("id"))}
}

// SnapshotKind tells snapshots from group snapshots. It stands in command lines and in paths of requests.
type SnapshotKind string

const (
	Snapshots      SnapshotKind = "snapshot"
	GroupSnapshots SnapshotKind = "group-snapshot"
)

// Noun returns the kind as a word in a sentence.
func (k SnapshotKind) Noun() string { return strings.ReplaceAll(string(k), "-", " ") }

// CommandLine returns the command line for one snapshot of the kind.
func (k SnapshotKind) CommandLine(verb string, n host.SnapshotName) string {
	return display.ObjectCommand(fmt.Sprintf("holdfast %s %s", k, verb), n.Namespace, string(n.ID))
}

// snapshotRoutes handles the requests about one kind of snapshots.
type snapshotRoutes struct {
	SnapshotKind
	create             func(context.Context, host.SnapshotSpec) (host.Snapshot, error)
	remove, deregister func(context.Context, host.SnapshotName) error
	list               func(context.Context, host.SnapshotQuery) ([]host.Snapshot, host.Seq, error)
}

func (s *Server) snapshotRoutes() (snapshots, groups snapshotRoutes) {
	h := s.host
	return snapshotRoutes{Snapshots, h.CreateSnapshot, h.DeleteSnapshot, h.DeregisterSnapshot, h.Snapshots},
		snapshotRoutes{GroupSnapshots, h.CreateGroupSnapshot, h.DeleteGroupSnapshot, h.DeregisterGroupSnapshot,
			h.GroupSnapshots}
}

// post takes a snapshot. If the time limit of the request ends first, the error says how far the snapshot has come.
func (k snapshotRoutes) post(r *http.Request, spec host.SnapshotSpec) (any, error) {
	return callSnapshot(k, r, spec.SnapshotName(),
		func(ctx context.Context) (host.Snapshot, error) { return k.create(ctx, spec) })
}

func (k snapshotRoutes) delete(r *http.Request) (any, error) {
	name, remove := snapshotName(r), k.remove
	if isTrue(r, "deregister") {
		remove = k.deregister
	}
	return callSnapshot(k, r, name,
		func(ctx context.Context) (struct{}, error) { return struct{}{}, remove(ctx, name) })
}

// callSnapshot calls do within the time limit of the request. Work that has started continues after that.
func callSnapshot[T any](
	k snapshotRoutes, r *http.Request, name host.SnapshotName, do func(context.Context) (T, error),
) (T, error) {
	setWaitDescription(r.Context(), func(ctx context.Context) string { return k.progress(ctx, name) })
	out, expired, err := callWithLimit(r.Context(), r, do)
	if expired > 0 {
		err = registry.Errorf(registry.ErrUnavailable, "waited %v: %s; %s", expired, k.progress(r.Context(), name),
			resumeAdvice)
	}
	return out, err
}

// progress says how far the work on a snapshot has come.
func (k snapshotRoutes) progress(ctx context.Context, name host.SnapshotName) string {
	what := k.Noun() + " " + name.String()
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
	return text + "; Holdfast keeps asking, see " + k.CommandLine("status", name)
}

func (k snapshotRoutes) getAll(r *http.Request) (any, error) {
	list, _, err := k.list(r.Context(), host.SnapshotQuery{Plugin: host.PluginID(query(r, "plugin"))})
	return append([]host.Snapshot{}, list...), err
}

func (k snapshotRoutes) get(r *http.Request) (any, error) {
	name := snapshotName(r)
	list, _, err := k.list(r.Context(), host.SnapshotQuery{Name: name})
	switch {
	case err != nil:
		return nil, err
	case len(list) == 0:
		return nil, registry.Errorf(registry.ErrNotFound, "%s %s not found; run holdfast %s list for a list",
			k.Noun(), name, k.SnapshotKind)
	}
	return list[0], nil
}

// getSnapshots lists the recorded snapshots or, with ?at=PLUGIN, all snapshots that the plugin has.
func (s *Server) getSnapshots(r *http.Request) (any, error) {
	id := host.PluginID(query(r, "at"))
	if id == "" {
		snapshots, _ := s.snapshotRoutes()
		return snapshots.getAll(r)
	}
	list, err := askPlugin(s, r, id, func(ctx context.Context) ([]host.Snapshot, error) {
		return s.host.SnapshotsAtPlugin(ctx, id)
	})
	return append([]host.Snapshot{}, list...), err
}

// SnapshotClient manages snapshots of one kind.
type SnapshotClient struct {
	*Client
	kind SnapshotKind
}

// Snapshots returns the client for snapshots of a kind.
func (c *Client) Snapshots(kind SnapshotKind) SnapshotClient { return SnapshotClient{c, kind} }

// path returns the path of one snapshot, or of a resource below it.
func (c SnapshotClient) path(n host.SnapshotName, below string, more url.Values) string {
	return namedPath("/"+string(c.kind), n.Namespace, string(n.ID), below, more)
}

// listPath returns the path of all snapshots of the kind.
func (c SnapshotClient) listPath(q url.Values) string {
	return "/" + string(c.kind) + "s?" + q.Encode()
}

// Create takes a snapshot.
func (c SnapshotClient) Create(ctx context.Context, spec host.SnapshotSpec) (host.Snapshot, error) {
	return post[host.Snapshot](ctx, c.Client, c.listPath(c.wait()), spec)
}

// Delete deletes a snapshot at its plugin.
func (c SnapshotClient) Delete(ctx context.Context, n host.SnapshotName) error {
	return c.remove(ctx, c.path(n, "", c.wait()))
}

// Deregister deletes the record of a snapshot. The plugin keeps the snapshot.
func (c SnapshotClient) Deregister(ctx context.Context, n host.SnapshotName) error {
	q := c.wait()
	q.Set("deregister", "true")
	return c.remove(ctx, c.path(n, "", q))
}

// List lists snapshots of a plugin, or all if plugin is empty.
func (c SnapshotClient) List(ctx context.Context, plugin string) ([]host.Snapshot, error) {
	return get[[]host.Snapshot](ctx, c.Client, c.listPath(url.Values{"plugin": {plugin}}))
}

// Get returns a snapshot.
func (c SnapshotClient) Get(ctx context.Context, n host.SnapshotName) (host.Snapshot, error) {
	return get[host.Snapshot](ctx, c.Client, c.path(n, "", nil))
}

// SnapshotsAt lists the snapshots that a plugin has, including those without a record.
func (c *Client) SnapshotsAt(ctx context.Context, plugin string) ([]host.Snapshot, error) {
	q := c.wait()
	q.Set("at", plugin)
	return get[[]host.Snapshot](ctx, c, "/snapshots?"+q.Encode())
}
