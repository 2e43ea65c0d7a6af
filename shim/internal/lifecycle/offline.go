package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"holdfast/config"
	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/registry"
	"holdfast/shim/internal/cluster"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/doctor"
	"holdfast/shim/internal/store"
)

// Offline examines or changes the state of a node from a separate program. It calls no plugin.
type Offline struct {
	State  string // state directory
	Run    string // directory of sockets; empty: the usual one
	Logger hclog.Logger
}

// Diagnosis holds the findings of an offline examination.
type Diagnosis = registry.Diagnosis

// Limits of an offline examination.
const (
	lockLimit = 2 * time.Second
	copyTries = 3
)

// Examine inspects a copy of the state and changes nothing.
func (v Offline) Examine(ctx context.Context) (Diagnosis, error) {
	layout, err := v.layout()
	if err != nil {
		return Diagnosis{}, err
	}
	dir, err := os.MkdirTemp("", "holdfast-doctor-")
	if err != nil {
		return Diagnosis{}, fmt.Errorf("copy the state: %w", err)
	}
	defer os.RemoveAll(dir)
	copied := filepath.Join(dir, filepath.Base(layout.Database()))
	inUse, err := copyState(ctx, layout, copied)
	if err != nil {
		return Diagnosis{}, err
	}
	var out Diagnosis
	err = v.withDoctor(ctx, layout, copied, inUse, func(d *doctor.Doctor) error {
		out, err = d.Examine(ctx)
		return err
	})
	if refused := store.CheckAccess(layout.Database()); err == nil && errors.Is(refused, registry.ErrDenied) {
		out.Findings = append(out.Findings, registry.Finding{
			Kind: registry.FoundDamage, Path: layout.Database(),
			Detail: fmt.Sprintf("no shim opens this file: %v", refused),
			Advice: "do as the error says, then start the agent",
		})
	}
	if inUse && err == nil {
		out.Findings = append(out.Findings, registry.Finding{
			Kind: registry.FoundUnseen, Path: layout.Database(),
			Detail: "a shim runs with this state: what it does now may look wrong from outside",
			Advice: "ask it instead, through its agent: holdfast doctor",
		})
	}
	return out, err
}

// Repair changes the state itself. It fails with ErrConflict while a shim holds the lock on the state.
func (v Offline) Repair(ctx context.Context, digest string) (Diagnosis, error) {
	layout, err := v.intactState(ctx)
	if err != nil {
		return Diagnosis{}, err
	}
	var out Diagnosis
	err = v.withDoctor(ctx, layout, layout.Database(), false, func(d *doctor.Doctor) error {
		out, err = d.Repair(ctx, digest)
		return err
	})
	return out, err
}

// layout returns the layout of both directories, with symbolic links in the state path resolved as in the mount table.
func (v Offline) layout() (l hooks.Layout, err error) {
	if l.State, err = filepath.Abs(v.State); err == nil {
		l.State, err = filepath.EvalSymlinks(l.State)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return l, noState(v.State)
	}
	if err != nil {
		return l, fmt.Errorf("state directory: %w", err)
	}
	l.Run = v.Run
	if l.Run == "" {
		l.Run = hooks.DefaultRun(l.State, os.Getuid(), os.Getenv("XDG_RUNTIME_DIR"))
	}
	return l, l.Check()
}

func noState(state string) error {
	return registry.Errorf(registry.ErrNotFound, "%s is not a Holdfast state directory; choose another one", state)
}

// intactState is layout for a state file that exists and is intact.
func (v Offline) intactState(ctx context.Context) (hooks.Layout, error) {
	l, err := v.layout()
	if err != nil {
		return l, err
	}
	if err = store.VerifyFile(ctx, l.Database()); errors.Is(err, registry.ErrNotFound) {
		err = registry.Errorf(registry.ErrNotFound, "%w: there are no records yet; start an agent first", err)
	}
	return l, err
}

// copyState copies the state file and reports whether a shim has it open. The copy of an open file may be inconsistent,
// so copyState retries. If the file is missing and the mount directory exists, copyState makes no copy and returns nil:
// the state counts as empty.
func copyState(ctx context.Context, l hooks.Layout, to string) (inUse bool, err error) {
	for range copyTries {
		if inUse, err = copyLocked(l.Database(), to); err == nil {
			err = store.VerifyFile(ctx, to)
		}
		if !inUse || !errors.Is(err, registry.ErrDamaged) {
			break
		}
	}
	_, mountRootErr := os.Lstat(l.MountRoot())
	switch {
	case errors.Is(err, registry.ErrDamaged):
		return inUse, store.VerifyFile(ctx, l.Database()) // so that the error names the original
	case errors.Is(err, fs.ErrNotExist) && mountRootErr == nil:
		return false, nil
	case errors.Is(err, fs.ErrNotExist):
		return false, noState(l.State)
	}
	return inUse, err
}

