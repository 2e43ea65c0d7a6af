package control

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"time"

	"holdfast/host"
	"holdfast/internal/display"
	"holdfast/registry"
)

// Claim is a claim with the state of its node.
type Claim struct {
	registry.Claim
	NodeState string `json:"node_state"`      // alive, suspect, or the declared state of the node
	Stale     string `json:"stale,omitempty"` // why the claim may be outdated
}

// ClaimExplanation says who holds a volume, what waits for it, and what happens next.
type ClaimExplanation struct {
	Volume
	Executor host.NodeName `json:"executor,omitempty"` // the node that makes the plugin's controller calls; empty: none
	Claims   []Claim       `json:"claims"`
	Nodes    int           `json:"nodes"` // in the cluster. The waits of allocs of other nodes are not included
	Stale    string        `json:"stale,omitempty"`
}

func nodeName(r *http.Request) host.NodeName { return host.NodeName(r.PathValue("id")) }

func (s *Server) getNodes(r *http.Request) (any, error) {
	list, _, err := s.host.Nodes(r.Context(), host.NodeQuery{})
	return append([]host.NodeStatus{}, list...), err
}

func (s *Server) getNode(r *http.Request) (any, error) {
	name := nodeName(r)
	list, _, err := s.host.Nodes(r.Context(), host.NodeQuery{Node: name})
	if err == nil && len(list) == 0 {
		err = registry.Errorf(registry.ErrNotFound, "node %q not found (see holdfast node list)", name)
	}
	if err != nil {
		return nil, err
	}
	return list[0], nil
}

func (s *Server) postDrain(r *http.Request) (any, error) {
	o := host.DrainOptions{By: operatorOf(r), Reason: query(r, "reason"), End: isTrue(r, "end")}
	if limit, err := time.ParseDuration(cmp.Or(query(r, "deadline"), "0")); err != nil {
		return nil, registry.Invalid("deadline: %w", err)
	} else if limit > 0 {
		o.Deadline = time.Now().Add(limit)
	}
	return s.host.DrainNode(r.Context(), nodeName(r), o)
}

func (s *Server) postOutOfService(r *http.Request) (any, error) {
	return s.host.NodeOutOfService(r.Context(), nodeName(r), host.OutOfServiceOptions{
		By: operatorOf(r), Reason: query(r, "reason"), Confirm: host.NodeName(query(r, "confirm"))})
}

func (s *Server) postForgetNode(r *http.Request) (any, error) {
	return struct{}{}, s.host.ForgetNode(r.Context(), nodeName(r), host.ForgetOptions{
		By: operatorOf(r), Reason: query(r, "reason")})
}

func (s *Server) getClaims(r *http.Request) (any, error) {
	nodes, _, err := s.host.Nodes(r.Context(), host.NodeQuery{})
	if err != nil {
		return nil, err
	}
	list, _, err := s.host.Claims(r.Context(), host.ClaimQuery{})
	return claimViews(list, nodes), err
}

func claimViews(list []host.Claim, nodes []host.NodeStatus) []Claim {
	out := []Claim{}
	for _, c := range list {
		state := "unknown"
		for _, n := range nodes {
			if n.Name == c.Node {
				state = NodeState(n)
			}
		}
		out = append(out, Claim{c, state, Stale(nodes)})
	}
	return out
}

// Stale says why this node's view of the cluster may be outdated. It is empty if the view is current.
func Stale(nodes []host.NodeStatus) string {
	if len(nodes) == 0 {
		return ""
	}
	return nodes[0].Stale
}

// NodeState returns the state of a node in one word. A node that is ready or draining but not alive is suspect.
func NodeState(n host.NodeStatus) string {
	switch {
	case n.State != registry.NodeReady && n.State != registry.NodeDraining:
		return string(n.State)
	case !n.Alive:
		return "suspect"
	}
	return string(n.State)
}

// explainClaims explains the claims on a volume.
func (s *Server) explainClaims(r *http.Request) (any, error) {
	ctx, name := r.Context(), volumeName(r)
	v, err := s.volume(ctx, name)
	if err != nil {
		return nil, err
	}
	nodes, _, err := s.host.Nodes(ctx, host.NodeQuery{})
	if err != nil {
		return nil, err
	}
	e := s.explainer()
	e.volumes[name] = v
	out := ClaimExplanation{Volume: e.volumeView(*v), Nodes: len(nodes), Stale: Stale(nodes)}
	var claims []host.Claim
	for _, h := range v.Holders {
		claims = append(claims, h.Claim)
	}
	out.Claims = claimViews(claims, nodes)
	executor, hasController := executorOf(v, nodes)
	out.Executor = executor
	if executor == "" && (hasController || len(v.Attachments) > 0) {
		out.Notices = append(out.Notices, noExecutor(*v, nodes))
	}
	out.Notices = append(out.Notices, s.clusterNotices(ctx)...)
	for _, n := range nodes {
		if notice := lostHolder(n, *v, claims); notice != nil {
			out.Notices = append(out.Notices, *notice)
		}
	}
	out.Notices = slices.Concat(out.Notices, heldNotices(name, out.Holders), unusedAttachments(*v),
		e.explainWaits(ctx, v.Waiting))
	return out, nil
}

