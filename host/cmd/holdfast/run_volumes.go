package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"holdfast/host"
	"holdfast/internal/display"
	"holdfast/registry"
)

// createVolume creates or registers a volume, and waits for its plugin without a limit.
func (o *foreground) createVolume(ctx context.Context, spec host.VolumeSpec) error {
	if spec.External != "" {
		return o.retry(ctx, spec, "registered", func() error {
			_, err := o.host.RegisterVolume(ctx, spec)
			return err
		})
	}
	err := o.retry(ctx, spec, "created", func() error {
		_, err := o.host.CreateVolume(ctx, spec)
		return err
	})
	switch {
	case err == nil:
		o.created = append(o.created, spec)
	case !errors.Is(err, registry.ErrExists): // ErrExists: an earlier run has created the volume
		o.uncertain = append(o.uncertain, spec)
	}
	return err
}

// retry calls do until it succeeds or certainly fails, or ctx ends. done says in the error what do should have done.
func (o *foreground) retry(ctx context.Context, spec host.VolumeSpec, done string, do func() error) error {
	reported, since := "", time.Now()
	stop := every(ctx, waitInterval, func(ctx context.Context) {
		if text := o.volumeWait(ctx, spec); text != "" {
			o.lines.print("waited %s so far: %s", display.Span(time.Since(since)), text)
		}
	})
	defer stop()
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		err := do()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case !errors.Is(err, registry.ErrUnavailable) && !errors.Is(err, registry.ErrNotFound) &&
			!errors.Is(err, registry.ErrUncertain):
			return fmt.Errorf("volume %s was not %s: %w", spec.VolumeName(), done, err)
		case err.Error() != reported:
			reported = err.Error()
			o.lines.print("volume %s: waiting: %s", spec.VolumeName(), reported)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// volumeWait says what the creation, registration or deletion of a volume waits for. It is empty if that is not known.
func (o *foreground) volumeWait(ctx context.Context, spec host.VolumeSpec) string {
	list, _, err := o.host.Volumes(ctx, host.VolumeQuery{Name: spec.VolumeName()})
	if err != nil || len(list) == 0 {
		return fmt.Sprintf("volume %s waits for plugin %s", spec.VolumeName(), spec.Plugin)
	}
	if w, waits := list[0].CallWait(); waits {
		return w.String()
	}
	return ""
}

// settleVolume repeats a creation to learn its outcome. ours reports whether this run may have created the volume.
func (o *foreground) settleVolume(ctx context.Context, spec host.VolumeSpec) (ours bool, err error) {
	known, _, err := o.host.Volumes(ctx, host.VolumeQuery{Name: spec.VolumeName()})
	if err != nil || len(known) == 0 { // the plugin was not called, or has refused
		return false, err
	}
	if known[0].State == registry.VolumeUncertain { // DeleteVolume finds out the outcome
		return true, nil
	}
	o.lines.print("volume %s: creation outcome unknown; repeating the call before deletion", spec.VolumeName())
	err = o.retry(ctx, spec, "created", func() error {
		_, err := o.host.CreateVolume(ctx, spec)
		return err
	})
	if errors.Is(err, registry.ErrExists) {
		return false, nil
	}
	return true, nil // even a failed creation may have left a record for DeleteVolume
}

// recheckUncertain removes from o.uncertain the volumes whose creation has an outcome by now.
func (o *foreground) recheckUncertain(ctx context.Context) error {
	var errs []error
	o.uncertain = slices.DeleteFunc(o.uncertain, func(spec host.VolumeSpec) bool {
		known, _, err := o.host.Volumes(ctx, host.VolumeQuery{Name: spec.VolumeName()})
		errs = append(errs, err)
		return err == nil && (len(known) == 0 || known[0].State == registry.VolumeReady)
	})
	return errors.Join(errs...)
}

// deleteVolumes deletes the volumes that this run has created.
func (o *foreground) deleteVolumes(ctx context.Context) error {
	var errs []error
	o.uncertain = slices.DeleteFunc(o.uncertain, func(spec host.VolumeSpec) bool {
		ours, err := o.settleVolume(ctx, spec)
		if ours {
			err = o.deleteVolume(ctx, spec)
		}
		errs = append(errs, err)
		return err == nil
	})
	o.created = slices.DeleteFunc(o.created, func(spec host.VolumeSpec) bool {
		err := o.deleteVolume(ctx, spec)
		errs = append(errs, err)
		return err == nil
	})
	return errors.Join(errs...)
}

func (o *foreground) deleteVolume(ctx context.Context, spec host.VolumeSpec) error {
	return o.retry(ctx, spec, "deleted", func() error {
		err := o.host.DeleteVolume(ctx, spec.VolumeName())
		if errors.Is(err, registry.ErrNotFound) {
			return nil
		}
		return err
	})
}

// reportVolumes prints the volumes that may still exist at their plugins.
func (o *foreground) reportVolumes() {
	for _, spec := range o.uncertain {
		o.lines.print("volume %s may exist at plugin %s: its creation outcome is unknown", spec.VolumeName(),
			spec.Plugin)
	}
	for _, spec := range o.created {
		if o.flags.deleteVolumes {
			o.lines.print("volume %s was not deleted and may still exist at plugin %s", spec.VolumeName(), spec.Plugin)
		}
	}
}
