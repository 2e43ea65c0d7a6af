package taskdriver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/pkg/authconfig"
	"github.com/moby/moby/api/types/registry"
	"github.com/moby/moby/client"

	holdfast "holdfast/registry"
)

// ensureImage loads the task's archive of images, or pulls its image if the engine does not have it.
func (d Container) ensureImage(ctx context.Context, t Task) error {
	c := t.container
	if c.Load != "" {
		return d.load(ctx, t)
	}
	if !c.ForcePull {
		_, err := d.engine.ImageInspect(ctx, c.Image)
		if err == nil || !errdefs.IsNotFound(err) {
			return err
		}
	}
	limit, err := pullTimeout(c)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not complete after %v (image_pull_timeout)", limit))
	defer cancel()
	if err := d.pull(ctx, c); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return holdfast.Errorf(holdfast.ErrNotFound, "pull image %s: %w; check the name, or load it into the engine",
			c.Image, err)
	}
	return nil
}

func (d Container) load(ctx context.Context, t Task) error {
	path := t.container.Load
	if !filepath.IsAbs(path) {
		path = filepath.Join(t.localDir(), path)
	}
	f, err := os.Open(path)
	if err != nil {
		return holdfast.Errorf(holdfast.ErrNotFound, "load: %w", err)
	}
	defer f.Close()
	result, err := d.engine.ImageLoad(ctx, f)
	if err == nil {
		_, err = io.Copy(io.Discard, result)
		err = errors.Join(err, result.Close())
	}
	if err != nil {
		return fmt.Errorf("load %s: %w", path, err)
	}
	if _, err := d.engine.ImageInspect(ctx, t.container.Image); err != nil {
		return holdfast.Errorf(holdfast.ErrNotFound, "%s does not hold image %s: %w", path, t.container.Image, err)
	}
	return nil
}

func (d Container) pull(ctx context.Context, c *containerConfig) error {
	options := client.ImagePullOptions{}
	for _, a := range c.Auth {
		var err error
		options.RegistryAuth, err = authconfig.Encode(registry.AuthConfig{
			Username: a.Username, Password: a.Password, ServerAddress: a.ServerAddress,
		})
		if err != nil {
			return err
		}
	}
	response, err := d.engine.ImagePull(ctx, c.Image, options)
	if err != nil {
		return err
	}
	return response.Wait(ctx)
}
