package taskdriver

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"holdfast/hooks"
	"holdfast/registry"
)

// Driver runs tasks. Start and Stop of one task must not run at the same time; all other calls may.
type Driver interface {
	Name() string
	// Isolated reports whether a task has a file system of its own. Plans depend on it.
	Isolated() bool
	// Configure checks the config block of a task and reads it into t. A warning names an attribute without an effect.
	Configure(t *Task, config json.RawMessage) (warnings []string, err error)
	// Start returns when the command runs. After an error nothing runs, except as described at Remover. If the
	// orchestrator dies during Start, Find finds the task.
	Start(ctx context.Context, t Task) (Handle, error)
	// Wait returns when no process of the task is left. Each call returns the same Exit. Wait must be called for each
	// started task. Errors come only from ctx and from damaged records.
	Wait(ctx context.Context, h Handle) (Exit, error)
	// Stop sends SIGTERM to the task's process group, and after grace SIGKILL to all its processes. It returns when no
	// process is left, even if the task has already ended.
	Stop(ctx context.Context, h Handle, grace time.Duration) error
	// Adopt reports whether any process of the task is left. The task may have been started by another process.
	Adopt(ctx context.Context, h Handle) (alive bool, err error)
	// Logs copies a stream from its oldest kept byte. With follow it copies until the task has ended.
	Logs(ctx context.Context, h Handle, s Stream, follow bool, to io.Writer) error
}

// Preparer is a Driver that has to do work before Start that may take minutes, such as pulling an image.
type Preparer interface {
	// Prepare returns early when ctx ends. It calls progress with a line of text, at once and every few seconds.
	Prepare(ctx context.Context, t Task, progress func(string)) error
}

// Remover is a Driver whose Start may fail without knowing the outcome, so that the task may still start later.
type Remover interface {
	// RemoveFailed returns nil once the last Start in a task's directory, if it failed, can start nothing any more.
	RemoveFailed(ctx context.Context, dir string) error
}

// Task is one attempt of a task.
type Task struct {
	ID        string        `json:"id"`              // unique for each attempt
	Dir       string        `json:"dir"`             // private to the task, absolute; earlier attempts may have used it
	Alloc     string        `json:"alloc,omitempty"` // directory that the alloc's tasks share; default: alloc/ in Dir
	Command   string        `json:"command"`
	Args      []string      `json:"args,omitempty"`
	Env       []string      `json:"env,omitempty"`  // NAME=value; nothing is inherited from the orchestrator
	User      string        `json:"user,omitempty"` // name, uid or uid:gid; default: the orchestrator's
	Plan      hooks.Plan    `json:"plan"`
	WorkDir   string        `json:"work_dir,omitempty"`   // as seen by the task; default: its local directory
	KillGrace time.Duration `json:"kill_grace,omitempty"` // used when the parent itself gets SIGTERM
	Files     []File        `json:"files,omitempty"`
	LogSize   int64         `json:"log_size,omitempty"`  // bytes of one log file; default DefaultLogSize
	LogFiles  int           `json:"log_files,omitempty"` // files kept for each stream; default DefaultLogFiles
	Resources Resources     `json:"resources,omitzero"`

	// TryLimits makes Configure try the limits, in cgroups below that of this process.
	TryLimits bool `json:"-"`

	container *containerConfig // read by Container.Configure
}

// Resources are the limits of a task. 0 means none.
type Resources struct {
	CPU       int64 `json:"cpu,omitempty"`        // MHz: the task's share when the machine has no idle time
	Cores     int64 `json:"cores,omitempty"`      // most cores that the task may use; also its share, of 1024 per core
	Memory    int64 `json:"memory,omitempty"`     // MiB
	MemoryMax int64 `json:"memory_max,omitempty"` // MiB; if set, it is the limit, and Memory is reserved
}

const (
	DefaultLogSize  = 10 << 20
	DefaultLogFiles = 10
	// DefaultKillGrace is the default time between SIGTERM and SIGKILL.
	DefaultKillGrace = 5 * time.Second
)

