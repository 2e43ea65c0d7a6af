package control

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel/trace"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/host/agent/taskdriver"
	"holdfast/internal/tracing"
	"holdfast/registry"
)

// Host is the part of a *host.Host that the API serves.
type Host interface {
	agent.Storage
	agent.Planner

	Parse(ctx context.Context, src host.Source, o host.ParseOptions) (*host.Job, host.Diagnostics, error)
	ParseVolume(ctx context.Context, src host.Source, o host.ParseOptions) (host.VolumeSpec, host.Diagnostics, error)

	CreateVolume(ctx context.Context, s host.VolumeSpec) (host.VolumeStatus, error)
	RegisterVolume(ctx context.Context, s host.VolumeSpec) (host.VolumeStatus, error)
	UpdateVolume(ctx context.Context, spec host.VolumeSpec, dryRun bool) (host.VolumeUpdate, error)
	AdoptVolume(ctx context.Context, spec host.VolumeSpec) (host.VolumeStatus, error)
	VolumesAtPlugin(ctx context.Context, plugin host.PluginID) ([]host.PluginVolume, error)
	ModifyVolume(ctx context.Context, n host.VolumeName, parameters map[string]string) (host.VolumeStatus, error)
	ExpandVolume(ctx context.Context, n host.VolumeName, want host.CapacityRange) (host.VolumeStatus, error)
	DeleteVolume(ctx context.Context, n host.VolumeName) error
	DeregisterVolume(ctx context.Context, n host.VolumeName) error
	DetachVolume(ctx context.Context, n host.VolumeName, node string, f host.Force) ([]host.ReleaseStep, error)
	ForceReleaseAlloc(ctx context.Context, id host.AllocID, f host.Force) ([]host.ReleaseStep, error)
	VolumeStats(ctx context.Context, n host.VolumeName) ([]host.VolumeUsage, host.Seq, error)

	CreateSnapshot(ctx context.Context, s host.SnapshotSpec) (host.Snapshot, error)
	DeleteSnapshot(ctx context.Context, n host.SnapshotName) error
	DeregisterSnapshot(ctx context.Context, n host.SnapshotName) error
	Snapshots(ctx context.Context, q host.SnapshotQuery) ([]host.Snapshot, host.Seq, error)
	CreateGroupSnapshot(ctx context.Context, s host.SnapshotSpec) (host.Snapshot, error)
	DeleteGroupSnapshot(ctx context.Context, n host.SnapshotName) error
	DeregisterGroupSnapshot(ctx context.Context, n host.SnapshotName) error
	GroupSnapshots(ctx context.Context, q host.SnapshotQuery) ([]host.Snapshot, host.Seq, error)
	SnapshotBlocks(ctx context.Context, q host.BlockQuery, fn func(host.Blocks) error) error
	SnapshotsAtPlugin(ctx context.Context, plugin host.PluginID) ([]host.Snapshot, error)

	DrainNode(ctx context.Context, node host.NodeName, o host.DrainOptions) (host.NodeStatus, error)
	NodeOutOfService(ctx context.Context, node host.NodeName, o host.OutOfServiceOptions) (host.NodeStatus, error)
	ForgetNode(ctx context.Context, node host.NodeName, o host.ForgetOptions) error
	Claims(ctx context.Context, q host.ClaimQuery) ([]host.Claim, host.Seq, error)
	ForceReleaseClaim(
		ctx context.Context, n host.VolumeName, alloc host.AllocID, f host.Force,
	) ([]host.ReleaseStep, error)

	Plugins(ctx context.Context, q host.PluginQuery) (host.PluginList, host.Seq, error)
	PluginCapacity(ctx context.Context, q host.CapacityQuery) (host.PluginCapacity, error)
	Watch(ctx context.Context, o host.WatchOptions, fn func(host.Event) error) error
	Doctor(ctx context.Context, repair bool, digest string) (host.Diagnosis, error)

	Status(ctx context.Context) (host.ShimStatus, error)
	ShimState() host.ShimState
	SwapAs(ctx context.Context, b host.Binary, operator string) (host.SwapReport, error)
	Swaps() []host.SwapReport
	ServeCSI(ctx context.Context, plugin host.PluginID, l net.Listener) error
	EndpointUses(ctx context.Context, q host.EndpointQuery) ([]host.EndpointUse, host.Seq, error)
	ForgetEndpointUses(ctx context.Context, plugin host.PluginID, volume host.ExternalID, f host.Force) error
}

