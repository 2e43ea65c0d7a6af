package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel/trace"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/internal/tracing"
	"holdfast/registry"
)

// Client calls the agent behind a socket.
type Client struct {
	Wait time.Duration // bounds calls that need a volume's plugin; 0 means no bound

	// Waiting, if set, is called every second while a call has been without an answer for more than 2 s. It gets what
	// the call waits for, and since when. An empty text says that the wait is over. Concurrent calls need a Client
	// each.
	Waiting func(text string, since time.Time)

	// OnNode, if not empty, is the node of the cluster that stores the client's new volumes.
	OnNode string

	socket string
	web    *http.Client
}

// ErrNoAgent means that no agent answers at the socket.
var ErrNoAgent = errors.New("no agent is running")

// NewClient returns a client. It connects at the first call.
func NewClient(socket string) *Client {
	c := &Client{socket: socket}
	dialer := &net.Dialer{Timeout: 5 * time.Second}
	c.web = &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, "unix", socket)
		},
	}}
	return c
}

// Trace makes spans for calls whose context has a span. With a nil p it makes none. Call Trace before the first call.
func (c *Client) Trace(p trace.TracerProvider) {
	if p != nil {
		c.web.Transport = otelhttp.NewTransport(c.web.Transport, otelhttp.WithTracerProvider(p),
			otelhttp.WithPropagators(tracing.Propagator),
			otelhttp.WithFilter(func(r *http.Request) bool { return tracing.InTrace(r.Context()) }))
	}
}

// segment escapes an ID for a URL path. An ID of dots alone would be a relative path.
func segment(id string) string {
	if strings.Trim(id, ".") == "" {
		return strings.ReplaceAll(id, ".", "%2E")
	}
	return url.PathEscape(id)
}

func get[T any](ctx context.Context, c *Client, path string) (T, error) {
	return do[T](ctx, c, http.MethodGet, path, nil)
}

func post[T any](ctx context.Context, c *Client, path string, in any) (T, error) {
	return do[T](ctx, c, http.MethodPost, path, in)
}

func do[T any](ctx context.Context, c *Client, method, path string, in any) (out T, err error) {
	body, err := c.open(ctx, method, path, in)
	if err != nil {
		return out, err
	}
	defer body.Close()
	if err := json.NewDecoder(body).Decode(&out); err != nil {
		return out, fmt.Errorf("cannot decode the agent's answer to %s %s: %w", method, path, err)
	}
	return out, nil
}

// remove sends a DELETE request, whose answer is empty.
func (c *Client) remove(ctx context.Context, path string) error {
	_, err := do[struct{}](ctx, c, http.MethodDelete, path, nil)
	return err
}