// executorOf returns the living node that makes the controller calls of a volume, if there is one. hasController
// reports whether a node has a controller of the volume's plugin. That node need not be alive.
func executorOf(v *host.VolumeStatus, nodes []host.NodeStatus) (executor host.NodeName, hasController bool) {
	for _, n := range nodes {
		for _, p := range n.Plugins {
			if p.Plugin != v.Plugin {
				continue
			}
			controls := p.Health(host.RoleController) != ""
			hasController = hasController || controls
			if n.Alive && (p.Executor || controls && v.Node == n.Name) {
				executor = n.Name
			}
		}
	}
	return executor, hasController
}

// noExecutor explains that no node can make the controller calls of a volume's plugin.
func noExecutor(v host.VolumeStatus, nodes []host.NodeStatus) Notice {
	if v.Node != "" {
		return noOwnNode(v, nodes)
	}
	n := Notice{Kind: NoticeWaiting, Summary: fmt.Sprintf("no node makes the controller calls of plugin %s", v.Plugin),
		Meaning: "The volume can be attached, detached and changed only by the plugin's controller.",
		Next:    "The first node with a healthy controller of the plugin continues the unfinished calls.",
	}
	n.command("inspect the plugin", pluginCommand(v.Plugin))
	n.command("see which nodes run it", "holdfast node list")
	return n
}

// noOwnNode explains that the node of a volume (controller_scope = "node") cannot make the volume's controller calls.
func noOwnNode(v host.VolumeStatus, nodes []host.NodeStatus) Notice {
	state := "not in the list of nodes"
	n := Notice{Kind: NoticeWaiting,
		Meaning: "The plugin keeps its volumes on their node. No other node can change the volume.",
		Next:    "Unfinished calls continue once the node is back with a healthy controller of the plugin.",
	}
	for _, node := range nodes {
		if node.Name != v.Node {
			continue
		}
		state = NodeState(node)
		if node.Alive {
			state += ", without a controller of the plugin"
		}
		n.command("inspect the node", display.Command("holdfast node status", string(node.Name)))
		if node.State == registry.NodeOutOfService || node.State == registry.NodeFenced {
			n.command("if the node never comes back, remove the record of the volume",
				VolumeCommand("deregister", v.VolumeName()))
		}
	}
	n.Summary = fmt.Sprintf("node %s, which has volume %s, is %s", v.Node, v.VolumeName(), state)
	return n
}

// OutOfServiceCommand is the command that declares a node out of service.
func OutOfServiceCommand(node host.NodeName) string {
	return display.Command("holdfast node out-of-service --confirm="+display.Quote(string(node)), string(node))
}

// lostHolder is the notice about a node that is not alive or not in service, and that holds the volume or has it
// attached. It is nil for any other node.
func lostHolder(node host.NodeStatus, v host.VolumeStatus, claims []host.Claim) *Notice {
	state := NodeState(node)
	if node.Alive && (state == string(registry.NodeReady) || state == string(registry.NodeDraining)) {
		return nil
	}
	n := &Notice{Kind: NoticeTrouble}
	for _, c := range claims {
		if c.Node == node.Name {
			n.fact("Claim", fmt.Sprintf("alloc %s, %s, since %s", short(c.Alloc), c.Usage.Access, since(c.Since)))
			n.releaseClaimCommand(v.VolumeName(), c.Alloc)
		}
	}
	for _, at := range v.Attachments {
		if at.Node == node.Name {
			n.fact("Attachment", fmt.Sprintf("%s as %s", at.State, at.NodeID))
		}
	}
	if len(n.Facts) == 0 {
		return nil
	}
	n.Summary = fmt.Sprintf("volume %s is held by node %s, which is %s", v.VolumeName(), node.Name, state)
	if state == "suspect" {
		n.fact("Suspect since (seen here)", since(node.SuspectSince))
		n.Meaning = "etcd does not hear from the node. Tasks may still run there and write to the volume."
		n.Next = "The claim stays until the node is back, or is fenced or declared out of service."
		n.Commands = append([]Command{{"if the machine is certainly off, release all its claims",
			OutOfServiceCommand(node.Name)}}, n.Commands...)
		return n
	}
	n.fact("Since", since(node.Since))
	n.fact("By", node.Declaration())
	n.Next = "Holdfast detaches the volume from the node, and then releases its claims."
	if v.Node == node.Name {
		n.Next = "Holdfast releases the claims. The node detaches the volume when it is back. If it never comes " +
			"back: " + VolumeCommand("deregister", v.VolumeName())
	}
	switch {
	case node.Alive:
		n.Meaning = "The node is back and unmounts its volumes. A task there may still keep this volume busy."
		n.Next = "The node unmounts and detaches the volume, and then releases its claims."
		n.command("see on that node what keeps the volume busy", "holdfast alloc status")
	case node.State == registry.NodeFenced:
		n.Meaning = "The node was fenced, so nothing there can write to the volume."
	default:
		n.Meaning = "Nothing runs on the node any more, as was declared. If its machine still runs, tasks may write " +
			"to the volume."
	}
	return n
}

