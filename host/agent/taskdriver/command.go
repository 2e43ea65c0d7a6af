package taskdriver

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/registry"
)

// command is a program that is about to be started.
type command struct {
	path  string // as the task specifies it
	argv  []string
	attr  os.ProcAttr
	files cgroupFiles
}

// newCommand makes the task's directories and resolves its user. It must run in the host's mount namespace.
func newCommand(r request, files cgroupFiles) (*command, error) {
	t := r.Task
	cred, err := credential(t.User)
	if err != nil {
		return nil, err
	}
	dir := t.secretsDir()
	if r.Isolated {
		dir = t.rootDir()
	}
	if err := errors.Join(makeDir(t.localDir()), makeDir(t.allocDir()), makeDir(dir)); err != nil {
		return nil, err
	}
	if cred != nil {
		if err := os.Lchown(t.localDir(), int(cred.Uid), int(cred.Gid)); err != nil {
			return nil, fmt.Errorf("change the owner of %s to user %s: %w", t.localDir(), t.User, err)
		}
		if err := os.Chmod(t.allocDir(), 0o777); err != nil { // tasks of several users may share it
			return nil, fmt.Errorf("let user %s write to %s: %w", t.User, t.allocDir(), err)
		}
	}
	c := &command{path: t.Command, argv: append([]string{t.Command}, t.Args...), files: files}
	c.attr.Sys = &syscall.SysProcAttr{Setsid: true, Credential: cred}
	if files.unified != nil {
		c.attr.Sys.UseCgroupFD, c.attr.Sys.CgroupFD = true, int(files.unified.Fd())
	}
	c.attr.Dir = t.WorkDir
	if r.Isolated {
		c.attr.Env = t.environ("/local", "/alloc", "/secrets")
	} else {
		c.attr.Env = t.environ(t.localDir(), t.allocDir(), t.secretsDir())
	}
	c.attr.Env = withDefault(c.attr.Env, "PATH", defaultPath)
	switch {
	case t.WorkDir != "":
	case r.Isolated:
		c.attr.Dir = "/local"
	case cred != nil:
		c.attr.Dir = "/" // other users cannot enter the task's directory
	default:
		c.attr.Dir = t.localDir()
	}
	return c, nil
}

// start starts the program on a thread of its own, which joins the task's cgroups and mount namespace and then ends.
func (c *command) start(r request) (child *os.Process, err error) {
	var fileErr error
	run := func() error {
		if err := c.files.enter(); err != nil {
			return err
		}
		if fileErr = c.writeFiles(r); fileErr != nil {
			return fileErr
		}
		path, err := c.lookPath()
		if err != nil {
			return err
		}
		child, err = os.StartProcess(path, c.argv, &c.attr)
		return err
	}
	if r.Isolated {
		err = taskSpace(r.Task, c.attr.Sys.Credential).Run(run)
	} else {
		err = mount.OnThread(run)
	}
	switch {
	case fileErr != nil: // the error names the file
		return nil, fileErr
	case errors.Is(err, registry.ErrNotFound): // the error names the program
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("start %s: %w", c.path, classifyStartError(err))
	}
	return child, nil
}

// writeFiles writes the task's files in the task's file system, for its user.
func (c *command) writeFiles(r request) error {
	uid, gid := 0, 0
	if cred := c.attr.Sys.Credential; cred != nil {
		uid, gid = int(cred.Uid), int(cred.Gid)
	}
	return r.Task.writeFiles(func(dir string) string {
		if r.Isolated {
			return "/" + dir
		}
		return filepath.Join(r.Task.Dir, dir)
	}, uid, gid)
}