// open sends a request and returns the body of the answer, which the caller closes.
func (c *Client) open(ctx context.Context, method, path string, in any) (io.ReadCloser, error) {
	var text []byte
	if in != nil {
		var err error
		if text, err = json.Marshal(in); err != nil {
			return nil, err
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, baseURL+path, bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	return c.send(req)
}

// baseURL is the beginning of all URLs. The client connects to its socket, whatever the host name is.
const baseURL = "http://agent/v1"

// send sends a request and returns the body of the answer, which the caller closes. An answer with an error is returned
// as that error. If nothing answers at the socket, the error is ErrNoAgent.
func (c *Client) send(req *http.Request) (io.ReadCloser, error) {
	ctx := req.Context()
	id, stop := c.reportWait(ctx)
	defer stop()
	if id != "" {
		req.Header.Set(requestHeader, id)
	}
	reply, err := c.web.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if e, is := errors.AsType[*url.Error](err); is {
			err = e.Err
		}
		return nil, fmt.Errorf("%w at %s: %w", ErrNoAgent, c.socket, err)
	}
	if reply.StatusCode >= http.StatusBadRequest {
		defer reply.Body.Close()
		return nil, errorOf(reply)
	}
	return reply.Body, nil
}

// errorOf returns the error in a reply, with its kind.
func errorOf(reply *http.Response) error {
	var e errorBody
	if err := json.NewDecoder(io.LimitReader(reply.Body, maxBody)).Decode(&e); err != nil {
		return registry.Errorf(registry.ErrInternal, "unexpected HTTP status from the agent: %s", reply.Status)
	}
	return e.err()
}

// err returns the error with its kind.
func (e errorBody) err() error {
	for _, kind := range registry.Kinds {
		if kind.Error() == e.Kind {
			return registry.Errorf(kind, "%s", e.Error)
		}
	}
	return errors.New(e.Error)
}

// Self describes the agent.
func (c *Client) Self(ctx context.Context) (Self, error) { return get[Self](ctx, c, "/agent/self") }

// Shim describes the shim.
func (c *Client) Shim(ctx context.Context) (Shim, error) { return get[Shim](ctx, c, "/shim") }

// Jobs lists jobs, without their allocs.
func (c *Client) Jobs(ctx context.Context) ([]Job, error) { return get[[]Job](ctx, c, "/jobs") }

// Job returns a job with its allocs.
func (c *Client) Job(ctx context.Context, id string) (Job, error) {
	return get[Job](ctx, c, "/job/"+segment(id))
}

// RunJob submits a job.
func (c *Client) RunJob(ctx context.Context, src Submission, o agent.SubmitOptions) (Job, error) {
	q := url.Values{"force": {fmt.Sprint(o.Force)}, "rerun": {fmt.Sprint(o.Rerun)}}
	return post[Job](ctx, c, "/jobs?"+q.Encode(), src)
}

// PlanJob says for each alloc of a job whether the node could mount its volumes now. It changes nothing.
func (c *Client) PlanJob(ctx context.Context, src Submission) ([]agent.Placement, error) {
	return post[[]agent.Placement](ctx, c, "/jobs/plan", src)
}

// StopJob stops a job. It does not wait: see AwaitStopped.
func (c *Client) StopJob(ctx context.Context, id string, o agent.StopOptions) error {
	q := url.Values{"purge": {fmt.Sprint(o.Purge)}, "force": {fmt.Sprint(o.Force)}}
	return c.remove(ctx, "/job/"+segment(id)+"?"+q.Encode())
}

// Allocs lists all allocs.
func (c *Client) Allocs(ctx context.Context) ([]Alloc, error) {
	return get[[]Alloc](ctx, c, "/allocs")
}

// Alloc returns the alloc whose ID starts with prefix, with its volumes.
func (c *Client) Alloc(ctx context.Context, prefix string) (Alloc, error) {
	return get[Alloc](ctx, c, "/alloc/"+segment(prefix))
}

// Logs copies the logs of a task.
func (c *Client) Logs(ctx context.Context, alloc, task string, o agent.LogOptions, to io.Writer) error {
	quiet := *c // a task may write nothing for a long time
	quiet.Waiting = nil
	q := url.Values{"stream": {string(o.Stream)}, "follow": {fmt.Sprint(o.Follow)}, "tail": {fmt.Sprint(o.Tail)}}
	body, err := quiet.open(ctx, http.MethodGet, "/alloc/"+segment(alloc)+"/logs/"+segment(task)+"?"+q.Encode(), nil)
	if err != nil {
		return err
	}
	defer body.Close()
	_, err = io.Copy(to, body)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return registry.Errorf(registry.ErrUnavailable,
			"the logs are incomplete, because the agent has ended or could not read the rest; run the command again")
	}
	return err
}

// Plugins lists plugins.
func (c *Client) Plugins(ctx context.Context) ([]Plugin, error) {
	return get[[]Plugin](ctx, c, "/plugins")
}

// Plugin returns a plugin.
func (c *Client) Plugin(ctx context.Context, id string) (Plugin, error) {
	return get[Plugin](ctx, c, "/plugin/"+segment(id))
}

// Volumes lists volumes of a plugin, or all if plugin is empty.
func (c *Client) Volumes(ctx context.Context, plugin string) ([]Volume, error) {
	return get[[]Volume](ctx, c, "/volumes?"+url.Values{"plugin": {plugin}}.Encode())
}

func volumePath(n host.VolumeName, below string, more url.Values) string {
	return namedPath("/volume", n.Namespace, string(n.ID), below, more)
}

