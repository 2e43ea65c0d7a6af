//go:build !taskparent

package taskdriver

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unicode"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/client"

	"holdfast/hooks"
	"holdfast/internal/proc"
	"holdfast/registry"
)

// Container runs each task in a container of an engine with Docker's API, which Podman also serves. The engine is the
// parent of the container. A task continues without the agent, and a later agent finds it by the container's name.
type Container struct {
	name   string
	engine *client.Client
	host   string
}

// NewContainer returns a driver of the given name, docker or podman, for an engine, as in "unix:///run/docker.sock".
// It does not connect.
func NewContainer(name, host string) (Container, error) {
	c, err := client.New(client.WithHost(host))
	if scheme, _, _ := strings.Cut(host, "://"); err == nil && scheme != "unix" && scheme != "tcp" {
		err = errors.New("only unix and tcp are supported")
	}
	if err != nil {
		return Container{}, registry.Invalid("engine %q of driver %s: write it as in unix:///run/docker.sock: %w", host,
			name, err)
	}
	return Container{name, c, host}, nil
}

// Name returns the driver's name.
func (d Container) Name() string { return d.name }

// Isolated reports true.
func (d Container) Isolated() bool { return true }

// Start starts a container. It records the handle before the container exists, so that Find returns the handle even if
// the agent is killed meanwhile.
func (d Container) Start(ctx context.Context, t Task) (_ Handle, err error) {
	defer func() { err = Exhausted(err) }()
	if err := t.validate(); err != nil {
		return Handle{}, err
	}
	held, err := t.open(ctx, d.adoptEarlier)
	if err != nil {
		return Handle{}, err
	}
	defer held.Close()
	boot, err := proc.BootID()
	if err == nil {
		err = t.makeContainerDirs()
	}
	if err != nil {
		return Handle{}, fmt.Errorf("task %s: %w", t.ID, err)
	}
	h := Handle{ID: t.ID, Driver: d.name, Dir: t.Dir, Boot: boot, Container: containerName(t.ID),
		LogSize: t.LogSize, LogFiles: t.LogFiles}
	if err := errors.Join(reserveRecord(t.Dir, exitFile), writeRecord(t.Dir, handleFile, h)); err != nil {
		return Handle{}, err
	}
	if err = d.run(ctx, t, &h); err == nil {
		err = writeRecord(t.Dir, handleFile, h)
	}
	if err != nil {
		return Handle{}, d.undoStart(ctx, h, err)
	}
	return h, nil
}

// containerName returns a name that engines accept. The name of a task may have any printable character.
func containerName(id string) string {
	name := strings.Map(func(r rune) rune {
		if r < 0x80 && (unicode.IsLetter(r) || unicode.IsDigit(r) || strings.ContainsRune("_.-", r)) {
			return r
		}
		return '_'
	}, id)
	if name != id {
		name += fmt.Sprintf("-%x", sha256.Sum256([]byte(id)))[:9] // else two tasks may have one name
	}
	return "holdfast-" + name
}

// makeContainerDirs makes the directories that the container mounts, and the files of the job. Only the image knows the
// container's user. Therefore any user in the container may write to all directories but the secrets, and may read
// files there as their modes allow. Other users of this machine cannot reach these directories.
func (t Task) makeContainerDirs() error {
	err := errors.Join(makeDir(t.localDir()), makeDir(t.allocDir()), makeDir(t.secretsDir()),
		os.Chmod(t.localDir(), 0o777), os.Chmod(t.allocDir(), 0o777), os.Chmod(t.secretsDir(), 0o711))
	for i, dir := range t.Plan.Dirs {
		path := t.planDir(i)
		err = errors.Join(err, os.MkdirAll(path, 0o700), os.Chmod(path, os.FileMode(dir.Mode)))
	}
	for _, f := range t.Files {
		if dir, _ := f.split(); !f.Own() {
			path := filepath.Join(t.Dir, dir)
			err = errors.Join(err, makeDir(path), os.Chmod(path, 0o755))
		}
	}
	if err != nil {
		return err
	}
	return t.writeFiles(func(dir string) string { return filepath.Join(t.Dir, dir) }, 0, 0)
}

