package volumeplugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/internal/proc"
	"holdfast/registry"
)

// Storage is the part of host.Host that the plugin uses.
type Storage interface {
	agent.Volumes
	CreateVolume(ctx context.Context, s host.VolumeSpec) (host.VolumeStatus, error)
	RegisterVolume(ctx context.Context, s host.VolumeSpec) (host.VolumeStatus, error)
	DeleteVolume(ctx context.Context, n host.VolumeName) error
	DeregisterVolume(ctx context.Context, n host.VolumeName) error
	Parse(ctx context.Context, src host.Source, o host.ParseOptions) (*host.Job, host.Diagnostics, error)
	ParseVolume(ctx context.Context, src host.Source, o host.ParseOptions) (host.VolumeSpec, host.Diagnostics, error)
}

var _ Storage = (*host.Host)(nil)

// Defaults are the values for options that a Create leaves out. Plugin must be set for volumes that "docker run -v"
// creates.
type Defaults struct {
	Plugin host.PluginID
	Size   int64 // bytes
}

// Server answers the requests of container engines.
type Server struct {
	agent    *agent.Agent
	storage  Storage
	defaults Defaults
	log      hclog.Logger
}

// NewServer returns a server for the volumes of an agent.
func NewServer(a *agent.Agent, s Storage, d Defaults, log hclog.Logger) *Server {
	return &Server{agent: a, storage: s, defaults: d, log: log}
}

// request has the fields of all requests.
type request struct {
	Name string
	ID   string
	Opts map[string]string
}

// reply has the fields of all replies. An empty Err means success.
type reply struct {
	Err          string
	Implements   []string       `json:",omitempty"`
	Mountpoint   string         `json:",omitempty"`
	Volume       *volume        `json:",omitempty"`
	Volumes      []volume       `json:",omitempty"`
	Capabilities map[string]any `json:",omitempty"`

	// answered is called after the reply, and told whether the engine has received the reply. It may be nil.
	answered func(received bool)
}

type volume struct {
	Name       string
	Mountpoint string         `json:",omitempty"`
	CreatedAt  string         `json:",omitempty"` // RFC 3339
	Status     map[string]any `json:",omitempty"`
}

// Serve answers on l until ctx ends.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	mux := http.NewServeMux()
	for path, answer := range map[string]func(*http.Request, request) (reply, error){
		"/Plugin.Activate": func(*http.Request, request) (reply, error) {
			return reply{Implements: []string{"VolumeDriver"}}, nil
		},
		"/VolumeDriver.Capabilities": func(*http.Request, request) (reply, error) {
			return reply{Capabilities: map[string]any{"Scope": "local"}}, nil
		},
		"/VolumeDriver.Create":  s.create,
		"/VolumeDriver.Remove":  s.remove,
		"/VolumeDriver.List":    s.list,
		"/VolumeDriver.Get":     s.get,
		"/VolumeDriver.Path":    s.path,
		"/VolumeDriver.Mount":   s.mount,
		"/VolumeDriver.Unmount": s.unmount,
	} {
		mux.HandleFunc("POST "+path, s.handle(answer))
	}
	web := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, ConnContext: withCaller,
		BaseContext: func(net.Listener) context.Context { return ctx }}
	stop := context.AfterFunc(ctx, func() { _ = web.Close() })
	defer stop()
	if err := web.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve the volume plugin: %w", err)
	}
	return nil
}

const maxRequest = 1 << 20

// handle decodes a request and encodes the reply. Engines show Err to the user. Docker does so for any status. Podman
// does so only for status 500 with a reply in JSON.
func (s *Server) handle(answer func(*http.Request, request) (reply, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var q request
		var out reply
		err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest)).Decode(&q)
		if err != nil && r.ContentLength != 0 {
			err = registry.Invalid("the request's body: %w", err)
		} else {
			out, err = answer(r, q)
		}
		w.Header().Set("Content-Type", "application/vnd.docker.plugins.v1.2+json")
		if err != nil {
			out.Err = err.Error()
			level := s.log.Warn
			if errors.Is(err, registry.ErrNotFound) {
				level = s.log.Debug // engines ask for a volume before they create it
			}
			level("a request of a container engine failed", "request", r.URL.Path, "volume", q.Name, "error", err,
				"engine_waits", r.Context().Err() == nil)
		}
		text, _ := json.Marshal(out) // reply has only types that JSON can encode
		w.Header().Set("Content-Length", strconv.Itoa(len(text)))
		if err != nil {
			w.WriteHeader(http.StatusInternalServerError)
		}
		_, err = w.Write(text)
		if err == nil {
			err = http.NewResponseController(w).Flush()
		}
		if out.answered != nil {
			out.answered(err == nil)
		}
	}
}

type callerKey struct{}

// withCaller adds the process at the other end of the connection to the context.
func withCaller(ctx context.Context, c net.Conn) context.Context {
	cred, err := proc.Peer(c)
	if err != nil {
		return ctx
	}
	return context.WithValue(ctx, callerKey{}, agent.CallerOf(int(cred.Pid)))
}

func caller(r *http.Request) agent.EngineCaller {
	c, _ := r.Context().Value(callerKey{}).(agent.EngineCaller)
	return c
}