// copyLocked copies a file under a shared lock. If another process holds the exclusive lock, it copies the file without
// a lock, and inUse is true.
func copyLocked(from, to string) (inUse bool, err error) {
	in, err := os.OpenFile(from, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return false, err
	}
	defer in.Close()
	inUse = errors.Is(unix.Flock(int(in.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return inUse, err
	}
	_, err = io.Copy(out, in)
	return inUse, errors.Join(err, out.Close())
}

// Helper runs the work of a helper process and does not return in one. In other processes it does nothing. A helper
// process runs calls that may hang, or verifies a state file. main calls Helper first.
func Helper() {
	mount.BecomeHelper()
	store.BecomeVerifier()
}

// withDoctor opens the state file, calls use with a doctor, and closes the file. live: a shim runs with the state.
func (v Offline) withDoctor(
	ctx context.Context, l hooks.Layout, file string, live bool, use func(*doctor.Doctor) error,
) error {
	m, err := mount.NewManager(l)
	if err != nil {
		return err
	}
	return v.withStore(ctx, file, m.Boot(), func(s *store.Store) error {
		return use(doctor.New(s, m, doctor.Options{
			Layout: l, Now: time.Now, Logger: v.Logger, Live: live, Suspended: csi.NewSuspensions(l.Suspensions()),
			Check: func() []string { return failedChecks(s) },
		}))
	})
}

// withStore opens the state file, calls use and closes it.
func (v Offline) withStore(ctx context.Context, file, boot string, use func(*store.Store) error) (err error) {
	s, err := store.Open(ctx, store.Options{Path: file, LockLimit: lockLimit, Boot: boot, Now: time.Now,
		Logger: v.Logger.Named("store")})
	if errors.Is(err, registry.ErrConflict) {
		return registry.Errorf(registry.ErrConflict, "%w: a shim runs with this state; stop its agent first", err)
	}
	if err != nil {
		return err
	}
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	var writer sync.WaitGroup
	writer.Go(func() { _ = s.Run(running) }) // a failed write returns its error to its caller
	defer func() {
		stop()
		writer.Wait()
		err = errors.Join(err, s.Close())
	}()
	return use(s)
}

// SecretUse is a secret of a volume or snapshot that other nodes will need.
type SecretUse = cluster.SecretUse

// Migrate moves the records that nodes of a cluster share into the cluster, and makes the node its member. text is HCL
// with the cluster block. Before it moves anything, it calls before with the secrets that other nodes will need. It
// returns the number of records that were moved, now or before.
func (v Offline) Migrate(
	ctx context.Context, text []byte, node string, before func([]SecretUse),
) (moved int, err error) {
	c, err := parseCluster(text)
	if err != nil {
		return 0, err
	}
	err = v.withState(ctx, func(s *store.Store) error {
		moved, err = cluster.Migrate(ctx, s, c, registry.NodeName(node), before)
		return err
	})
	return moved, err
}

// Leave makes the node leave its cluster. text is HCL with the cluster block.
func (v Offline) Leave(ctx context.Context, text []byte, node string) (id string, err error) {
	c, err := parseCluster(text)
	if err != nil {
		return "", err
	}
	return c.ID, v.withState(ctx, func(s *store.Store) error {
		return cluster.Leave(ctx, s, c, registry.NodeName(node), v.Logger)
	})
}

// LeaveLost makes the node leave a cluster that is gone for good. confirm is the ID of the cluster. Without it,
// LeaveLost returns ErrDenied, which says what may be lost.
func (v Offline) LeaveLost(ctx context.Context, node, confirm string) (id string, err error) {
	err = v.withState(ctx, func(s *store.Store) error {
		id, err = cluster.LeaveLost(ctx, s, registry.NodeName(node), confirm)
		return err
	})
	return id, err
}

func parseCluster(text []byte) (config.Cluster, error) {
	c, diags := config.ParseCluster(config.Source{Name: "cluster", Text: text}, config.Options{})
	if err := diags.Err(); err != nil {
		return config.Cluster{}, err
	}
	return *c, nil
}

// withState calls use with the state. It fails if the state file is missing or damaged.
func (v Offline) withState(ctx context.Context, use func(*store.Store) error) error {
	layout, err := v.intactState(ctx)
	if err != nil {
		return err
	}
	m, err := mount.NewManager(layout)
	if err != nil {
		return err
	}
	return v.withStore(ctx, layout.Database(), m.Boot(), use)
}

// failedChecks returns the failed consistency checks of the state as text.
func failedChecks(s *store.Store) (texts []string) {
	for _, err := range s.Check() {
		texts = append(texts, err.Error())
	}
	return texts
}
