//go:build !taskparent

package taskdriver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// undoStart removes what a failed start has left, and returns the error of the start. If the engine answers and is
// only too slow, the error is not ErrUnavailable, so that the restart policy counts the failure.
func (d Container) undoStart(ctx context.Context, h Handle, err error) error {
	ctx = context.WithoutCancel(ctx)
	if errors.Is(err, errSilent) && d.ping(ctx) == nil {
		err = fmt.Errorf("the engine at %s answers, but has not started the container within %v; see its log", d.host,
			changeTimeout)
	}
	if removeErr := d.remove(ctx, h); removeErr != nil {
		err = errors.Join(err, removeErr) // the handle stays, so that Find returns the container
	} else {
		_ = os.Remove(filepath.Join(h.Dir, handleFile))
	}
	return d.explain(h.ID, err)
}

// adoptEarlier is Adopt for the earlier attempt in a task's directory. If the container of that attempt could not be
// removed before, adoptEarlier removes it now. That may be the container of an attempt that has ended, or of a failed
// Start, which has recorded no start time.
func (d Container) adoptEarlier(ctx context.Context, h Handle) (alive bool, err error) {
	_, ended, err := readExit(h)
	if err != nil || h.Container == "" || !ended && h.Created != "" {
		return d.Adopt(ctx, h)
	}
	if err := d.remove(ctx, h); err != nil && !ended { // an ended container uses nothing, so it may stay
		return false, d.explain(h.ID, err)
	}
	return false, nil
}

var _ Remover = Container{}

// RemoveFailed removes the container of a failed Start. The handle in the directory names the container.
func (d Container) RemoveFailed(ctx context.Context, dir string) error {
	var h Handle
	found, err := readRecord(dir, handleFile, &h)
	if err != nil || !found || h.Container == "" || h.Created != "" {
		return err
	}
	_, ended, err := readExit(h)
	if err != nil || ended {
		return err
	}
	if current, err := h.isCurrentBoot(); err != nil || !current {
		return err
	}
	if err = d.ping(ctx); err == nil {
		err = d.remove(ctx, h)
	}
	if err != nil {
		return fmt.Errorf("container %s, whose start failed, may still start: %w", h.Container, d.explain(h.ID, err))
	}
	return os.Remove(filepath.Join(dir, handleFile))
}