// run creates and starts the container.
func (d Container) run(ctx context.Context, t Task, h *Handle) error {
	config, hostConfig := t.containerOf()
	if err := cmp.Or(checkSources(t.Plan, hostConfig), t.checkLinks(hostConfig)); err != nil {
		return err
	}
	var made client.ContainerCreateResult
	create := func(ctx context.Context) (err error) {
		made, err = d.engine.ContainerCreate(ctx,
			client.ContainerCreateOptions{Config: config, HostConfig: hostConfig, Name: h.Container})
		return err
	}
	err := d.call(ctx, "create container "+h.Container, changeTimeout, create)
	if errdefs.IsConflict(err) { // a container of an interrupted start
		if err = d.remove(ctx, *h); err == nil {
			err = d.call(ctx, "create container "+h.Container, changeTimeout, create)
		}
	}
	if err != nil {
		return err
	}
	h.Warnings = append(made.Warnings, d.ignoredRules(ctx, hostConfig)...)
	err = d.call(ctx, "start container "+h.Container, changeTimeout, func(ctx context.Context) error {
		_, err := d.engine.ContainerStart(ctx, made.ID, client.ContainerStartOptions{})
		return err
	})
	if err != nil {
		return err
	}
	state, _, err := d.state(ctx, *h)
	if err == nil {
		h.TaskPID, h.Created = state.Pid, state.StartedAt
	}
	return err
}

// ignoredRules returns a warning for a Podman before 4.4, whose Docker API ignores device rules.
func (d Container) ignoredRules(ctx context.Context, h *container.HostConfig) []string {
	if len(h.DeviceCgroupRules) == 0 {
		return nil
	}
	var engine client.ServerVersionResult
	_ = d.call(ctx, "ask for the version", queryTimeout, func(ctx context.Context) (err error) {
		engine, err = d.engine.ServerVersion(ctx, client.ServerVersionOptions{})
		return err
	})
	for _, c := range engine.Components {
		var major, minor int
		_, err := fmt.Sscanf(c.Version, "%d.%d", &major, &minor)
		if c.Name == "Podman Engine" && err == nil && (major < 4 || major == 4 && minor < 4) {
			return []string{"Podman " + c.Version + " allows no devices but those of its config; set privileged = " +
				"true, or use Podman 4.4 or later"}
		}
	}
	return nil
}

// checkSources refuses missing sources of mounts, because engines would make directories for them. It also refuses
// paths of the plan that an engine would split into two.
func checkSources(plan hooks.Plan, h *container.HostConfig) error {
	sources := map[string]string{}
	for _, m := range h.Mounts {
		if m.Type == mount.TypeBind {
			sources[m.Target] = m.Source
		}
	}
	for _, b := range plan.Binds {
		if strings.Contains(b.Source+b.Target, ":") {
			return registry.Invalid("mount of %q at %q: engines allow no colon in such a path", b.Source, b.Target)
		}
		sources[b.Target] = b.Source
	}
	for target, source := range sources {
		if _, err := os.Stat(source); errors.Is(err, fs.ErrNotExist) {
			return registry.Errorf(registry.ErrNotFound, "source of the mount at %s: %w", target, err)
		}
	}
	return nil
}

// checkLinks refuses a source in local/, secrets/ or another directory of the task if a link leads out of that
// directory. The task may have made the link in an earlier attempt, and the engine would follow it on this machine.
func (t Task) checkLinks(h *container.HostConfig) error {
	var sources []string
	for _, m := range h.Mounts {
		if m.Type == mount.TypeBind {
			sources = append(sources, m.Source)
		}
	}
	for _, b := range h.Binds {
		source, _, _ := strings.Cut(b, ":")
		sources = append(sources, source)
	}
	for _, source := range sources {
		path, own := strings.CutPrefix(filepath.Clean(source), t.Dir+"/")
		dir, rest, below := strings.Cut(path, "/")
		if !own || !below {
			continue
		}
		err := statInside(filepath.Join(t.Dir, dir), rest)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return registry.Invalid("source of a mount: %s: %w; remove the link", source, err)
		}
	}
	return nil
}

// statInside returns an error if path, relative to dir, does not exist or leads out of dir.
func statInside(dir, path string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	_, err = root.Stat(path)
	return err
}

