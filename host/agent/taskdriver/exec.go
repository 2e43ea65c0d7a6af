package taskdriver

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"strings"

	"holdfast/hooks"
	"holdfast/registry"
)

// Exec gives each task a mount namespace of its own. See the package's text for what a task sees.
type Exec struct{ runner }

// NewExec makes the exec driver.
func NewExec() Exec { return Exec{runner{name: "exec", isolated: true}} }

// Start applies the whole plan: directories, binds with their propagation, environment, devices and device rules.
func (e Exec) Start(ctx context.Context, t Task) (Handle, error) {
	if err := t.Plan.Supported(hooks.Operations); err != nil {
		return Handle{}, err
	}
	for _, b := range t.Plan.Binds {
		if _, known := propagations[b.Propagation]; !known {
			return Handle{}, registry.Errorf(registry.ErrUnsupported, "bind %s: the exec driver does not know its propagation", b)
		}
		if b.SELinux != "" && selinux() {
			return Handle{}, registry.Errorf(registry.ErrUnsupported, "bind %s: the exec driver sets no SELinux labels; remove selinux_label", b)
		}
	}
	return e.start(ctx, t)
}

// selinux says whether the kernel enforces labels. Where it does not, a label asks for nothing.
func selinux() bool {
	_, err := os.Lstat("/sys/fs/selinux/enforce")
	return !errors.Is(err, fs.ErrNotExist)
}

// RawExec runs tasks in the host's file system.
type RawExec struct{ runner }

// NewRawExec makes the raw_exec driver.
func NewRawExec() RawExec { return RawExec{runner{name: "raw_exec"}} }

// Start applies the plan's environment. Binds and devices that would show a file where it is already ask for nothing, nor do device
// rules, as no device is denied; any other part of a plan is refused, as the task would run without it.
func (r RawExec) Start(ctx context.Context, t Task) (Handle, error) {
	p := t.Plan
	for _, b := range p.Binds {
		if b.Source != b.Target || b.ReadOnly {
			return Handle{}, unsupported("bind %s", b)
		}
	}
	for _, d := range p.Devices {
		if d.Source != d.Target || !strings.Contains(d.Access, "r") || !strings.Contains(d.Access, "w") {
			return Handle{}, unsupported("device %s at %s with access %q", d.Source, d.Target, d.Access)
		}
	}
	if len(p.Dirs) > 0 {
		return Handle{}, unsupported("directory %s", p.Dirs[0].Path)
	}
	return r.start(ctx, t)
}

func unsupported(format string, args ...any) error {
	err := registry.Errorf(registry.ErrUnsupported, format, args...)
	return registry.Errorf(registry.ErrUnsupported, "%w: a raw_exec task has no file system of its own; use the exec driver", err)
}

var (
	_ Driver = Exec{}
	_ Driver = RawExec{}
)
