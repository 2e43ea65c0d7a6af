package launch_test

import (
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host/internal/launch"
	"holdfast/registry"
)

func openStore(t testing.TB) (*launch.Store, string) {
	dir := filepath.Join(shortDir(t), "store")
	store, err := launch.OpenStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	return store, dir
}

// binaryFile creates an executable and computes its digest.
func binaryFile(t testing.TB, text string) (path, sum string) {
	path = filepath.Join(shortDir(t), "shim")
	writeFile(t, path, text, 0o755)
	raw := sha256.Sum256([]byte(text))
	return path, hex.EncodeToString(raw[:])
}

func TestAddStoresUnderTheDigest(t *testing.T) {
	t.Parallel()
	store, dir := openStore(t)
	path, sum := binaryFile(t, "#!/bin/true\n")
	for _, c := range []struct {
		want, beside string
		firstUse     bool
	}{
		{"", "", true},
		{strings.ToUpper(sum), "", false},
		{"", sum + "  shim\n", false},
	} {
		if c.beside != "" {
			writeFile(t, path+".sha256", c.beside, 0o644)
		}
		got, err := store.Add(t.Context(), path, c.want, "")
		if err != nil || got != (launch.Digest{SHA256: sum, FirstUse: c.firstUse}) {
			t.Fatalf("%+v: %+v, %v", c, got, err)
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, sum))
	if err != nil || string(text) != "#!/bin/true\n" {
		t.Errorf("stored %q, %v", text, err)
	}
	if info, err := os.Stat(filepath.Join(dir, sum)); err != nil || info.Mode() != 0o500 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
}

func TestAddRefuses(t *testing.T) {
	t.Parallel()
	store, dir := openStore(t)
	good, sum := binaryFile(t, "#!/bin/true\n")
	other := strings.Repeat("ab", 32)
	beside, _ := binaryFile(t, "#!/bin/true\n")
	writeFile(t, beside+".sha256", other, 0o644)
	open, _ := binaryFile(t, "x")
	os.Chmod(open, 0o777)
	plain, _ := binaryFile(t, "x")
	os.Chmod(plain, 0o644)
	empty, _ := binaryFile(t, "")
	fifo := filepath.Join(shortDir(t), "fifo")
	if err := unix.Mkfifo(fifo, 0o755); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(shortDir(t), "socket")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	for _, c := range []struct {
		path, want string
		kind       error
		text       []string
	}{
		{good, other, registry.ErrInvalid, []string{sum, other, "not the wanted binary"}},
		{beside, "", registry.ErrInvalid, []string{sum, other}},
		{good, "beef", registry.ErrInvalid, []string{"64 hexadecimal digits"}},
		{open, "", registry.ErrDenied, []string{"chmod o-w"}},
		{plain, "", registry.ErrInvalid, []string{"chmod +x"}},
		{empty, "", registry.ErrInvalid, []string{"empty", "install"}},
		{fifo, "", registry.ErrInvalid, []string{"not a regular file"}},
		{filepath.Dir(good), "", registry.ErrInvalid, []string{"not a regular file", "give the path"}},
		{socket, "", registry.ErrInvalid, []string{"not a regular file", "give the path"}},
		{good + "x", "", os.ErrNotExist, []string{good + "x", "no copy of it is known", "install the binary"}},
		{good + "x", other, registry.ErrNotFound, []string{good + "x", other, "install the binary"}},
	} {
		_, err := store.Add(t.Context(), c.path, c.want, "")
		checkText(t, err, c.text...)
		checkKind(t, err, c.kind)
	}
	checkEmpty(t, dir)
}

func TestStoreOfOthersIsRefused(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	os.Chmod(dir, 0o777)
	_, err := launch.OpenStore(dir)
	checkText(t, err, "others can write", "0700")
	checkKind(t, err, registry.ErrDenied)
}

func TestOpenStoreRemovesWhatAnAddHasLeft(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	writeFile(t, filepath.Join(dir, ".add-123"), "half", 0o600)
	store, err := launch.OpenStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	checkEmpty(t, dir)
}

// Binaries in use count and are never removed. Without Keep, the last ones used stay.
func TestStoreKeepsTheLastThreeAndThoseInUse(t *testing.T) {
	t.Parallel()
	store, dir := openStore(t)
	running, err := store.Add(t.Context(), shared.self, shared.digest.SHA256, "")
	if err != nil {
		t.Fatal(err)
	}
	opts := options(t, "plain")
	opts.Store, opts.Digest = store, running
	p := start(t, opts)
	var sums []string
	for i := range 5 {
		path, sum := binaryFile(t, fmt.Sprintf("#!/bin/true %d\n", i))
		if _, err := store.Add(t.Context(), path, "", ""); err != nil {
			t.Fatal(err)
		}
		sums = append(sums, sum)
	}
	checkStored(t, dir, append(sums[3:], running.SHA256)...)
	kill(t, p)
	again := start(t, opts) // a restart after a crash, with three newer binaries in the store
	kill(t, again)
	path, sum := binaryFile(t, "#!/bin/true last\n")
	if _, err := store.Add(t.Context(), path, "", ""); err != nil {
		t.Fatal(err)
	}
	checkStored(t, dir, sums[4], running.SHA256, sum)
}