// namedPath returns the path of an object in a namespace, or of a resource below it.
func namedPath(kind string, namespace registry.Namespace, id, below string, more url.Values) string {
	q := url.Values{"namespace": {string(namespace)}}
	maps.Copy(q, more)
	return kind + "/" + segment(id) + below + "?" + q.Encode()
}

// Volume returns a volume.
func (c *Client) Volume(ctx context.Context, n host.VolumeName) (Volume, error) {
	return get[Volume](ctx, c, volumePath(n, "", nil))
}

// VolumeStats returns the usage of a volume in each unit.
func (c *Client) VolumeStats(ctx context.Context, n host.VolumeName) ([]host.VolumeUsage, error) {
	return get[[]host.VolumeUsage](ctx, c, volumePath(n, "/stats", c.wait()))
}

// Doctor inspects the records, or carries out the repair plan with the digest of ask.
func (c *Client) Doctor(ctx context.Context, ask DoctorRequest) (host.Diagnosis, error) {
	return post[host.Diagnosis](ctx, c, "/doctor?"+c.wait().Encode(), ask)
}

func (c *Client) wait() url.Values { return url.Values{"wait": {c.Wait.String()}} }

// CreateVolume creates a volume.
func (c *Client) CreateVolume(ctx context.Context, src Submission) (Volume, error) {
	return post[Volume](ctx, c, "/volumes/create?"+c.newVolumeQuery(), src)
}

// newVolumeQuery returns the query of a call for a new volume.
func (c *Client) newVolumeQuery() string {
	q := c.wait()
	if c.OnNode != "" {
		q.Set("node", c.OnNode)
	}
	return q.Encode()
}

// RegisterVolume registers an existing volume.
func (c *Client) RegisterVolume(ctx context.Context, src Submission) (Volume, error) {
	return post[Volume](ctx, c, "/volumes/register?"+c.newVolumeQuery(), src)
}

// ExpandVolume expands a volume.
func (c *Client) ExpandVolume(ctx context.Context, n host.VolumeName, want host.CapacityRange) (Volume, error) {
	return post[Volume](ctx, c, volumePath(n, "/expand", c.wait()), want)
}

// DeleteVolume deletes a volume at its plugin.
func (c *Client) DeleteVolume(ctx context.Context, n host.VolumeName) error {
	return c.remove(ctx, volumePath(n, "", c.wait()))
}

// DeregisterVolume deletes the record of a volume. The plugin keeps the volume.
func (c *Client) DeregisterVolume(ctx context.Context, n host.VolumeName) error {
	q := c.wait()
	q.Set("deregister", "true")
	return c.remove(ctx, volumePath(n, "", q))
}

// Events calls fn with each event after the given number. Without follow it returns after the past events. With follow
// it returns when ctx or the agent ends. An error means that events are missing.
func (c *Client) Events(ctx context.Context, after uint64, follow bool, fn func(host.Event) error) error {
	q := url.Values{"after": {fmt.Sprint(after)}, "follow": {fmt.Sprint(follow)}}
	body, err := c.open(ctx, http.MethodGet, "/events?"+q.Encode(), nil)
	if err != nil {
		return err
	}
	return eachLine(body, func(line eventLine) error {
		if line.Error != nil {
			return line.Error.err()
		}
		return fn(line.Event)
	})
}

// eachLine calls fn with each JSON value of a body, and closes the body.
func eachLine[T any](body io.ReadCloser, fn func(T) error) error {
	defer body.Close()
	for d := json.NewDecoder(body); ; {
		var line T
		switch err := d.Decode(&line); {
		case errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, io.ErrUnexpectedEOF):
			return registry.Errorf(registry.ErrUnavailable,
				"the answer is incomplete, because the agent has ended; run the command again")
		case err != nil:
			return err
		}
		if err := fn(line); err != nil {
			return err
		}
	}
}

// Swap replaces the shim and returns when the new shim serves.
func (c *Client) Swap(ctx context.Context, ask SwapRequest) (host.SwapReport, error) {
	return post[host.SwapReport](ctx, c, "/shim/swap", ask)
}

// Swaps lists earlier swaps, newest first.
func (c *Client) Swaps(ctx context.Context) ([]host.SwapReport, error) {
	return get[[]host.SwapReport](ctx, c, "/shim/history")
}