var _ Host = (*host.Host)(nil)

// Server is the API of one agent.
type Server struct {
	agent *agent.Agent
	host  Host
	self  Self
	log   hclog.Logger

	// Metrics answers GET /v1/metrics; nil: 404. Set before Serve.
	Metrics http.Handler
	// TracerProvider makes spans of requests that carry a trace; nil: none. Set before Serve.
	TracerProvider trace.TracerProvider

	waits    sync.Map       // name of each named request in flight -> *waitDescription
	upgraded sync.WaitGroup // connections that serve CSI clients or programs; the HTTP server does not wait for them
}

// NewServer returns the API server of an agent.
func NewServer(a *agent.Agent, h Host, self Self, log hclog.Logger) *Server {
	self.Version, self.PID, self.Node, self.Drivers = host.Version, os.Getpid(), a.Node(), a.DriverNames()
	return &Server{agent: a, host: h, self: self, log: log}
}

// errEnding is the error of waiting requests when the agent ends.
var errEnding = registry.Errorf(registry.ErrUnavailable, "the agent is ending")

// Serve answers on l until ctx ends. Then it cancels the calls in flight, waits up to 2 s for their answers, and closes
// l. It returns once the connections of CSI clients and programs have ended too.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	life, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() { cancel(errEnding) })
	defer stop()
	web := &http.Server{Handler: s.traced(s.handler()), ReadHeaderTimeout: 10 * time.Second,
		BaseContext: func(net.Listener) context.Context { return life }, ConnContext: withOperator}
	served := make(chan error, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer s.upgraded.Wait()
	defer cancel(nil)
	wg.Go(func() { served <- web.Serve(l) })
	select {
	case err := <-served:
		return fmt.Errorf("serve the control socket: %w", err)
	case <-ctx.Done():
	}
	grace, done := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer done()
	err := web.Shutdown(grace)
	if errors.Is(err, context.DeadlineExceeded) {
		err = web.Close()
	}
	return err
}

// handler answers a request with a value for JSON.
type handler func(*http.Request) (any, error)

