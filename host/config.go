package host

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/registry"
)

// Config says where a host keeps its state, which shim it runs, and what it can do. StateDir and Shim are required.
type Config struct {
	StateDir string // kept over restarts; made with mode 0700 if it is not there. One host at a time
	RunDir   string // sockets; default /run/holdfast/<8 hex of StateDir's digest>, without root below XDG_RUNTIME_DIR
	Shim     Binary
	Node     string // the node's name in answers and claims; default the machine's host name

	Operations []Operation // plan operations that this orchestrator can apply; default all
	Blocks     []string    // block types of job files that it carries, beside the usual ones

	// Workload is what still runs of an earlier life of this host. What it does not name is taken down.
	Workload Workload

	// What the shim asks. Each function is called on goroutines of its own, any number at once, and has to return soon after its ctx
	// ends: Close waits for it.

	// Secret gives the value behind a name of a volume's secrets. Names of environment variables come as "env:NAME"; without a
	// function they are looked up, and others are refused.
	Secret func(ctx context.Context, name string) (string, error)
	// File gives a file that a job reads with file(). Without a function it is refused.
	File func(ctx context.Context, path string) ([]byte, error)
	// Fence makes sure that a lost node writes no more. Without a function it is refused.
	Fence func(ctx context.Context, node string) error

	MaxHold      time.Duration // how long a call waits, in all, for a shim that is being started again; default 30 s
	Bake         time.Duration // how long a replaced shim stands by, and then until the new one gives an answer; default 10 s
	SwapBudget   time.Duration // how long a swap may hold calls before it is given up; default 500 ms
	StartTimeout time.Duration // for the shim to answer, and again to be greeted; default 10 s

	PrepareTimeout time.Duration // for a candidate to take a copy of the state over; default 1 min
	AnswerTimeout  time.Duration // a shim that gives no answer for so long is killed and started again; default 10 s
	Logger         hclog.Logger  // gets the shim's log as well; nil drops all
}

// Binary is a shim's program. It is copied into the state directory and executed from there, so that what was verified is what runs. Of those
// that ran before, the last three are kept, whatever is refused meanwhile: a Binary without a Path is one of them, by its digest.
type Binary struct {
	Path   string
	SHA256 string // hex; empty: from the file Path+".sha256", else what is found on first use is trusted
}

// Workload is what of plugin tasks and allocs with volumes still runs.
type Workload struct {
	Allocs []AllocGroup // that hold, or wait for, volumes
	Tasks  []WorkloadTask // that run a plugin
}

// WorkloadTask is a task that runs a plugin. One that was reported to be stopping goes on being so; TaskStarted takes that back.
type WorkloadTask struct {
	AllocTask
	Running bool     // false: it is about to be started
	Started BootTime // if it runs
}

const (
	defaultMaxHold = 30 * time.Second
	activateLimit  = 30 * time.Second
	defaultBake    = 10 * time.Second
	defaultBudget  = 500 * time.Millisecond
	defaultPrepare = time.Minute
	defaultAnswer  = 10 * time.Second
	defaultStart   = 10 * time.Second
)

// complete fills in the defaults and makes both directories.
func (c *Config) complete() (err error) {
	if c.StateDir == "" || c.Shim.Path == "" {
		return registry.Invalid("host: Config.StateDir and Config.Shim.Path are required")
	}
	if c.StateDir, err = makeDir(c.StateDir); err != nil {
		return fmt.Errorf("state directory: %w", err)
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
	return c.layout().Check()
}

func orDefault(d *time.Duration, value time.Duration) {
	if *d <= 0 {
		*d = value
	}
}

// makeDir makes a directory that is ours alone, and gives its path without symbolic links: the one that the mount table shows.
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
	if st.Mode&0o077 != 0 || int(st.Uid) != os.Geteuid() {
		return "", registry.Errorf(registry.ErrDenied, "%s belongs to uid %d and has mode %#o: it must be this user's alone; "+
			"chown it, and chmod 0700 it", path, st.Uid, st.Mode&0o7777)
	}
	return path, nil
}

func (c *Config) layout() hooks.Layout { return hooks.Layout{Run: c.RunDir, State: c.StateDir} }
