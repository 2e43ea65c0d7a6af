package launch_test

import (
	"crypto/sha256"
	"debug/elf"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/host/internal/launch"
	"holdfast/registry"
)

func openStore(t testing.TB) (*launch.Store, string) {
	dir := filepath.Join(shortDir(t), "store")
	return reopen(t, dir), dir
}

// reopen opens a store as the next process does, which knows only the directory.
func reopen(t testing.TB, dir string) *launch.Store {
	store, err := launch.OpenStore(dir)
	must(t, err)
	return store
}

// binaryFile creates an executable and computes its digest.
func binaryFile(t testing.TB, text string) (path, sum string) {
	path = filepath.Join(shortDir(t), "shim")
	writeFile(t, path, text, 0o755)
	raw := sha256.Sum256([]byte(text))
	return path, hex.EncodeToString(raw[:])
}

func add(t *testing.T, store *launch.Store, path string) launch.Digest {
	t.Helper()
	d, err := store.Add(t.Context(), path, "", "")
	must(t, err)
	return d
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
	checkContent(t, filepath.Join(dir, sum), "#!/bin/true\n")
}

func checkContent(t *testing.T, path, want string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if info, _ := os.Stat(path); err != nil || string(text) != want || info.Mode() != 0o500 {
		t.Errorf("%s holds %d bytes, not the wanted %d, %v (%v)", path, len(text), len(want), info, err)
	}
}

func TestAddRefusesABadBinary(t *testing.T) {
	t.Parallel()
	store, dir := openStore(t)
	good, sum := binaryFile(t, "#!/bin/true\n")
	other := strings.Repeat("ab", 32)
	beside, _ := binaryFile(t, "#!/bin/true\n")
	writeFile(t, beside+".sha256", other, 0o644)
	open, _ := binaryFile(t, "x")
	must(t, os.Chmod(open, 0o777))
	plain, _ := binaryFile(t, "x")
	must(t, os.Chmod(plain, 0o644))
	empty, _ := binaryFile(t, "")
	fifo, socket := filepath.Join(shortDir(t), "fifo"), filepath.Join(shortDir(t), "socket")
	must(t, unix.Mkfifo(fifo, 0o755))
	listener, err := net.Listen("unix", socket)
	must(t, err)
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
		checkError(t, err, c.kind, c.text...)
	}
	checkEmpty(t, dir)
}

// Unfinished copies are removed, and a directory to which others can write is refused.
func TestOpenStoreRemovesUnfinishedCopies(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	writeFile(t, filepath.Join(dir, ".add-123"), "half", 0o600)
	reopen(t, dir)
	checkEmpty(t, dir)
	must(t, os.Chmod(dir, 0o777))
	_, err := launch.OpenStore(dir)
	checkError(t, err, registry.ErrDenied, "others can write", "0700")
}