// Environment variables that name a task's directories, unless the task sets them itself.
const (
	localEnv   = "NOMAD_TASK_DIR"
	allocEnv   = "NOMAD_ALLOC_DIR"
	secretsEnv = "NOMAD_SECRETS_DIR"
	// taskEnv holds the task's ID in the environment of each of its processes.
	taskEnv = "HOLDFAST_TASK"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Handle identifies a running or ended task. It stays valid when the orchestrator restarts.
type Handle struct {
	ID        string   `json:"id"`
	Driver    string   `json:"driver"`
	Dir       string   `json:"dir"`
	PID       int      `json:"pid"`        // of the parent
	StartTime uint64   `json:"start_time"` // of the parent: field 22 of /proc/PID/stat
	TaskPID   int      `json:"task_pid"`   // leads its own session and process group
	TaskStart uint64   `json:"task_start"`
	Boot      string   `json:"boot"`                // boot ID; the processes do not outlive the boot
	Container string   `json:"container,omitempty"` // its name
	Created   string   `json:"created,omitempty"`   // start time, as the engine reports it
	LogSize   int64    `json:"log_size,omitempty"`  // of a container's task, as in Task
	LogFiles  int      `json:"log_files,omitempty"`
	Cgroups   []string `json:"cgroups,omitempty"`  // directories made for the task
	Warnings  []string `json:"warnings,omitempty"` // what this machine does not enforce or provide
}

// Exit is how a task ended.
type Exit struct {
	Code   int       `json:"code"`             // as a shell reports it: 128 + signal; -1: unknown
	Signal int       `json:"signal,omitempty"` // signal that ended it
	At     time.Time `json:"at"`               // wall time
	Err    string    `json:"err,omitempty"`    // why the exit status is unknown, or what killed the task
}

// Stream is one output of a task.
type Stream string

const (
	Stdout Stream = "stdout"
	Stderr Stream = "stderr"
)

func (t Task) localDir() string   { return filepath.Join(t.Dir, "local") }
func (t Task) secretsDir() string { return filepath.Join(t.Dir, "secrets") }
func (t Task) rootDir() string    { return filepath.Join(t.Dir, "root") }
func (t Task) allocDir() string {
	if t.Alloc != "" {
		return t.Alloc
	}
	return filepath.Join(t.Dir, "alloc")
}

// environ returns the task's whole environment, except for a default PATH.
func (t Task) environ(local, alloc, secrets string) []string {
	env := t.Plan.Environ(t.Env)
	for name, dir := range map[string]string{localEnv: local, allocEnv: alloc, secretsEnv: secrets} {
		env = withDefault(env, name, dir)
	}
	env = slices.DeleteFunc(env, func(e string) bool { return strings.HasPrefix(e, taskEnv+"=") })
	return append(env, taskEnv+"="+t.ID)
}

func withDefault(env []string, name, value string) []string {
	if _, set := variable(env, name); set {
		return env
	}
	return append(env, name+"="+value)
}

func variable(env []string, name string) (string, bool) {
	for _, e := range env {
		if n, value, _ := strings.Cut(e, "="); n == name {
			return value, true
		}
	}
	return "", false
}

// validate rejects tasks that no driver can start.
func (t Task) validate() error {
	switch {
	case t.ID == "" || strings.ContainsAny(t.ID, "/\x00\n") || t.ID == "." || t.ID == ".." || len(t.ID) > 200:
		return registry.Invalid("task ID %q: use 1 to 200 bytes without '/', NUL and line breaks", t.ID)
	case !filepath.IsAbs(t.Dir):
		return registry.Invalid("task %s: directory %q is not absolute", t.ID, t.Dir)
	case t.Alloc != "" && !filepath.IsAbs(t.Alloc):
		return registry.Invalid("task %s: alloc directory %q is not absolute", t.ID, t.Alloc)
	}
	return nil
}

// Exec gives each task a mount namespace of its own.
type Exec struct{ runner }

// NewExec returns the exec driver.
func NewExec() Exec { return Exec{runner{name: "exec", isolated: true}} }

// Start applies the whole plan: directories, binds with propagation, environment, devices and device rules.
func (e Exec) Start(ctx context.Context, t Task) (Handle, error) {
	if err := t.Plan.Supported(hooks.Operations); err != nil {
		return Handle{}, err
	}
	for _, b := range t.Plan.Binds {
		if _, known := propagations[b.Propagation]; !known {
			return Handle{}, registry.Errorf(registry.ErrUnsupported, "bind %s: unknown propagation", b)
		}
		if b.SELinux != "" && selinuxEnforced() {
			return Handle{}, registry.Errorf(registry.ErrUnsupported,
				"bind %s: the exec driver does not set SELinux labels; remove selinux_label", b)
		}
	}
	return e.start(ctx, t)
}

// selinuxEnforced reports whether the kernel has SELinux. Without it a label has no effect.
func selinuxEnforced() bool {
	_, err := os.Lstat("/sys/fs/selinux/enforce")
	return !errors.Is(err, fs.ErrNotExist)
}

// RawExec runs tasks in the file system of the host.
type RawExec struct{ runner }

// NewRawExec returns the raw_exec driver.
func NewRawExec() RawExec { return RawExec{runner{name: "raw_exec"}} }

// Start applies the environment of the plan. Device rules need no action, because the task sees the host's file system.
// The same holds for writable binds, and for devices to read and write, whose target is their source. Any other
// operation is an error.
func (r RawExec) Start(ctx context.Context, t Task) (Handle, error) {
	p := t.Plan
	for _, b := range p.Binds {
		if b.Source != b.Target || b.ReadOnly {
			return Handle{}, rawUnsupported("bind %s", b)
		}
	}
	for _, d := range p.Devices {
		if d.Source != d.Target || !strings.Contains(d.Access, "r") || !strings.Contains(d.Access, "w") {
			return Handle{}, rawUnsupported("device %s at %s with access %q", d.Source, d.Target, d.Access)
		}
	}
	if len(p.Dirs) > 0 {
		return Handle{}, rawUnsupported("directory %s", p.Dirs[0].Path)
	}
	return r.start(ctx, t)
}

func rawUnsupported(format string, args ...any) error {
	err := registry.Errorf(registry.ErrUnsupported, format, args...)
	return registry.Errorf(registry.ErrUnsupported,
		"%w: a raw_exec task has no file system of its own; use the exec driver", err)
}

var (
	_ Driver = Exec{}
	_ Driver = RawExec{}
)