const (
	queryTimeout  = 20 * time.Second // for requests that the engine answers from memory
	changeTimeout = 2 * time.Minute
)

// errSilent means that an engine accepts connections but does not answer.
var errSilent = errors.New("it accepts connections, but does not answer")

// call makes a call of the engine. If the call takes longer than limit, the error is an errSilent that names the call.
// Waits for a container and reads of its output do not use call, because they need no limit.
func (d Container) call(ctx context.Context, name string, limit time.Duration, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%s: %w within %v", name, errSilent, limit))
	defer cancel()
	err := do(ctx)
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// inspect returns the engine's description of the container. found is false if the container is gone.
func (d Container) inspect(ctx context.Context, h Handle) (c container.InspectResponse, found bool, err error) {
	err = d.call(ctx, "inspect container "+h.Container, queryTimeout, func(ctx context.Context) error {
		r, err := d.engine.ContainerInspect(ctx, h.Container, client.ContainerInspectOptions{})
		c = r.Container
		return err
	})
	if errdefs.IsNotFound(err) {
		return c, false, nil
	}
	return c, err == nil, err
}

// state returns the state of the container. found is false if the container is gone.
func (d Container) state(ctx context.Context, h Handle) (s container.State, found bool, err error) {
	c, found, err := d.inspect(ctx, h)
	if !found || c.State == nil {
		return s, false, err
	}
	return *c.State, true, nil
}

// Adopt reports whether the container runs. It is false after a reboot, and if the exit is recorded. If the engine does
// not answer, Adopt reports true, because the task may still run and its volumes must stay until that is known.
func (d Container) Adopt(ctx context.Context, h Handle) (bool, error) {
	current, err := h.isCurrentBoot()
	if err != nil || !current {
		return false, err
	}
	if _, ended, err := readExit(h); err != nil || ended {
		return false, err
	}
	s, _, err := d.state(ctx, h)
	if err != nil {
		return true, context.Cause(ctx)
	}
	return containerRuns(s), nil
}

func containerRuns(s container.State) bool { return s.Running || s.Paused || s.Restarting }

// stillRuns reports whether the container has run without a restart since the start that the handle records.
func (h Handle) stillRuns(s container.State) bool {
	return containerRuns(s) && (h.Created == "" || s.StartedAt == h.Created)
}

// remove removes the container and its anonymous volumes.
func (d Container) remove(ctx context.Context, h Handle) error {
	name := "remove container " + h.Container
	err := d.call(ctx, name, changeTimeout, func(ctx context.Context) error {
		_, err := d.engine.ContainerRemove(ctx, h.Container,
			client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
		return err
	})
	if err == nil || errdefs.IsNotFound(err) {
		return nil
	}
	if errors.Is(err, errSilent) {
		return err // the error names the call
	}
	return fmt.Errorf("%s: %w", name, err)
}

// Stop sends the image's stop signal, which is SIGTERM by default, and sends SIGKILL after grace (in whole seconds).
func (d Container) Stop(ctx context.Context, h Handle, grace time.Duration) error {
	current, err := h.isCurrentBoot()
	if err != nil || !current {
		return err
	}
	seconds := int(math.Ceil(max(grace, 0).Seconds()))
	limit := time.Duration(seconds)*time.Second + changeTimeout
	err = d.call(ctx, "stop container "+h.Container, limit, func(ctx context.Context) error {
		_, err := d.engine.ContainerStop(ctx, h.Container, client.ContainerStopOptions{Timeout: &seconds})
		return err
	})
	if err != nil && !errdefs.IsNotFound(err) && !errdefs.IsNotModified(err) {
		return d.explain(h.ID, err)
	}
	return nil
}

// explain adds advice to an error of the engine.
func (d Container) explain(task string, err error) error {
	switch {
	case client.IsErrConnectionFailed(err), errors.Is(err, context.DeadlineExceeded), errors.Is(err, errSilent):
		return registry.Errorf(registry.ErrUnavailable, "task %s: no container engine answers at %s: %w; start it, "+
			"or set --%s-engine", task, d.host, err, d.name)
	case errdefs.IsInvalidArgument(err):
		return registry.Invalid("task %s: %w", task, err)
	}
	return fmt.Errorf("task %s: %w", task, err)
}