// A host can start on a full disk: adding a binary that is stored already writes nothing. Only a new binary needs room.
func TestFullDiskHindersOnlyANewBinary(t *testing.T) {
	t.Parallel()
	needsRoot(t)
	work, dir := shortDir(t), shortDir(t)
	must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m,mode=0700"))
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	source, newer := filepath.Join(work, "shim"), filepath.Join(work, "newer")
	padding := strings.Repeat("#", 64<<10)
	writeFile(t, source, marking(work, "good")+padding, 0o755)
	writeFile(t, newer, marking(work, "newer")+padding, 0o755)
	first := add(t, reopen(t, dir), source)
	if err := os.WriteFile(filepath.Join(dir, "full"), make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	opts := options(t)
	opts.Store = reopen(t, dir)
	opts.Digest = add(t, opts.Store, source)
	if opts.Digest != first {
		t.Errorf("%+v; before %+v", opts.Digest, first)
	}
	refused(t, opts, nil, "exited with code 9")
	checkRan(t, work, "good")
	_, err := opts.Store.Add(t.Context(), newer, "", "")
	checkError(t, err, registry.ErrExhausted, newer, "no space left", "free some on the file system of "+dir)
	checkStored(t, dir, first.SHA256, "full")
}

// A damaged copy is replaced, both by the process that has stored it and by the next process.
func TestAddRepairsADamagedCopy(t *testing.T) {
	t.Parallel()
	const text, evil = "#!/bin/true\n", "#!/bin/evil\n"
	for name, harm := range map[string]func(stored string) error{
		"removed":        os.Remove,
		"not executable": func(stored string) error { return os.Chmod(stored, 0o400) },
		"written to":     func(stored string) error { return os.WriteFile(stored, []byte(evil), 0o500) },
		"cut off":        func(stored string) error { return os.Truncate(stored, 3) },
		"replaced by name": func(stored string) error {
			return errors.Join(os.WriteFile(stored+"x", []byte(evil), 0o500), os.Rename(stored+"x", stored))
		},
	} {
		t.Run(name, func(t *testing.T) {
			store, dir := openStore(t)
			path, sum := binaryFile(t, text)
			add(t, store, path)
			for _, by := range []*launch.Store{store, reopen(t, dir)} {
				must(t, harm(filepath.Join(dir, sum)))
				add(t, by, path)
				checkContent(t, filepath.Join(dir, sum), text)
			}
		})
	}
}

// The binary is gone, as after an upgrade that was cut short. The stored copy of the last one is used if it is intact.
func TestStoredCopyStandsInForABinaryThatIsGone(t *testing.T) {
	t.Parallel()
	store, dir := openStore(t)
	path, sum := binaryFile(t, "#!/bin/true\n")
	writeFile(t, path, "#!/bin/false\n", 0o755)
	add(t, store, path)
	writeFile(t, path, "#!/bin/true\n", 0o755)
	add(t, store, path)
	must(t, os.Remove(path))
	for want, known := range map[string]string{"": sum, sum: ""} {
		got, err := reopen(t, dir).Add(t.Context(), path, want, known)
		if err != nil || got != (launch.Digest{SHA256: sum, SourceGone: true}) {
			t.Errorf("%+v, %v", got, err)
		}
	}
	must(t, os.WriteFile(filepath.Join(dir, sum), []byte("#!/bin/evil\n"), 0o500))
	for want, known := range map[string]string{"": sum, sum: ""} {
		_, err := reopen(t, dir).Add(t.Context(), path, want, known)
		checkError(t, err, registry.ErrDamaged, path, "no such file", "install the binary at that path", "was changed")
	}
	other := strings.Repeat("ab", 32)
	writeFile(t, path+".sha256", other, 0o644) // of the next release, whose binary never came
	_, err := reopen(t, dir).Add(t.Context(), path, "", sum)
	checkError(t, err, registry.ErrNotFound, path, other, "install the binary at that path")
}

func TestPruneLeavesTheBinariesOfKeep(t *testing.T) {
	t.Parallel()
	store, dir := openStore(t)
	var sums []string
	for range 3 {
		path, _ := binaryFile(t, "#!/bin/true "+shortDir(t))
		sums = append(sums, add(t, store, path).SHA256)
	}
	store.Keep(sums[0], sums[2], "")
	must(t, store.Prune())
	checkStored(t, dir, sums[0], sums[2])
}

func checkStored(t *testing.T, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	var stored []string
	for _, e := range entries {
		stored = append(stored, e.Name())
	}
	if slices.Sort(want); !slices.Equal(stored, want) {
		t.Errorf("stored are %.12q, not %.12q", stored, want)
	}
}

// The binary is cut at several places.
func TestBinaryThatWasCutOff(t *testing.T) {
	t.Parallel()
	whole, err := os.ReadFile(shared.self)
	must(t, err)
	for _, size := range []int{4, 40, 300, 4096, len(whole) / 2} {
		path, _ := binaryFile(t, string(whole[:size]))
		opts, _ := stored(t, path)
		refused(t, opts, registry.ErrUnsupported, fmt.Sprintf("is cut off after %d bytes", size),
			"install the whole binary")
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
	for text, says := range map[string]string{
		string(head[:]): "an ELF executable for S390",
		"just text\n":   "no ELF executable",
	} {
		path, _ := binaryFile(t, text)
		opts, _ := stored(t, path)
		refused(t, opts, registry.ErrUnsupported, "cannot run here", says, "this machine runs linux/")
	}
}
