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

// command is a program about to be started.
type command struct {
	path string // as the task gives it
	argv []string
	attr os.ProcAttr
	in   membership
}

// newCommand makes the task's directories and resolves its user, while the host's files are in sight.
func newCommand(o order, in membership) (*command, error) {
	t := o.Task
	who, err := credential(t.User)
	if err != nil {
		return nil, err
	}
	place := t.secrets()
	if o.Isolated {
		place = t.scratch()
	}
	if err := errors.Join(makeDir(t.local()), makeDir(t.alloc()), makeDir(place)); err != nil {
		return nil, err
	}
	if who != nil {
		if err := os.Lchown(t.local(), int(who.Uid), int(who.Gid)); err != nil {
			return nil, fmt.Errorf("give %s to user %s: %w", t.local(), t.User, err)
		}
	}
	c := &command{path: t.Command, argv: append([]string{t.Command}, t.Args...), in: in}
	c.attr.Sys = &syscall.SysProcAttr{Setsid: true, Credential: who}
	if in.unified != nil {
		c.attr.Sys.UseCgroupFD, c.attr.Sys.CgroupFD = true, int(in.unified.Fd())
	}
	c.attr.Dir = t.WorkDir
	if o.Isolated {
		c.attr.Env = t.environ("/local", "/alloc", "/secrets")
	} else {
		c.attr.Env = t.environ(t.local(), t.alloc(), t.secrets())
	}
	switch {
	case t.WorkDir != "":
	case o.Isolated:
		c.attr.Dir = "/local"
	case who != nil:
		c.attr.Dir = "/" // the task's directory is closed to other users
	default:
		c.attr.Dir = t.local()
	}
	return c, nil
}

// start starts the program where the order wants it, on a thread that ends with it: the thread joins the task's cgroups, and its
// mount namespace.
func (c *command) start(o order) (child *os.Process, err error) {
	run := func() error {
		if err := c.in.enter(); err != nil {
			return err
		}
		path, err := c.look()
		if err != nil {
			return err
		}
		child, err = os.StartProcess(path, c.argv, &c.attr)
		return err
	}
	if o.Isolated {
		err = space(o.Task, c.attr.Sys.Credential).Run(run)
	} else {
		err = mount.OnThread(run)
	}
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", c.path, classify(err))
	}
	return child, nil
}

// classify gives the errors of starting a kind.
func classify(err error) error {
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

// look finds the program as a shell does, in the task's file system and by the task's PATH.
func (c *command) look() (string, error) {
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
	return "", registry.Errorf(registry.ErrNotFound, "no program %q in PATH %s", c.path, list)
}

// space is what an isolated task sees: the plan comes after what is the task's own, so that it may lie in it.
func space(t Task, who *syscall.Credential) mount.Space {
	uid, gid := 0, 0
	if who != nil {
		uid, gid = int(who.Uid), int(who.Gid)
	}
	s := mount.Space{Scratch: t.scratch(), ReadOnly: t.ReadOnlyRoot, Layers: []mount.Layer{
		mount.Bind{Source: t.local(), Target: "/local"},
		mount.Bind{Source: t.alloc(), Target: "/alloc"},
		mount.Tmpfs{Path: "/secrets", Mode: 0o700, UID: uid, GID: gid},
	}}
	for _, d := range t.Plan.Dirs {
		s.Layers = append(s.Layers, mount.Dir{Path: d.Path, Mode: d.Mode})
	}
	for _, b := range t.Plan.Binds {
		s.Layers = append(s.Layers, mount.Bind{Source: b.Source, Target: b.Target, ReadOnly: b.ReadOnly, Propagation: propagations[b.Propagation]})
	}
	for _, d := range t.Plan.Devices {
		s.Layers = append(s.Layers, mount.Device{Source: d.Source, Target: d.Target, UID: uid, ReadOnly: !strings.Contains(d.Access, "w")})
	}
	return s
}

var propagations = map[hooks.Propagation]mount.Propagation{
	hooks.Private: mount.Private, hooks.HostToTask: mount.Slave, hooks.Bidirectional: mount.Bidirectional,
}

// credential resolves a name, a uid, or uid:gid. None: the orchestrator's own.
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
