package testbin

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/gofrs/flock"
)

func TestBuildIsReusedUntilTheSourceChanges(t *testing.T) {
	root := t.TempDir()
	t.Chdir(root)
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("go.mod", "module example\n")
	build := func(says string) string {
		t.Helper()
		write("main.go", "package main\n\nfunc main() { println(\""+says+"\") }\n")
		dir, err := Build(Program{Name: "p", Package: "example"})
		if err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command(filepath.Join(dir, "p")).CombinedOutput(); err != nil || string(out) != says+"\n" {
			t.Fatalf("%q, %v", out, err)
		}
		return dir
	}
	first := build("one")
	if again := build("one"); again != first {
		t.Errorf("the same source was built into %s, then into %s", first, again)
	}
	if build("two") == first {
		t.Error("another source was not built")
	}
}

func TestPruneKeepsTheNewestSetsAndThoseInUse(t *testing.T) {
	t.Parallel()
	sets := t.TempDir()
	for i, name := range []string{"a", "b", "c", "d", "e"} {
		dir := filepath.Join(sets, name)
		at := time.Now().Add(-time.Duration(i) * time.Hour)
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(dir, at, at); err != nil {
			t.Fatal(err)
		}
	}
	user := flock.New(filepath.Join(sets, "e.lock"))
	if _, err := user.TryRLock(); err != nil {
		t.Fatal(err)
	}
	defer user.Close()
	if err := prune(sets); err != nil {
		t.Fatal(err)
	}
	for name, stays := range map[string]bool{"a": true, "c": true, "d": false, "e": true} {
		if _, err := os.Stat(filepath.Join(sets, name)); (err == nil) != stays {
			t.Errorf("set %s: %v", name, err)
		}
	}
}