// withBody returns a handler that first decodes the request's body.
func withBody[In any](answer func(*http.Request, In) (any, error)) handler {
	return func(r *http.Request) (any, error) {
		var in In
		d := json.NewDecoder(http.MaxBytesReader(nil, r.Body, maxBody))
		if err := d.Decode(&in); err != nil {
			return nil, registry.Invalid("the request's body: %w", err)
		}
		return answer(r, in)
	}
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	snapshots, groups := s.snapshotRoutes()
	for pattern, answer := range map[string]handler{
		"GET /v1/agent/self":          s.getSelf,
		"POST /v1/jobs":               withBody(s.postJob),
		"POST /v1/jobs/plan":          withBody(s.postPlan),
		"GET /v1/jobs":                s.getJobs,
		"GET /v1/job/{id}":            s.getJob,
		"GET /v1/job/{id}/source":     s.getJobSource,
		"POST /v1/job/{id}/start":     s.postStartJob,
		"GET /v1/job/{id}/await":      s.awaitJob,
		"GET /v1/job/{id}/stopped":    s.awaitStopped,
		"GET /v1/plugin/{id}/await":   s.awaitRoll,
		"GET /v1/wait/{id}":           s.getWait,
		"DELETE /v1/job/{id}":         s.deleteJob,
		"GET /v1/allocs":              s.getAllocs,
		"GET /v1/alloc/{id}":          s.getAlloc,
		"POST /v1/alloc/{id}/release": s.postForceRelease,
		"POST /v1/alloc/{id}/restart": s.postRestart,
		"POST /v1/alloc/{id}/stop":    s.postStopAlloc,
		"GET /v1/plugins":             s.getPlugins,
		"GET /v1/plugin/{id}":         s.getPlugin,
		"POST /v1/plugins/capacity":   withBody(s.postCapacity),
		"GET /v1/plugin/{id}/uses":    s.getEndpointUses,
		"DELETE /v1/plugin/{id}/uses": s.deleteEndpointUses,
		"POST /v1/plugin/{id}/roll":   s.postRoll,
		"GET /v1/volumes":             s.getVolumes,
		"POST /v1/volumes/create":     s.postVolume(s.host.CreateVolume),
		"POST /v1/volumes/register":   s.postVolume(s.register),
		"POST /v1/volume/{id}/expand": withBody(s.expandVolume),
		"POST /v1/volumes/update":     withBody(s.updateVolume),
		"POST /v1/volumes/adopt":      s.postVolume(s.adopt),
		"POST /v1/volume/{id}/modify": withBody(s.modifyVolume),
		"POST /v1/volume/{id}/detach": s.postDetach,
		"GET /v1/volume/{id}":         s.getVolume,
		"GET /v1/volume/{id}/stats":   s.getStats,
		"DELETE /v1/volume/{id}":      s.deleteVolume,
		"GET /v1/snapshots":           s.getSnapshots,
		"POST /v1/snapshots":          withBody(snapshots.post),
		"GET /v1/snapshot/{id}":       snapshots.get,
		"DELETE /v1/snapshot/{id}":    snapshots.delete,
		"GET /v1/nodes":               s.getNodes,
		"GET /v1/node/{id}":           s.getNode,
		"POST /v1/node/{id}/drain":    s.postDrain,
		"GET /v1/claims":              s.getClaims,
		"GET /v1/volume/{id}/claims":  s.explainClaims,
		"POST /v1/doctor":             withBody(s.postDoctor),
		"GET /v1/shim":                s.getShim,
		"GET /v1/shim/history":        s.getSwaps,
		"POST /v1/shim/swap":          withBody(s.postSwap),

		"POST /v1/node/{id}/out-of-service":          s.postOutOfService,
		"POST /v1/node/{id}/forget":                  s.postForgetNode,
		"POST /v1/volume/{id}/claim/{alloc}/release": s.postReleaseClaim,

		"GET /v1/group-snapshots":        groups.getAll,
		"POST /v1/group-snapshots":       withBody(groups.post),
		"GET /v1/group-snapshot/{id}":    groups.get,
		"DELETE /v1/group-snapshot/{id}": groups.delete,
	} {
		mux.HandleFunc(pattern, s.jsonHandler(answer))
	}
	if s.Metrics != nil {
		mux.Handle("GET /v1/metrics", s.Metrics)
	}
	mux.HandleFunc("GET /v1/events", s.streamEvents)
	mux.HandleFunc("GET /v1/snapshot/{id}/blocks", s.streamBlocks)
	mux.HandleFunc("GET /v1/alloc/{id}/logs/{task}", s.streamLogs)
	mux.HandleFunc("GET /v1/plugin/{id}/csi", s.serveCSI)
	mux.HandleFunc("GET /v1/alloc/{id}/exec/{task}", s.serveExec)
	return mux
}

// jsonHandler returns a handler that writes the answer to a request as JSON.
func (s *Server) jsonHandler(answer handler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		r, end := s.registerNamed(r)
		defer end()
		v, err := answer(r)
		if err != nil {
			writeError(w, err)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(v)
	}
}

// traced returns a handler that makes spans of requests. Without a TracerProvider it returns h.
func (s *Server) traced(h http.Handler) http.Handler {
	if s.TracerProvider == nil {
		return h
	}
	return otelhttp.NewHandler(h, "", otelhttp.WithTracerProvider(s.TracerProvider),
		otelhttp.WithPropagators(tracing.Propagator),
		otelhttp.WithFilter(func(r *http.Request) bool { return r.Header.Get("traceparent") != "" }))
}

// statuses maps kinds of errors to HTTP statuses; all others are internal errors.
var statuses = map[error]int{
	registry.ErrInvalid:     http.StatusBadRequest,
	registry.ErrDenied:      http.StatusForbidden,
	registry.ErrNotFound:    http.StatusNotFound,
	registry.ErrConflict:    http.StatusConflict,
	registry.ErrExists:      http.StatusConflict,
	registry.ErrUnsupported: http.StatusUnprocessableEntity,
	registry.ErrUnavailable: http.StatusServiceUnavailable,
	registry.ErrExhausted:   http.StatusInsufficientStorage,
}

// errorBodyOf returns the answer for an error, with its HTTP status.
func errorBodyOf(err error) (body errorBody, status int) {
	body, status = errorBody{Error: err.Error()}, http.StatusInternalServerError
	for _, kind := range registry.Kinds {
		if errors.Is(err, kind) {
			body.Kind = kind.Error()
			return body, cmp.Or(statuses[kind], status)
		}
	}
	return body, status
}

func writeError(w http.ResponseWriter, err error) {
	body, status := errorBodyOf(err)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body)
}

