package host_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"holdfast/host"
)

// Without Config.Secret, environment variables are looked up. This test is not parallel, as it sets one.
func TestSecretsAreAskedOfTheHost(t *testing.T) {
	t.Setenv("HOLDFAST_TEST_SECRET", "s3cret")
	w := openEnv(t)
	w.plugin("a")
	secret := func(name string) string { return "secrets {\n key = { env = \"" + name + "\" }\n}\n" }
	if err := w.create("set", secret("HOLDFAST_TEST_SECRET")); err != nil {
		t.Errorf("a variable that is set: %v", err)
	}
	if err := w.create("unset", secret("HOLDFAST_TEST_NONE")); err == nil ||
		!strings.Contains(err.Error(), "HOLDFAST_TEST_NONE is not set") {
		t.Errorf("one that is not: %v", err)
	}
}

var errVault = errors.New("the vault is sealed")

func TestSecretsComeFromConfigSecret(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	var names []string
	var mu sync.Mutex
	w.config.Secret = func(ctx context.Context, name string) (string, error) {
		mu.Lock()
		defer mu.Unlock()
		names = append(names, name)
		if _, bounded := ctx.Deadline(); !bounded {
			t.Error("the callback has no deadline")
		}
		if name == "bad" {
			return "", errVault
		}
		return "value", nil
	}
	w.open()
	w.plugin("a")
	if err := w.create("good", "secrets {\n key = { callback = \"good\" }\n}\n"); err != nil {
		t.Errorf("good: %v", err)
	}
	if err := w.create("bad", "secrets {\n key = { callback = \"bad\" }\n}\n"); err == nil ||
		!strings.Contains(err.Error(), errVault.Error()) {
		t.Errorf("bad: %v", err)
	}
	if len(names) < 2 || names[0] != "good" {
		t.Errorf("asked for %v", names)
	}
}

func TestFilesComeFromConfigFile(t *testing.T) {
	t.Parallel()
	src := host.Source{
		Name: "x.hcl",
		Text: []byte("task \"t\" {\n driver = \"raw_exec\"\n env {\n TEXT = file(\"/etc/x\")\n }\n}\n"),
	}
	w := openEnv(t)
	if _, _, err := w.host.Parse(w.ctx(), src, host.ParseOptions{}); !errors.Is(err, host.ErrInvalid) ||
		!strings.Contains(err.Error(), "reads no files") {
		t.Errorf("a host without the function: %v", err)
	}
	must(t, w.host.Close())
	w.config.File = func(_ context.Context, path string) ([]byte, error) { return []byte("content of " + path), nil }
	w.open()
	job, _, err := w.host.Parse(w.ctx(), src, host.ParseOptions{})
	must(t, err)
	if got := job.Groups[0].Tasks[0].Env["TEXT"]; got != "content of /etc/x" {
		t.Errorf("got %q", got)
	}
}

func TestHangingCallbackDelaysNeitherCallsNorShims(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	hangs, entered := make(chan struct{}), make(chan struct{}, 64)
	w.config.File = func(ctx context.Context, path string) ([]byte, error) {
		if path == "/hang" {
			entered <- struct{}{}
			<-hangs // not ctx: as bad as it gets
		}
		return []byte("x"), nil
	}
	w.open()
	parse := func(ctx context.Context, path string) error {
		text := "task \"t\" {\n driver = \"raw_exec\"\n env {\n TEXT = file(\"" + path + "\")\n }\n}\n"
		_, _, err := w.host.Parse(ctx, host.Source{Name: "x.hcl", Text: []byte(text)}, host.ParseOptions{})
		return err
	}
	ctx, cancel := context.WithCancel(w.ctx())
	var hanging sync.WaitGroup
	hanging.Go(func() { _ = parse(ctx, "/hang") })
	<-entered
	must(t, parse(w.ctx(), "/quick"))
	w.kill()
	must(t, parse(w.ctx(), "/quick"))
	cancel()
	hanging.Wait()
	close(hangs)
}