// releaseClaimCommand adds the command that shows what a release of an alloc's claims by force would do.
func (n *Notice) releaseClaimCommand(v registry.VolumeName, alloc host.AllocID) {
	n.command("release only this claim; --dry-run first shows what that does",
		display.ObjectCommand("holdfast claim release --dry-run --force", v.Namespace, string(v.ID), string(alloc)))
}

// unusedAttachments returns notices about attachments to nodes that have no claim.
func unusedAttachments(v host.VolumeStatus) (list []Notice) {
	for _, at := range v.Attachments {
		if slices.ContainsFunc(v.Holders, func(h registry.Holder) bool { return h.Claim.Node == at.Node }) {
			continue
		}
		n := Notice{Kind: NoticePending,
			Summary: fmt.Sprintf("volume %s is attached to node %s without a claim", v.VolumeName(), at.Node),
			Next:    "If a release is under way there, it detaches the volume."}
		if at.Detaching.By != "" {
			n.fact("Detached by", at.Detaching.By+", since "+since(at.Detaching.Since))
			n.Next = "Holdfast detaches the volume."
		}
		n.command("detach it by hand", VolumeCommand("detach --node="+display.Quote(string(at.Node)), v.VolumeName()))
		list = append(list, n)
	}
	return list
}

// postReleaseClaim releases the claims of an alloc on a volume by force.
func (s *Server) postReleaseClaim(r *http.Request) (any, error) {
	name, alloc := volumeName(r), host.AllocID(r.PathValue("alloc"))
	steps, err := callWithin(s, r, "volume "+name.String(), func(ctx context.Context) ([]host.ReleaseStep, error) {
		return s.host.ForceReleaseClaim(ctx, name, alloc, forceOf(r))
	})
	s.agent.Retry()
	return append([]host.ReleaseStep{}, steps...), err
}

// Nodes lists the nodes of the cluster.
func (c *Client) Nodes(ctx context.Context) ([]host.NodeStatus, error) {
	return get[[]host.NodeStatus](ctx, c, "/nodes")
}

// Node returns a node.
func (c *Client) Node(ctx context.Context, name string) (host.NodeStatus, error) {
	return get[host.NodeStatus](ctx, c, "/node/"+segment(name))
}

// DrainNode begins or ends the drain of a node. A deadline of 0 means none. The agent sets the operator.
func (c *Client) DrainNode(
	ctx context.Context, name string, end bool, deadline time.Duration, reason string,
) (host.NodeStatus, error) {
	q := url.Values{"end": {fmt.Sprint(end)}, "deadline": {deadline.String()}, "reason": {reason}}
	return post[host.NodeStatus](ctx, c, "/node/"+segment(name)+"/drain?"+q.Encode(), nil)
}

// NodeOutOfService declares a node out of service. confirm repeats its name. The agent sets the operator.
func (c *Client) NodeOutOfService(ctx context.Context, name, confirm, reason string) (host.NodeStatus, error) {
	q := url.Values{"confirm": {confirm}, "reason": {reason}}
	return post[host.NodeStatus](ctx, c, "/node/"+segment(name)+"/out-of-service?"+q.Encode(), nil)
}

// ForgetNode removes a node that never comes back. The agent sets the operator.
func (c *Client) ForgetNode(ctx context.Context, name, reason string) error {
	_, err := post[struct{}](ctx, c, "/node/"+segment(name)+"/forget?"+url.Values{"reason": {reason}}.Encode(), nil)
	return err
}

// Claims lists the claims on all volumes.
func (c *Client) Claims(ctx context.Context) ([]Claim, error) { return get[[]Claim](ctx, c, "/claims") }

// ExplainClaims explains the claims on a volume.
func (c *Client) ExplainClaims(ctx context.Context, n host.VolumeName) (ClaimExplanation, error) {
	return get[ClaimExplanation](ctx, c, volumePath(n, "/claims", nil))
}

// ReleaseClaim releases the claims of an alloc on a volume by force. The agent sets the operator.
func (c *Client) ReleaseClaim(
	ctx context.Context, n host.VolumeName, alloc string, f host.Force,
) ([]host.ReleaseStep, error) {
	return post[[]host.ReleaseStep](ctx, c, volumePath(n, "/claim/"+segment(alloc)+"/release", forceQuery(c.wait(), f)),
		nil)
}