// maxBody bounds a request. The shim accepts texts of 64 KiB.
const maxBody = 1 << 20

func (s *Server) getSelf(*http.Request) (any, error) { return s.self, nil }

// getShim describes the shim. It does not wait for a shim that does not serve.
func (s *Server) getShim(r *http.Request) (any, error) { return s.shim(r.Context()) }

func (s *Server) shim(ctx context.Context) (Shim, error) {
	out := Shim{ShimState: s.host.ShimState()}
	if !out.Serving {
		return out, nil
	}
	st, err := s.host.Status(ctx)
	out.Version, out.Generation, out.Index, out.Schema = st.Version, st.Generation, st.Index, st.Schema
	out.Protocol, out.ClusterProblem = st.Protocol, st.ClusterProblem
	out.OpenIntents, out.Instances, out.Allocs = st.OpenIntents, st.Instances, st.Allocs
	return out, err
}

// flushWriter flushes each write of a stream.
type flushWriter struct {
	http.ResponseWriter
	started bool
}

func (f *flushWriter) Write(p []byte) (int, error) {
	f.started = true
	n, err := f.ResponseWriter.Write(p)
	_ = http.NewResponseController(f.ResponseWriter).Flush()
	return n, err
}

// streamLogs copies logs. After an error in the middle, or if the agent ends, it aborts the connection, so that the
// client sees an error too.
func (s *Server) streamLogs(w http.ResponseWriter, r *http.Request) {
	rec, err := s.agent.Find(r.PathValue("id"))
	if err != nil {
		writeError(w, err)
		return
	}
	tail, err := strconv.Atoi(cmp.Or(query(r, "tail"), "0"))
	if err != nil || tail < 0 {
		writeError(w, registry.Invalid("tail: %q is not a number of lines", query(r, "tail")))
		return
	}
	stream, task := taskdriver.Stream(query(r, "stream")), host.TaskName(r.PathValue("task"))
	o := agent.LogOptions{Stream: cmp.Or(stream, taskdriver.Stdout), Follow: isTrue(r, "follow"), Tail: tail}
	w.Header().Set("Content-Type", "application/octet-stream")
	out := &flushWriter{ResponseWriter: w}
	err = s.agent.Logs(r.Context(), rec.ID, task, o, out)
	switch {
	case err == nil:
	case !out.started:
		writeError(w, err)
	default:
		if r.Context().Err() == nil {
			s.log.Warn("logs ended early", "alloc", rec.ID, "task", task, "error", err)
		}
		panic(http.ErrAbortHandler)
	}
}

func query(r *http.Request, name string) string { return r.URL.Query().Get(name) }

func isTrue(r *http.Request, name string) bool { return query(r, name) == "true" }

func pluginID(r *http.Request) host.PluginID { return host.PluginID(r.PathValue("id")) }

// streamEvents sends events, one per line. If the stream ends early, its last line has an error.
func (s *Server) streamEvents(w http.ResponseWriter, r *http.Request) {
	after, err := strconv.ParseUint(cmp.Or(query(r, "after"), "0"), 10, 64)
	if err != nil {
		writeError(w, registry.Invalid("after: %q is not the number of an event", query(r, "after")))
		return
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(w).Flush()
	out, follow := json.NewEncoder(&flushWriter{ResponseWriter: w}), isTrue(r, "follow")
	err = s.host.Watch(r.Context(), host.WatchOptions{After: host.Seq(after), Past: !follow},
		func(e host.Event) error { return out.Encode(eventLine{Event: e}) })
	if err == nil || follow && r.Context().Err() != nil {
		return
	}
	s.log.Warn("event stream ended early", "error", err)
	body, _ := errorBodyOf(fmt.Errorf("event stream ended early: %w", err))
	_ = out.Encode(eventLine{Error: &body})
}

// SwapRequest asks to replace the shim.
type SwapRequest struct {
	Path   string `json:"path"`
	SHA256 string `json:"sha256,omitempty"`
}

// postSwap replaces the shim. The history also has the report of a failed swap.
func (s *Server) postSwap(r *http.Request, ask SwapRequest) (any, error) {
	return s.host.SwapAs(r.Context(), host.Binary{Path: ask.Path, SHA256: ask.SHA256}, operatorOf(r))
}

func (s *Server) getSwaps(*http.Request) (any, error) {
	list := s.host.Swaps()
	if list == nil {
		list = []host.SwapReport{}
	}
	return list, nil
}
