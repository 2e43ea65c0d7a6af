// Package disk is the directories, sockets and mount table of this machine, as the use cases ask for them: it satisfies task.Disk and
// node.Kernel over package mnt. Nothing in it follows a path into a mount, so a dead one freezes nobody; what has to touch one does so in
// a helper process with a deadline.
package disk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/registry"
	"holdfast/shim/internal/node"
	"holdfast/shim/internal/task"
)

// Disk is the part of the disk below the two directories of a layout.
type Disk struct {
	// Helper is the command that runs mount.LookMain, in which Users, Unmount and Look do what may hang. Without it they fail.
	Helper []string

	layout  hooks.Layout
	boot    string
	lookout mount.Lookout
}

var (
	_ task.Disk   = (*Disk)(nil)
	_ node.Kernel = (*Disk)(nil)
)

// New looks up the boot id.
func New(l hooks.Layout) (*Disk, error) {
	boot, err := mount.BootID()
	return &Disk{layout: l, boot: boot}, err
}

// Share makes the run directory and the mount root, each a shared mount, and proves that what a task mounts there appears here.
func (d *Disk) Share() error {
	dirs := []string{d.layout.Run, d.layout.MountRoot()}
	for _, dir := range dirs {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("make directory %s: %w", dir, typed(err))
		}
	}
	if err := mount.MakeShared(dirs...); err != nil {
		return err
	}
	err := mount.ProbePropagation(d.layout.MountRoot())
	if made, is := errors.AsType[*fs.PathError](err); is && made.Op == "mkdir" { // of a mount, ENOSPC means too many mounts
		return typed(err)
	}
	return err
}

// Boot is the boot id of this boot.
func (d *Disk) Boot() string { return d.boot }

// split is a path of ours as one of the layout's two directories and what lies below it.
func (d *Disk) split(path string) (root, rel string, err error) {
	if !d.layout.Ours(path) {
		return "", "", registry.Errorf(registry.ErrInternal, "path %q is not one of ours: nothing is done to it", path)
	}
	for _, root := range []string{d.layout.MountRoot(), d.layout.Run} {
		if rel, below := strings.CutPrefix(path, root+"/"); below {
			return root, rel, nil
		}
	}
	return "", "", registry.Errorf(registry.ErrInternal, "path %q is below neither root", path)
}

// sockets refuses what is not below the run directory.
func (d *Disk) sockets(path string) error {
	root, _, err := d.split(path)
	if err == nil && root != d.layout.Run {
		err = registry.Errorf(registry.ErrInternal, "path %q is not one of a socket: nothing is done to it", path)
	}
	return err
}

// MakeDir makes a directory and its parents, 0700. It may exist.
func (d *Disk) MakeDir(path string) error {
	root, rel, err := d.split(path)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(root, 0o700); err != nil {
		return typed(err)
	}
	return typed(mount.MkdirAll(root, rel))
}

// MakeDirs makes the directories of a preparation.
func (d *Disk) MakeDirs(dirs []hooks.HostDir) error {
	for _, dir := range dirs {
		if err := d.MakeDir(dir.Path); err != nil {
			return err
		}
	}
	return nil
}

// RemoveDir is rmdir(2). The directory may be gone.
func (d *Disk) RemoveDir(path string) error {
	root, rel, err := d.split(path)
	if err != nil {
		return err
	}
	return mount.Rmdir(root, rel)
}

// ClearSocket removes a socket that nobody answers at, and says whether somebody does.
func (d *Disk) ClearSocket(_ context.Context, path string) (answers bool, err error) {
	if err := d.sockets(path); err != nil {
		return false, err
	}
	return mount.StaleSocket(path)
}

// RemoveSocketDir removes the directory of a task's sockets with what a plugin left in it.
func (d *Disk) RemoveSocketDir(path string) error {
	if err := d.sockets(path); err != nil {
		return err
	}
	return mount.RemoveTree(path)
}

// SweepSocketDirs removes the directories of sockets that are not to be kept, unless somebody answers in one.
func (d *Disk) SweepSocketDirs(keep map[string]bool) error {
	entries, err := os.ReadDir(d.layout.SocketDirs())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var errs []error
	for _, e := range entries {
		path := filepath.Join(d.layout.SocketDirs(), e.Name())
		if keep[path] {
			continue
		}
		answers, err := mount.StaleSocket(filepath.Join(path, filepath.Base(d.layout.Socket(registry.TaskKey{}))))
		if err == nil && !answers {
			err = mount.RemoveTree(path)
		}
		errs = append(errs, err)
	}
	return errors.Join(append(errs, err)...)
}

// Mounted says whether path is a mount point.
func (d *Disk) Mounted(path string) (bool, error) {
	return mount.IsPoint(d.layout.MountRoot(), path)
}

// Below lists the mount points strictly below root.
func (d *Disk) Below(root string) ([]string, error) {
	mounts, err := mount.Below(root)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, m := range mounts {
		if m.Point != root {
			out = append(out, m.Point)
		}
	}
	return slices.Compact(slices.Sorted(slices.Values(out))), nil
}

// typed gives a full disk its kind.
func typed(err error) error {
	if full(err) {
		return registry.Errorf(registry.ErrExhausted, "%w; make room, then try again", err)
	}
	return err
}
