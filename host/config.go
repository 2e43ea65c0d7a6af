package host

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/host/internal/launch"
	"holdfast/registry"
)

// Config says where a host keeps its state, which shim it runs, and what it supports. StateDir and Shim are required.
//
// Secret, File and Fence answer questions of the shim. They may be called concurrently, and again with the same
// question. Once ctx has ended, for Secret and File after ten seconds, nothing waits for them any more.
type Config struct {
	StateDir string // kept over restarts; created with mode 0700 if it does not exist. One host at a time
	RunDir   string // sockets; default /run/holdfast/<8 hex of StateDir's digest>; non-root: below XDG_RUNTIME_DIR
	Shim     Binary // later hosts run the binary that was swapped to, until Shim is another binary than before
	Node     string // the node's name in answers and claims; default the machine's host name

	// Cluster is HCL text with a cluster block, by which nodes share volumes; empty: this node shares nothing.
	Cluster string

	Operations []Operation // plan operations that this orchestrator can apply; default all
	Blocks     []string    // block types of job files that it supports, beside the usual ones

	// Workload lists the tasks and allocs that still run after a restart of this host. The shim takes down all others.
	Workload Workload

	// Secret returns the value of a secret reference in a volume file. Environment variables are named "env:NAME". If
	// Secret is nil, the host looks these up and refuses other names.
	Secret func(ctx context.Context, name string) (string, error)
	// File returns a file that a job reads with file(). If it is nil, file() is refused.
	File func(ctx context.Context, path string) ([]byte, error)
	// Fence returns once a lost node cannot write any more. DetachVolume calls Fence before it detaches a volume from
	// another node. If the shim resumes a detach, it calls Fence again before each CSI call, as the node may have come
	// back meanwhile. Fence has up to five minutes. If Fence is nil, fencing is refused.
	Fence func(ctx context.Context, node string) error

	MaxHold      time.Duration // how long a call waits in all while no shim is active; default 30 s
	Bake         time.Duration // how long a replaced shim stands by, at least; default 10 s
	SwapBudget   time.Duration // how long a swap may hold calls before it is given up; default 500 ms
	StartTimeout time.Duration // for the shim's handshake, and again for its answer to Hello; default 10 s

	PrepareTimeout time.Duration // for a candidate to take over a copy of the state; default 1 min
	AnswerTimeout  time.Duration // a shim that does not answer for so long is killed and started again; default 10 s
	Logger         hclog.Logger  // gets the shim's log as well; nil drops all

	// Start starts a shim; nil: as a process. Package hosttest sets it.
	Start launch.Starter

	// TracerProvider makes OpenTelemetry spans: one for each call that changes something, and one for each call whose
	// ctx has a span. The trace continues in the shim, which inherits the variables OTEL_* and exports its spans by
	// itself if OTEL_EXPORTER_OTLP_ENDPOINT is set. nil: no spans.
	TracerProvider trace.TracerProvider
}

// Binary is a shim's program. The host copies it into the state directory and executes the copy, so that exactly the
// verified file runs. The host keeps the last three binaries that were active. A Binary without a Path names one of
// them by its digest.
type Binary struct {
	Path   string
	SHA256 string // hex; empty: read from the file Path+".sha256", else computed and trusted on first use
}

// Workload lists what runs: plugin tasks, and allocs with volumes.
type Workload struct {
	Allocs []AllocGroup   // that hold volumes, or wait for them
	Tasks  []WorkloadTask // that run a plugin
}

// WorkloadTask is a task that runs a plugin. A task that was reported as stopping stays so until TaskStarted.
type WorkloadTask struct {
	AllocTask
	Running bool     // false: it is about to be started
	Started BootTime // if it runs; zero: unknown
}

const (
	defaultMaxHold = 30 * time.Second
	defaultBake    = 10 * time.Second
	defaultBudget  = 500 * time.Millisecond
	defaultPrepare = time.Minute
	defaultAnswer  = 10 * time.Second
	defaultStart   = 10 * time.Second
)

// complete checks the configuration, makes its paths absolute, sets the defaults, and creates both directories.
func (c *Config) complete() (err error) {
	if c.StateDir == "" || c.Shim.Path == "" {
		return registry.Invalid("host: Config.StateDir and Config.Shim.Path are required")
	}
	if c.StateDir, err = makeDir(c.StateDir); err != nil {
		return fmt.Errorf("state directory: %w", err)
	}
	if c.Shim.Path, err = filepath.Abs(c.Shim.Path); err != nil {
		return fmt.Errorf("path of the shim: %w", err)
	}
	if c.RunDir == "" {
		c.RunDir = hooks.DefaultRun(c.StateDir, os.Getuid(), os.Getenv("XDG_RUNTIME_DIR"))
	}
	if c.RunDir, err = makeDir(c.RunDir); err != nil {
		return fmt.Errorf("run directory: %w", err)
	}
	if c.Node == "" {
		if c.Node, err = os.Hostname(); err != nil {
			return fmt.Errorf("name of this node: %w", err)
		}
	}
	if _, err := registry.ParseNodeName(c.Node); err != nil {
		return err
	}
	if c.Operations == nil {
		c.Operations = hooks.Operations
	}
	orDefault(&c.MaxHold, defaultMaxHold)
	orDefault(&c.Bake, defaultBake)
	orDefault(&c.SwapBudget, defaultBudget)
	orDefault(&c.StartTimeout, defaultStart)
	orDefault(&c.PrepareTimeout, defaultPrepare)
	orDefault(&c.AnswerTimeout, defaultAnswer)
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	if c.Start == nil {
		c.Start = startProcess
	}
	return c.layout().Check()
}

func orDefault(d *time.Duration, value time.Duration) {
	if *d <= 0 {
		*d = value
	}
}

// makeDir creates a directory that only this user can access. If the directory exists and others can access it, makeDir
// returns ErrDenied. It returns the path without symbolic links, as the mount table has it.
func makeDir(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return "", err
	}
	if path, err = filepath.EvalSymlinks(path); err != nil {
		return "", err
	}
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return "", &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	advice := "chmod 700 it"
	if int(st.Uid) != os.Geteuid() {
		advice = fmt.Sprintf("chown it to uid %d, and %s", os.Geteuid(), advice)
	}
	if st.Mode&0o077 != 0 || int(st.Uid) != os.Geteuid() {
		return "", registry.Errorf(registry.ErrDenied,
			"%s belongs to uid %d and has mode %#o: it must be this user's alone; %s", path, st.Uid, st.Mode&0o7777,
			advice)
	}
	return path, nil
}

func (c *Config) layout() hooks.Layout { return hooks.Layout{Run: c.RunDir, State: c.StateDir} }
