package host_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"holdfast/host"
)

// Without Config.Secret, environment variables are looked up. This test is not parallel, as it sets one.
func TestSecretsComeFromTheHost(t *testing.T) {
	t.Setenv("HOLDFAST_TEST_SECRET", "s3cret")
	w := openEnv(t)
	p := w.plugin("a")
	create := func(id, reference string) error { return w.create(id, "secrets {\n key = { "+reference+" }\n}\n") }
	must(t, create("set", `env = "HOLDFAST_TEST_SECRET"`))
	if err := create("unset", `env = "HOLDFAST_TEST_NONE"`); err == nil ||
		!strings.Contains(err.Error(), "HOLDFAST_TEST_NONE is not set") {
		t.Errorf("a variable that is not set: %v", err)
	}
	p.Stop()
	must(t, w.host.Close())
	w.config.Secret = func(ctx context.Context, name string) (string, error) {
		if _, bounded := ctx.Deadline(); !bounded {
			t.Error("the callback has no deadline")
		}
		if name == "good" {
			return "value", nil
		}
		return "", errors.New("the vault is sealed")
	}
	w.open()
	w.plugin("a")
	must(t, create("good", `callback = "good"`))
	if err := create("bad", `callback = "bad"`); err == nil || !strings.Contains(err.Error(), "the vault is sealed") {
		t.Errorf("bad: %v", err)
	}
}

// file has the host parse a task that contains a file.
func (w *env) file(ctx context.Context, path string) (string, error) {
	text := "task \"t\" {\n driver = \"raw_exec\"\n env {\n TEXT = file(\"" + path + "\")\n }\n}\n"
	job, _, err := w.host.Parse(ctx, host.Source{Name: "x.hcl", Text: []byte(text)}, host.ParseOptions{})
	if err != nil {
		return "", err
	}
	return job.Groups[0].Tasks[0].Env["TEXT"], nil
}

// A callback that hangs delays neither other calls nor the next shim.
func TestFilesComeFromConfigFile(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	if _, err := w.file(w.ctx(), "/x"); !errors.Is(err, host.ErrInvalid) ||
		!strings.Contains(err.Error(), "reads no files") {
		t.Errorf("a host without the function: %v", err)
	}
	must(t, w.host.Close())
	hangs, entered := make(chan struct{}), make(chan struct{}, 64)
	w.config.File = func(_ context.Context, path string) ([]byte, error) {
		if path == "/hang" {
			entered <- struct{}{}
			<-hangs // even after its context has ended
		}
		return []byte("content of " + path), nil
	}
	w.open()
	ctx, cancel := context.WithCancel(w.ctx())
	var hanging sync.WaitGroup
	hanging.Go(func() { _, _ = w.file(ctx, "/hang") })
	<-entered
	for range 2 {
		if got, err := w.file(w.ctx(), "/quick"); err != nil || got != "content of /quick" {
			t.Errorf("got %q, %v", got, err)
		}
		w.kill()
	}
	cancel()
	hanging.Wait()
	must(t, w.host.Close())
	close(hangs)
}

// A job that the old shim still parses when it ends, after a swap, is parsed by the new one.
func TestSwapFailsNoParseThatWaitsForAFile(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	w.config.Bake = time.Millisecond
	asked, swapped := make(chan struct{}, 64), make(chan struct{})
	w.config.File = func(ctx context.Context, _ string) ([]byte, error) {
		asked <- struct{}{}
		select {
		case <-swapped:
			return []byte("content"), nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	w.open()
	var parses sync.WaitGroup
	for range 4 {
		parses.Go(func() {
			if _, err := w.file(w.ctx(), "/x"); err != nil {
				t.Error(err)
			}
		})
		<-asked
	}
	_, err := w.host.Swap(w.ctx(), host.Binary{Path: another(t, w.dir, "next")})
	must(t, err)
	w.awaitCommit()
	close(swapped)
	parses.Wait()
}
