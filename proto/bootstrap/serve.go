package bootstrap

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	plugin "github.com/hashicorp/go-plugin"
	"google.golang.org/grpc"
)

// ErrHostGone is the cause of a shim's ended context when its host ended or closed the life pipe.
var ErrHostGone = errors.New("the host of this shim is gone")

// exitGrace is how long Run may take after its context has ended. It leaves time to exit within a second.
const exitGrace = 800 * time.Millisecond

// ServeOptions configures a shim process.
type ServeOptions struct {
	Logger *Logger // required
	// Run does the shim's work beside its services. Its return ends the shim, with or without an error. It must return
	// when its context ends: after 800 ms the process exits.
	Run func(context.Context) error
	// Server adds gRPC server options such as interceptors. Serve sets the message limits.
	Server []grpc.ServerOption
	// Versions restricts the protocol versions; empty: all versions of this build.
	Versions []int
}

func (o *ServeOptions) defaults() {
	if len(o.Versions) == 0 {
		o.Versions = versions
	}
	if o.Run == nil {
		o.Run = func(ctx context.Context) error { <-ctx.Done(); return nil }
	}
}

// Serve is the main of a shim. It registers services, sends their address to the host and blocks until the shim ends.
// A shim ends when its host is gone, ctx ends, Run returns or go-plugin shuts down. The context passed to register ends
// first. After exitGrace Serve calls os.Exit.
func Serve(ctx context.Context, register func(context.Context, *grpc.Server) error, opts ServeOptions) error {
	opts.defaults()
	if err := checkInherited(opts.Logger); err != nil {
		return err
	}
	// The name that ps shows. Execution through a descriptor has replaced it with a number.
	_ = os.WriteFile("/proc/self/comm", []byte("holdfast-shim"), 0)
	// A write to a closed stderr must not end the shim. Notify is used because children inherit an ignored signal.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	warnOfVersions(opts)

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s := &shim{opts: opts, register: register, cancel: cancel}
	go s.watchLife(inheritedFiles.life)
	return s.serve(ctx)
}

func checkInherited(log *Logger) error {
	if inheritedFiles.err != nil {
		return fmt.Errorf("take over what the host has passed on: %w", inheritedFiles.err)
	}
	if inheritedFiles.asShim {
		return nil
	}
	fmt.Fprintln(os.Stderr, "This is a Holdfast shim. A Holdfast host starts it; it does nothing on its own.")
	log.Flush(time.Second)
	os.Exit(ExitNotAPlugin)
	return nil
}

// warnOfVersions logs the versions of both sides if none is common. go-plugin's handshake names only one.
func warnOfVersions(opts ServeOptions) {
	offered := os.Getenv("PLUGIN_PROTOCOL_VERSIONS")
	for field := range strings.SplitSeq(offered, ",") {
		if v, err := strconv.Atoi(field); err == nil && slices.Contains(opts.Versions, v) {
			return
		}
	}
	opts.Logger.Error("no common protocol version", "shim_speaks", fmt.Sprint(opts.Versions), "host_speaks",
		"["+offered+"]")
	opts.Logger.Flush(time.Second)
}

// shim is the server of this process.
type shim struct {
	opts     ServeOptions
	register func(context.Context, *grpc.Server) error
	cancel   context.CancelCauseFunc

	mu      sync.Mutex
	server  *grpc.Server
	stopped bool
}

// watchLife ends the shim at the end of the life pipe. The host never writes to the pipe.
func (s *shim) watchLife(life *os.File) {
	io.Copy(io.Discard, life)
	s.cancel(ErrHostGone)
}

func (s *shim) serve(ctx context.Context) error {
	var wg sync.WaitGroup
	var runErr error
	wg.Go(func() {
		if err := s.opts.Run(ctx); ctx.Err() == nil { // else the end of ctx is the reason, not an error of Run
			runErr = err
		}
		s.cancel(runErr)
	})
	context.AfterFunc(ctx, func() {
		time.AfterFunc(exitGrace, s.exit)
		wg.Wait()
		s.stop()
	})
	served := s.goPlugin(ctx)
	s.cancel(nil)
	wg.Wait()
	s.opts.Logger.Flush(exitGrace / 4)
	return errors.Join(runErr, served)
}

// exit ends a shim whose work does not end within exitGrace.
func (s *shim) exit() {
	s.opts.Logger.Warn("the shim's work did not end in time, leaving it")
	s.opts.Logger.Flush(50 * time.Millisecond)
	os.Exit(1)
}

// stop ends go-plugin's server and closes its socket. It aborts running calls.
func (s *shim) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = true
	if s.server != nil {
		s.server.Stop()
	}
}

// goPlugin blocks while go-plugin serves. Only its handshake line reaches the host.
func (s *shim) goPlugin(ctx context.Context) error {
	r, w, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make the handshake's pipe: %w", err)
	}
	config, cert, err := serverTLS(os.Getenv(clientCert))
	if err != nil {
		return fmt.Errorf("prepare TLS: %w", err)
	}
	go forwardHandshake(r, inheritedFiles.handshake, cert)
	os.Stdout = w

	var registered error
	sets := pluginSets(s.opts.Versions, shimPlugin{register: func(g *grpc.Server) error {
		registered = s.register(ctx, g)
		return registered
	}})
	plugin.Serve(&plugin.ServeConfig{
		HandshakeConfig: Handshake(), VersionedPlugins: sets, GRPCServer: s.newServer,
		Logger: s.opts.Logger.Named("go-plugin"), TLSProvider: func() (*tls.Config, error) { return config, nil },
	})
	if registered != nil {
		return fmt.Errorf("register the shim's services: %w", registered)
	}
	if s.server == nil {
		return errors.New("go-plugin could not open its socket; its reason is in the log")
	}
	return nil
}

func (s *shim) newServer(opts []grpc.ServerOption) *grpc.Server {
	opts = append(opts, grpc.MaxRecvMsgSize(MaxMessage), grpc.MaxSendMsgSize(MaxMessage),
		grpc.InitialWindowSize(Window), grpc.InitialConnWindowSize(Window), grpc.NumStreamWorkers(Workers))
	s.mu.Lock()
	defer s.mu.Unlock()
	s.server = grpc.NewServer(append(opts, s.opts.Server...)...)
	if s.stopped {
		s.server.Stop()
	}
	return s.server
}
