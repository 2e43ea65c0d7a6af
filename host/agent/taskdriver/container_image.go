//go:build !taskparent

package taskdriver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/go-units"
	"github.com/moby/moby/api/types/jsonstream"
	"github.com/moby/moby/client"

	"holdfast/registry"
)

var _ Preparer = Container{}

// Prepare loads the task's archive of images, or pulls its image if the engine does not have it.
func (d Container) Prepare(ctx context.Context, t Task, progress func(string)) error {
	if err := d.ping(ctx); err != nil {
		return d.explain(t.ID, err)
	}
	c := t.container
	if c.Load != "" {
		progress("loading " + c.Load)
		if err := d.load(ctx, t); err != nil {
			return d.explain(t.ID, err)
		}
	}
	image, err := d.inspectImage(ctx, c.Image)
	if c.Load == "" && (c.ForcePull || errdefs.IsNotFound(err)) {
		if err := d.pull(ctx, c, progress); err != nil {
			return d.explain(t.ID, err)
		}
		image, err = d.inspectImage(ctx, c.Image)
	}
	if err != nil {
		return d.explain(t.ID, fmt.Errorf("image %s: %w", c.Image, err))
	}
	return checkArch(c.Image, image.Architecture)
}

func (d Container) inspectImage(ctx context.Context, name string) (image client.ImageInspectResult, err error) {
	err = d.call(ctx, "inspect image "+name, queryTimeout, func(ctx context.Context) (err error) {
		image, err = d.engine.ImageInspect(ctx, name)
		return err
	})
	return image, err
}

// ping checks that a container engine answers.
func (d Container) ping(ctx context.Context) error {
	var answer client.PingResult
	err := d.call(ctx, "ping", queryTimeout, func(ctx context.Context) (err error) {
		answer, err = d.engine.Ping(ctx, client.PingOptions{})
		return err
	})
	if errors.Is(err, errSilent) || ctx.Err() != nil {
		return err
	}
	if answer.APIVersion == "" && !client.IsErrConnectionFailed(err) { // something else than an engine answers
		return errors.Join(errSilent, err)
	}
	return err
}

// checkArch refuses an image for another processor. Its program would fail, at best with a message in its log.
func checkArch(image, arch string) error {
	own := runtime.GOARCH
	if arch == "" || arch == own || own == "amd64" && arch == "386" || own == "arm64" && arch == "arm" {
		return nil
	}
	if emulators, _ := filepath.Glob("/proc/sys/fs/binfmt_misc/qemu-*"); len(emulators) > 0 {
		return nil
	}
	return registry.Errorf(registry.ErrUnsupported, "image %s is for %s, and this machine is %s; use an image for %s",
		image, arch, own, own)
}

// load loads the task's archive of images. It returns ErrNotFound if the archive is missing or lacks the task's image.
func (d Container) load(ctx context.Context, t Task) error {
	path := t.container.Load
	if !filepath.IsAbs(path) {
		path = filepath.Join(t.localDir(), path)
	}
	f, err := os.Open(path)
	if err != nil {
		return registry.Errorf(registry.ErrNotFound, "load: %w", err)
	}
	defer f.Close()
	loading, cancel := t.container.withPullTimeout(ctx)
	defer cancel()
	result, err := d.engine.ImageLoad(loading, f)
	if err == nil {
		err = errors.Join(readMessages(result), result.Close())
	}
	if err != nil && loading.Err() != nil {
		err = context.Cause(loading)
	}
	if err != nil {
		return fmt.Errorf("load %s: %w", path, err)
	}
	if _, err := d.inspectImage(ctx, t.container.Image); errdefs.IsNotFound(err) {
		return registry.Errorf(registry.ErrNotFound, "%s does not hold image %s", path, t.container.Image)
	}
	return nil
}

// readMessages reads the engine's messages to their end. If a message reports an error, readMessages returns it.
func readMessages(r io.Reader) error {
	for d := json.NewDecoder(r); ; {
		var m jsonstream.Message
		if err := d.Decode(&m); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if m.Error != nil {
			return m.Error
		}
	}
}

// withPullTimeout returns a context that ends after image_pull_timeout.
func (c *containerConfig) withPullTimeout(ctx context.Context) (context.Context, context.CancelFunc) {
	limit, _ := c.pullTimeout() // checked by Configure
	return context.WithTimeoutCause(ctx, limit, fmt.Errorf("not complete after %v (image_pull_timeout)", limit))
}

// pull pulls the image within its image_pull_timeout.
func (d Container) pull(ctx context.Context, c *containerConfig, progress func(string)) error {
	options := client.ImagePullOptions{}
	for _, a := range c.Auth {
		var err error
		if options.RegistryAuth, err = a.header(ctx); err != nil {
			return err
		}
	}
	progress("pulling image " + c.Image)
	ctx, cancel := c.withPullTimeout(ctx)
	defer cancel()
	response, err := d.engine.ImagePull(ctx, c.Image, options)
	if err == nil {
		err = followPull(ctx, response, func(text string) { progress("pulling image " + c.Image + ": " + text) })
	}
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	if err == nil {
		return nil
	}
	if errdefs.IsNotFound(err) || errdefs.IsUnauthorized(err) || errdefs.IsPermissionDenied(err) {
		err = registry.Errorf(registry.ErrNotFound, "%w", err) // ErrNotFound is not retried
	}
	return fmt.Errorf("pull image %s: %w; check the name, the registry and auth, or load the image into the engine",
		c.Image, err)
}

// progressInterval is the time between two reports of the progress of a pull.
const progressInterval = 5 * time.Second

// followPull reads the engine's messages until the pull ends. It reports the arrived part of the layers that are known
// so far.
func followPull(ctx context.Context, response client.ImagePullResponse, report func(string)) error {
	type layer struct{ current, total int64 }
	layers := map[string]layer{}
	reported := time.Now()
	for m, err := range response.JSONMessages(ctx) {
		if err != nil {
			return err
		}
		if m.Error != nil {
			return m.Error
		}
		if m.Progress == nil || m.Status != "Downloading" {
			continue
		}
		layers[m.ID] = layer{m.Progress.Current, m.Progress.Total}
		if time.Since(reported) < progressInterval {
			continue
		}
		var all layer
		for _, l := range layers {
			all.current, all.total = all.current+l.current, all.total+l.total
		}
		reported = time.Now()
		report(units.BytesSize(float64(all.current)) + " of " + units.BytesSize(float64(all.total)))
	}
	return ctx.Err()
}
