package taskdriver

import (
	"context"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"holdfast/hooks"
	"holdfast/registry"
)

// Task is one attempt of a task as a driver starts it.
type Task struct {
	ID           string        `json:"id"`  // unique per attempt, for ever: what is left of a task is found by it
	Dir          string        `json:"dir"` // private to the task, absolute; may be the one of an earlier attempt
	Alloc        string        `json:"alloc,omitempty"`
	Command      string        `json:"command"`
	Args         []string      `json:"args,omitempty"`
	Env          []string      `json:"env,omitempty"`  // NAME=value; nothing is inherited from the orchestrator
	User         string        `json:"user,omitempty"` // name, uid or uid:gid; empty: the orchestrator's
	Plan         hooks.Plan    `json:"plan"`
	WorkDir      string        `json:"work_dir,omitempty"`       // in the task; empty: its local directory
	KillGrace    time.Duration `json:"kill_grace,omitempty"`     // if the parent itself is told to end
	ReadOnlyRoot bool          `json:"read_only_root,omitempty"` // exec: the host's directories cannot be written
	LogSize      int64         `json:"log_size,omitempty"`       // bytes of one log file; 0: DefaultLogSize
	LogFiles     int           `json:"log_files,omitempty"`      // kept per stream; 0: DefaultLogFiles
}

const (
	DefaultLogSize  = 10 << 20
	DefaultLogFiles = 10
	// DefaultKillGrace is what a task has between SIGTERM and SIGKILL if nobody says otherwise.
	DefaultKillGrace = 5 * time.Second
)

// The variables that tell a task where its directories are, unless it sets them itself.
const (
	localEnv   = "NOMAD_TASK_DIR"
	allocEnv   = "NOMAD_ALLOC_DIR"
	secretsEnv = "NOMAD_SECRETS_DIR"
	// taskEnv marks every process of a task with its ID.
	taskEnv = "HOLDFAST_TASK"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Handle names a running or ended task over restarts of the orchestrator.
type Handle struct {
	ID        string   `json:"id"`
	Driver    string   `json:"driver"`
	Dir       string   `json:"dir"`
	PID       int      `json:"pid"`        // of the parent
	StartTime uint64   `json:"start_time"` // of the parent: field 22 of /proc/pid/stat
	TaskPID   int      `json:"task_pid"`   // leads its own session and process group
	TaskStart uint64   `json:"task_start"`
	Boot      string   `json:"boot"`              // boot id; another boot has none of these processes
	Cgroups   []string `json:"cgroups,omitempty"` // directories made for the task
	Notes     []string `json:"notes,omitempty"`   // what could not be had on this machine, for people
}

// Exit is how a task ended.
type Exit struct {
	Code   int       `json:"code"`             // as of a shell: 128 and the signal; -1: not known
	Signal int       `json:"signal,omitempty"` // that ended it
	OOM    bool      `json:"oom,omitempty"`    // the kernel killed one of its processes for memory; known only with a memory cgroup
	At     time.Time `json:"at"`               // wall time, for people
	Err    string    `json:"err,omitempty"`    // why the rest is not known
}

// Stream is one of a task's outputs.
type Stream string

const (
	Stdout Stream = "stdout"
	Stderr Stream = "stderr"
)

// Driver runs tasks. Start and Stop of one task are not called at the same time; everything else may be.
type Driver interface {
	Name() string
	// Isolated says whether a task has a file system of its own, which a plan has to know.
	Isolated() bool
	// Start returns once the command runs. Whatever error it returns, nothing runs then; a start that was cut off by the death of
	// the orchestrator is found by Find.
	Start(ctx context.Context, t Task) (Handle, error)
	// Wait returns when no process of the task is left, with the same Exit however often it is asked. Each started task has to be
	// waited for. A finished context is its only error beside broken files.
	Wait(ctx context.Context, h Handle) (Exit, error)
	// Stop sends SIGTERM to the task's process group, after grace SIGKILL to all its processes, and returns when none is left. A
	// task that has ended is no error.
	Stop(ctx context.Context, h Handle, grace time.Duration) error
	// Adopt says whether any process of the task is left. It needs no Start in this process before.
	Adopt(ctx context.Context, h Handle) (alive bool, err error)
	// Logs copies a stream from its oldest kept byte; if it follows, until the task has ended and all is written.
	Logs(ctx context.Context, h Handle, s Stream, follow bool, to io.Writer) error
}

// Dirs of a task on the host.
func (t Task) local() string   { return filepath.Join(t.Dir, "local") }
func (t Task) secrets() string { return filepath.Join(t.Dir, "secrets") }
func (t Task) scratch() string { return filepath.Join(t.Dir, "root") }
func (t Task) alloc() string {
	if t.Alloc != "" {
		return t.Alloc
	}
	return filepath.Join(t.Dir, "alloc")
}

// environ is the task's whole environment.
func (t Task) environ(local, alloc, secrets string) []string {
	env := t.Plan.Environ(t.Env)
	for _, d := range []string{"PATH=" + defaultPath, localEnv + "=" + local, allocEnv + "=" + alloc, secretsEnv + "=" + secrets} {
		name, _, _ := strings.Cut(d, "=")
		if _, set := variable(env, name); !set {
			env = append(env, d)
		}
	}
	env = slices.DeleteFunc(env, func(e string) bool { return strings.HasPrefix(e, taskEnv+"=") })
	return append(env, taskEnv+"="+t.ID)
}

func variable(env []string, name string) (string, bool) {
	for _, e := range env {
		if n, value, _ := strings.Cut(e, "="); n == name {
			return value, true
		}
	}
	return "", false
}

// check refuses what no driver could start.
func (t Task) check() error {
	switch {
	case t.ID == "" || strings.ContainsAny(t.ID, "/\x00\n") || t.ID == "." || t.ID == ".." || len(t.ID) > 200:
		return registry.Invalid("task id %q: 1 to 200 bytes without '/' and line breaks are needed", t.ID)
	case !filepath.IsAbs(t.Dir):
		return registry.Invalid("task %s: its directory %q is not absolute", t.ID, t.Dir)
	case t.Command == "":
		return registry.Invalid("task %s: it has no command", t.ID)
	case t.Alloc != "" && !filepath.IsAbs(t.Alloc):
		return registry.Invalid("task %s: its alloc's directory %q is not absolute", t.ID, t.Alloc)
	}
	return nil
}