// classifyStartError adds a kind to an error of starting a program.
func classifyStartError(err error) error {
	switch {
	case errors.Is(err, registry.ErrNotFound):
		return err
	case errors.Is(err, mount.ErrNotShared):
		return registry.Errorf(registry.ErrUnsupported, "%w", err)
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return registry.Errorf(registry.ErrDenied, "%w", err)
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EAGAIN):
		return registry.Errorf(registry.ErrExhausted, "%w", err)
	}
	return registry.Errorf(registry.ErrInvalid, "%w", err)
}

// lookPath finds the program as a shell does, in the task's file system and PATH.
func (c *command) lookPath() (string, error) {
	if strings.Contains(c.path, "/") {
		if !filepath.IsAbs(c.path) {
			return filepath.Join(c.attr.Dir, c.path), nil
		}
		return c.path, nil
	}
	list, _ := variable(c.attr.Env, "PATH")
	for _, dir := range filepath.SplitList(list) {
		path := filepath.Join(dir, c.path)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && unix.Access(path, unix.X_OK) == nil {
			return path, nil
		}
	}
	return "", registry.Errorf(registry.ErrNotFound, "program %q not found in PATH %s", c.path, list)
}

// taskSpace returns the file system of an isolated task. The plan's layers come last, so that they may lie in the
// task's own directories.
func taskSpace(t Task, cred *syscall.Credential) mount.Space {
	uid, gid := 0, 0
	if cred != nil {
		uid, gid = int(cred.Uid), int(cred.Gid)
	}
	s := mount.Space{Scratch: t.rootDir(), Layers: []mount.Layer{
		mount.Bind{Source: t.localDir(), Target: "/local"},
		mount.Bind{Source: t.allocDir(), Target: "/alloc"},
		mount.Tmpfs{Path: "/secrets", Mode: 0o700, UID: uid, GID: gid},
	}}
	for _, d := range t.Plan.Dirs {
		s.Layers = append(s.Layers, mount.Dir{Path: d.Path, Mode: d.Mode})
	}
	for _, b := range t.Plan.Binds {
		s.Layers = append(s.Layers, mount.Bind{
			Source: b.Source, Target: b.Target, ReadOnly: b.ReadOnly, Propagation: propagations[b.Propagation],
		})
	}
	for _, d := range t.Plan.Devices {
		s.Layers = append(s.Layers, mount.Device{
			Source: d.Source, Target: d.Target, UID: uid, ReadOnly: !strings.Contains(d.Access, "w"),
		})
	}
	return s
}

var propagations = map[hooks.Propagation]mount.Propagation{
	hooks.Private: mount.Private, hooks.HostToTask: mount.Slave, hooks.Bidirectional: mount.Bidirectional,
}

// credential resolves a name, a uid or uid:gid. An empty name returns nil: the orchestrator's own user.
func credential(name string) (*syscall.Credential, error) {
	if name == "" {
		return nil, nil
	}
	id, group, both := strings.Cut(name, ":")
	uid, err := strconv.ParseUint(id, 10, 32)
	gid, gidErr := strconv.ParseUint(group, 10, 32)
	if err == nil && both && gidErr == nil {
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
	}
	if both {
		return nil, registry.Invalid("user %q: use a name, a uid, or uid:gid", name)
	}
	u, lookErr := user.Lookup(name)
	if lookErr != nil && err == nil {
		u, lookErr = user.LookupId(name)
	}
	if lookErr != nil {
		return nil, registry.Invalid("user %q: %w", name, lookErr)
	}
	return credentialOf(u)
}

func credentialOf(u *user.User) (*syscall.Credential, error) {
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	gid, gidErr := strconv.ParseUint(u.Gid, 10, 32)
	if err := errors.Join(err, gidErr); err != nil {
		return nil, err
	}
	c := &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	groups, err := u.GroupIds()
	if err != nil {
		return nil, fmt.Errorf("groups of user %s: %w", u.Username, err)
	}
	for _, g := range groups {
		if n, err := strconv.ParseUint(g, 10, 32); err == nil {
			c.Groups = append(c.Groups, uint32(n))
		}
	}
	return c, nil
}
