package launch_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/host/internal/launch"
	"holdfast/registry"
)

// add is Add by another process, which knows only the directory.
func add(t *testing.T, dir, path, want, known string) (launch.Digest, error) {
	t.Helper()
	store, err := launch.OpenStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	return store.Add(t.Context(), path, want, known)
}

func mustAdd(t *testing.T, dir, path, want string) launch.Digest {
	t.Helper()
	d, err := add(t, dir, path, want, "")
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// picture changes with every write to dir or its files.
func picture(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	names := []string{"."}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	var all strings.Builder
	for _, name := range names {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(dir, name), &st); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(&all, name, st.Ino, st.Size, st.Mode, st.Mtim, st.Ctim)
	}
	return all.String()
}

func checkContent(t *testing.T, path, want string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil || string(text) != want {
		t.Errorf("%s holds %d bytes, not the wanted %d (%v)", path, len(text), len(want), err)
	}
	if info, err := os.Stat(path); err == nil && info.Mode() != 0o500 {
		t.Errorf("%s has the mode %v", path, info.Mode())
	}
}

func TestAddOfWhatIsStoredWritesNothing(t *testing.T) {
	t.Parallel()
	store, dir := openStore(t)
	path, sum := binaryFile(t, "#!/bin/true\n")
	if _, err := store.Add(t.Context(), path, sum, ""); err != nil {
		t.Fatal(err)
	}
	before := picture(t, dir)
	if _, err := store.Add(t.Context(), path, sum, ""); err != nil {
		t.Error(err)
	}
	mustAdd(t, dir, path, sum) // by the next process
	if after := picture(t, dir); after != before {
		t.Errorf("the store was\n%sand is\n%s", before, after)
	}
}

// A host starts again on a full disk. Only a new binary needs room.
func TestFullDiskHindersOnlyANewBinary(t *testing.T) {
	t.Parallel()
	work, dir := shortDir(t), smallDisk(t)
	source, newer := filepath.Join(work, "shim"), filepath.Join(work, "newer")
	padding := strings.Repeat("#", 64<<10)
	writeFile(t, source, script(work, "good")+padding, 0o755)
	writeFile(t, newer, script(work, "newer")+padding, 0o755)
	first := mustAdd(t, dir, source, "")
	fill(t, filepath.Join(dir, "full"))
	before := picture(t, dir)

	store, err := launch.OpenStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	again, err := store.Add(t.Context(), source, "", "")
	if err != nil || again != first {
		t.Errorf("%+v, %v; before %+v", again, err, first)
	}
	_, err = launch.Start(t.Context(),
		launch.Options{Store: store, Digest: again, RunDir: filepath.Join(work, "run"), StartTimeout: patience})
	checkText(t, err, "exited with code 9")
	checkRan(t, work, "good")
	_, err = store.Add(t.Context(), newer, "", "")
	checkText(t, err, newer, "no space left", "free some on the file system of "+dir)
	checkKind(t, err, registry.ErrExhausted)
	if after := picture(t, dir); after[strings.Index(after, "\n"):] != before[strings.Index(before, "\n"):] {
		t.Errorf("the store was\n%sand is\n%s", before, after)
	}
}

func smallDisk(t *testing.T) string {
	dir := shortDir(t)
	err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m,mode=0700")
	if errors.Is(err, unix.EPERM) {
		t.Skip("only root can mount a small disk")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

func fill(t *testing.T, path string) {
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
}

// Both the process that has stored it and the next one replace a damaged copy.
func TestAddMendsTheStoredCopy(t *testing.T) {
	t.Parallel()
	const text = "#!/bin/true\n"
	for name, harm := range map[string]func(stored string) error{
		"removed":        os.Remove,
		"not executable": func(stored string) error { return os.Chmod(stored, 0o400) },
		"written to":     func(stored string) error { return os.WriteFile(stored, []byte("#!/bin/evil\n"), 0o500) },
		"cut off":        func(stored string) error { return os.Truncate(stored, 3) },
		"replaced by name": func(stored string) error {
			return errors.Join(os.WriteFile(stored+"x", []byte("#!/bin/evil\n"), 0o500), os.Rename(stored+"x", stored))
		},
	} {
		store, dir := openStore(t)
		path, sum := binaryFile(t, text)
		if _, err := store.Add(t.Context(), path, "", ""); err != nil {
			t.Fatal(err)
		}
		for _, mend := range []func(){
			func() { _, err := store.Add(t.Context(), path, "", ""); checkNone(t, name, err) },
			func() { mustAdd(t, dir, path, "") },
		} {
			if err := harm(filepath.Join(dir, sum)); err != nil {
				t.Fatal(err)
			}
			mend()
			checkContent(t, filepath.Join(dir, sum), text)
		}
	}
}

func checkNone(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Errorf("%s: %v", what, err)
	}
}

// The binary is gone, as after an upgrade that was cut short. The stored copy of the last one is used.
func TestStoredCopyStandsInForABinaryThatIsGone(t *testing.T) {
	t.Parallel()
	work := shortDir(t)
	dir, source := filepath.Join(work, "store"), filepath.Join(work, "shim")
	writeFile(t, source, script(work, "old"), 0o755)
	mustAdd(t, dir, source, "")
	writeFile(t, source, script(work, "good"), 0o755)
	known := mustAdd(t, dir, source, "")
	if err := os.Remove(source); err != nil {
		t.Fatal(err)
	}
	before := picture(t, dir)
	store, err := launch.OpenStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	for want, last := range map[string]string{"": known.SHA256, known.SHA256: ""} {
		got, err := store.Add(t.Context(), source, want, last)
		if err != nil || got != (launch.Digest{SHA256: known.SHA256, SourceGone: true}) {
			t.Errorf("%+v, %v", got, err)
		}
		_, err = launch.Start(t.Context(),
			launch.Options{Store: store, Digest: got, RunDir: filepath.Join(work, "run"), StartTimeout: patience})
		checkText(t, err, "exited with code 9")
		checkRan(t, work, "good")
	}
	if after := picture(t, dir); after != before {
		t.Errorf("the store was\n%sand is\n%s", before, after)
	}
}

func TestGoneBinaryWithoutAnIntactCopy(t *testing.T) {
	t.Parallel()
	_, dir := openStore(t)
	path, sum := binaryFile(t, "#!/bin/true\n")
	mustAdd(t, dir, path, "")
	os.Remove(path)
	os.WriteFile(filepath.Join(dir, sum), []byte("#!/bin/evil\n"), 0o500)
	for want, known := range map[string]string{"": sum, sum: ""} {
		_, err := add(t, dir, path, want, known)
		checkText(t, err, path, "no such file", "install the binary at that path", "was changed")
		checkKind(t, err, registry.ErrDamaged)
	}
	other := strings.Repeat("ab", 32)
	writeFile(t, path+".sha256", other, 0o644) // of the next release, whose binary never came
	_, err := add(t, dir, path, "", sum)
	checkText(t, err, path, other, "install the binary at that path")
	checkKind(t, err, registry.ErrNotFound)
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("the operator changed their mind"))
	store, err := launch.OpenStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	_, err = store.Add(ctx, path, sum, "")
	checkText(t, err, "changed their mind")
}
