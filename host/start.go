package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/host/internal/launch"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

// Version is the version of this host, as Hello sends it.
const Version = "0.1.0"

// digest names a binary in the store.
type digest = launch.Digest

// shim is one process: a candidate, active, or on standby.
type shim struct {
	process launch.Running
	binary  digest
	ctx     context.Context // of the host's work for this shim
	cancel  context.CancelFunc
	sync    func(ctx context.Context) error // sends the workload
	schema  uint32                          // newest that it can read; zero: unknown
	metrics *callMetrics                    // gets the counts of the shim at its end
	counted map[callKey]CallMetric          // counts that metrics has already; guarded by its mu
}

const (
	stopGrace     = time.Second     // for a shim to end by itself
	killLimit     = 5 * time.Second // for a killed process to exit
	activateLimit = 30 * time.Second
	shownLines    = 8 // of a dead shim's log, in an error
	startTries    = 3 // after so many starts that fail by themselves, the binary is considered broken
)

// startFirst starts the first shim of this host. If the last host ended during the bake of a swap, and the new binary
// does not start, it starts the old one.
func (h *Host) startFirst(ctx, run context.Context) (*shim, error) {
	binary, fallback := h.chooseBinary(ctx, *h.running.Load())
	h.recordChoice(binary, fallback)
	sh, err := h.startRepeatedly(ctx, run)
	if err != nil && fallback.SHA256 != "" && ctx.Err() == nil && sh == nil { // a shim that is left may write the state
		h.config.Logger.Error("the shim of the last swap cannot be started; starting the one before it", "error", err)
		binary = fallback
		h.recordActive(binary, digest{})
		sh, err = h.startRepeatedly(ctx, run)
	}
	if err != nil {
		return nil, err
	}
	h.recordActive(binary, digest{})
	h.history.settleBakes(binary.SHA256)
	return sh, nil
}

// startRepeatedly starts the shim until one is active, with a pause between the tries. A shim that was killed from
// outside (launch.Exit.Outside) is started again until ctx ends. After any other registry.ErrUnavailable it is started
// startTries times in all. Errors of other kinds would repeat, and are returned at once. With an error, startRepeatedly
// returns a shim only if that shim may be active and could not be killed.
func (h *Host) startRepeatedly(ctx, run context.Context) (*shim, error) {
	pauses, failed := newStartPauses(), 0
	for {
		sh, err := h.startActive(ctx, run)
		if err == nil {
			return sh, nil
		}
		exit, died := errors.AsType[*launch.Exit](err)
		switch {
		case ctx.Err() != nil:
			return sh, gaveUp(ctx, err)
		case sh != nil:
			return sh, err
		case died && exit.Outside(): // does not count: started again without a limit
		case errors.Is(err, registry.ErrUnavailable):
			failed++
		default:
			return nil, err
		}
		if failed == startTries {
			return nil, fmt.Errorf("the shim did not start in %d tries: %w", pauses.failures+1, err)
		}
		pause := pauses.next()
		h.config.Logger.Error("the shim did not start; it is started again",
			"in", pause, "failures in a row", pauses.failures, "error", err)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, gaveUp(ctx, err)
		}
	}
}

// gaveUp adds to the error of the last start why no other start follows.
func gaveUp(ctx context.Context, last error) error {
	if end := context.Cause(ctx); !errors.Is(last, end) {
		return fmt.Errorf("gave up starting the shim: %w; the last start: %w", end, last)
	}
	return last
}

// startActive starts a shim and makes it active: Hello, Activate, Sync, callbacks. ctx bounds the start, and run the
// life of the shim. With an error, startActive returns a shim only if that shim may be active and could not be killed.
func (h *Host) startActive(ctx, run context.Context) (*shim, error) {
	sh, err := h.startCandidate(ctx, run, *h.running.Load())
	if err != nil {
		return nil, err
	}
	limited, cancel := withLimit(ctx, activateLimit)
	defer cancel()
	if _, err := sh.activate(limited, handoff{}); err != nil {
		if !isDead(sh) { // else the error has its last lines already
			err = withLastLines(err, sh.process)
		}
		err = errors.Join(err, sh.stop(run))
		if isDead(sh) {
			return nil, err
		}
		return sh, err
	}
	h.serveCallbacks(sh)
	return sh, nil
}

// startProcess is the Starter of all hosts but those of package hosttest.
func startProcess(ctx context.Context, opts launch.Options) (launch.Running, error) {
	p, err := launch.Start(ctx, opts)
	if err != nil {
		return nil, err // no nil *Process in an interface
	}
	return p, nil
}

// startCandidate starts a binary and sends it Hello.
func (h *Host) startCandidate(ctx, run context.Context, binary digest) (*shim, error) {
	log := h.config.Logger.Named("shim")
	process, err := h.config.Start(ctx, launch.Options{
		Store: h.binaries, Digest: binary, RunDir: h.config.RunDir, Generation: h.launches.Add(1),
		Args: logLevel(log), StartTimeout: h.config.StartTimeout, Logger: log, TracerProvider: h.config.TracerProvider,
	})
	if err != nil {
		return nil, err
	}
	sh := &shim{process: process, binary: binary, metrics: &h.metrics}
	sh.sync = func(ctx context.Context) error { return h.sync(ctx, process.Conn()) }
	sh.ctx, sh.cancel = context.WithCancel(run)
	limited, cancel := withLimit(ctx, h.config.StartTimeout)
	defer cancel()
	if err := sh.hello(limited, h.config); err != nil {
		return nil, errors.Join(fmt.Errorf("configure the shim: %w", err), sh.stop(run))
	}
	return sh, nil
}

func (s *shim) hello(ctx context.Context, c Config) error {
	req := &pb.HelloRequest{
		Call: &pb.Call{}, HostVersion: Version, Node: c.Node, Blocks: c.Blocks, StateDir: c.StateDir, RunDir: c.RunDir,
		Cluster: c.Cluster,
	}
	for _, op := range c.Operations {
		req.Operations = append(req.Operations, string(op))
	}
	reply, err := s.control().Hello(ctx, req)
	s.schema = reply.GetSchemaNewest()
	return s.candidateError(ctx, err)
}

// logLevel returns the shim's arguments for the level of the logger.
func logLevel(log hclog.Logger) []string {
	level := log.GetLevel()
	switch level {
	case hclog.NoLevel:
		level = hclog.DefaultLevel
	case hclog.Off:
		level = hclog.Error
	}
	return []string{"-log-level", level.String()}
}

// withLastLines adds the last lines of the process's log to an error, or the first lines of its panic.
func withLastLines(err error, p launch.Running) error {
	lines := p.LastLines()
	if len(lines) == 0 {
		return err
	}
	from := slices.IndexFunc(lines, func(l string) bool {
		return strings.HasPrefix(l, "panic: ") || strings.HasPrefix(l, "fatal error: ")
	})
	if from < 0 {
		from = max(0, len(lines)-shownLines)
	}
	lines = lines[from:min(len(lines), from+shownLines)]
	return fmt.Errorf("%w; its last lines:\n  %s", err, strings.Join(lines, "\n  "))
}