func TestStoreKeepsWhatItIsToldTo(t *testing.T) {
	t.Parallel()
	store, dir := openStore(t)
	var sums []string
	add := func(n int) {
		for range n {
			path, sum := binaryFile(t, fmt.Sprintf("#!/bin/true %d\n", len(sums)))
			if _, err := store.Add(t.Context(), path, "", ""); err != nil {
				t.Fatal(err)
			}
			sums = append(sums, sum)
		}
	}
	prune := func() {
		if err := store.Prune(); err != nil {
			t.Fatal(err)
		}
	}
	add(3)
	store.Keep(sums[0], sums[1], sums[2], "")
	add(4)
	checkStored(t, dir, sums[0], sums[1], sums[2], sums[6])
	prune()
	checkStored(t, dir, sums[:3]...)
	store.Keep(sums[1])
	add(1)
	checkStored(t, dir, sums[1], sums[2], sums[7])
	add(1)
	prune()
	checkStored(t, dir, sums[1], sums[7], sums[8])
}

// stalled is a context that blocks each look at it, as a slow disk does.
type stalled struct {
	context.Context
	begun, goOn chan struct{}
	once        *sync.Once
}

func stall(ctx context.Context) stalled {
	return stalled{ctx, make(chan struct{}), make(chan struct{}), new(sync.Once)}
}

func (s stalled) Err() error {
	s.once.Do(func() { close(s.begun) })
	<-s.goOn
	return s.Context.Err()
}

// Neither a restart after a crash nor the end of a shim waits for a binary that is read for a swap.
func TestStartDoesNotWaitForAnotherBinary(t *testing.T) {
	t.Parallel()
	store, _ := openStore(t)
	running, err := store.Add(t.Context(), shared.self, shared.digest.SHA256, "")
	if err != nil {
		t.Fatal(err)
	}
	opts := options(t, "plain")
	opts.Store, opts.Digest = store, running
	path, _ := binaryFile(t, "#!/bin/true\n")
	ctx := stall(t.Context())
	var adding sync.WaitGroup
	adding.Go(func() {
		if _, err := store.Add(ctx, path, "", ""); err != nil {
			t.Error(err)
		}
	})
	defer adding.Wait()
	defer close(ctx.goOn)
	<-ctx.begun
	lived := make(chan error, 1)
	go func() {
		p, err := launch.Start(t.Context(), opts)
		if err == nil {
			err = p.Kill(t.Context())
		}
		lived <- err
	}()
	select {
	case err := <-lived:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Error("a start waits for the end of an Add of another binary")
	}
}

func checkStored(t *testing.T, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]bool)
	for _, e := range entries {
		got[e.Name()] = true
	}
	for _, sum := range want {
		if !got[sum] {
			t.Errorf("%.12s is not stored", sum)
		}
	}
	if len(got) != len(want) {
		t.Errorf("stored: %v", got)
	}
}

// The binary is cut at several places.
func TestBinaryThatWasCutOff(t *testing.T) {
	t.Parallel()
	whole, err := os.ReadFile(shared.self)
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{4, 40, 300, 4096, len(whole) / 2} {
		store, _ := openStore(t)
		path, _ := binaryFile(t, string(whole[:size]))
		digest, err := store.Add(t.Context(), path, "", "")
		if err != nil {
			t.Fatal(err)
		}
		runDir := shortDir(t)
		_, err = launch.Start(t.Context(), launch.Options{Store: store, Digest: digest, RunDir: runDir})
		checkText(t, err, fmt.Sprintf("is cut off after %d bytes", size), "install the whole binary")
		checkKind(t, err, registry.ErrUnsupported)
		checkEmpty(t, runDir)
	}
}

func TestBinaryOfAnotherMachine(t *testing.T) {
	t.Parallel()
	var head [64]byte
	copy(head[:], elf.ELFMAG)
	head[elf.EI_CLASS], head[elf.EI_DATA], head[elf.EI_VERSION] = byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), 1
	binary.LittleEndian.PutUint16(head[16:], uint16(elf.ET_EXEC))
	binary.LittleEndian.PutUint16(head[18:], uint16(elf.EM_S390))
	binary.LittleEndian.PutUint32(head[20:], 1)
	binary.LittleEndian.PutUint16(head[52:], 64)
	for _, c := range []struct{ text, says string }{
		{string(head[:]), "an ELF executable for S390"},
		{"just text\n", "no ELF executable"},
	} {
		store, _ := openStore(t)
		path, _ := binaryFile(t, c.text)
		digest, err := store.Add(t.Context(), path, "", "")
		if err != nil {
			t.Fatal(err)
		}
		runDir := shortDir(t)
		_, err = launch.Start(t.Context(), launch.Options{Store: store, Digest: digest, RunDir: runDir})
		checkText(t, err, "cannot run here", c.says, "this machine runs linux/")
		checkKind(t, err, registry.ErrUnsupported)
		checkEmpty(t, runDir)
	}
}
