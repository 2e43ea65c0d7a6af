package control

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os/user"

	"holdfast/host"
	"holdfast/internal/proc"
)

// operatorKey is the key of the operator in the context of a connection.
type operatorKey struct{}

// withOperator adds the user at the other end of a connection to the context. Events of operations by force name this
// user.
func withOperator(ctx context.Context, conn net.Conn) context.Context {
	cred, err := proc.Peer(conn)
	if err != nil {
		return context.WithValue(ctx, operatorKey{}, "an unknown user")
	}
	id := fmt.Sprint(cred.Uid)
	name := "user " + id
	if u, err := user.LookupId(id); err == nil {
		name = fmt.Sprintf("user %s (uid %s)", u.Username, id)
	}
	return context.WithValue(ctx, operatorKey{}, name)
}

// operatorOf returns the user at the other end of the connection.
func operatorOf(r *http.Request) string {
	by, _ := r.Context().Value(operatorKey{}).(string)
	return by
}

// forceOf returns the options that the request sets for an operation by force.
func forceOf(r *http.Request) host.Force {
	return host.Force{By: operatorOf(r), Confirm: query(r, "confirm"), DryRun: isTrue(r, "dry_run")}
}

// postForceRelease releases an alloc by force. The agent may have lost the record of the alloc.
func (s *Server) postForceRelease(r *http.Request) (any, error) {
	id, force := host.AllocID(r.PathValue("id")), forceOf(r)
	if rec, err := s.agent.Find(string(id)); err == nil {
		if force.Confirm == string(id) { // the same prefix again
			force.Confirm = string(rec.ID)
		}
		id = rec.ID
	}
	steps, err := callWithin(s, r, "alloc "+string(id), func(ctx context.Context) ([]host.ReleaseStep, error) {
		return s.host.ForceReleaseAlloc(ctx, id, force)
	})
	s.agent.Retry()
	return append([]host.ReleaseStep{}, steps...), err
}

func (s *Server) postDetach(r *http.Request) (any, error) {
	name := volumeName(r)
	steps, err := callWithin(s, r, "volume "+name.String(), func(ctx context.Context) ([]host.ReleaseStep, error) {
		return s.host.DetachVolume(ctx, name, query(r, "node"), forceOf(r))
	})
	return append([]host.ReleaseStep{}, steps...), s.withEngines(name, err)
}

func forceQuery(q url.Values, f host.Force) url.Values {
	q.Set("confirm", f.Confirm)
	q.Set("dry_run", fmt.Sprint(f.DryRun))
	return q
}

// ForceRelease releases an alloc by force. The agent sets the operator.
func (c *Client) ForceRelease(ctx context.Context, id string, f host.Force) ([]host.ReleaseStep, error) {
	return post[[]host.ReleaseStep](ctx, c, "/alloc/"+segment(id)+"/release?"+forceQuery(c.wait(), f).Encode(), nil)
}

// DetachVolume takes down attachments of a volume. The agent sets the operator.
func (c *Client) DetachVolume(
	ctx context.Context, n host.VolumeName, node string, f host.Force,
) ([]host.ReleaseStep, error) {
	q := forceQuery(c.wait(), f)
	q.Set("node", node)
	return post[[]host.ReleaseStep](ctx, c, volumePath(n, "/detach", q), nil)
}
