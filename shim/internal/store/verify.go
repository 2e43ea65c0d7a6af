package store

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	"github.com/google/renameio/v2"
	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"holdfast/registry"
)

// verifyFlag turns a program into the verifier of a state file. The file is its descriptor 3.
const verifyFlag = "-verify-state"

const (
	exitDamaged      = 3        // exit code of a verifier that has found damage and described it on standard output
	maxVerifierStack = 64 << 20 // in bytes; stops bbolt's recursion over a page that contains itself
)

// BecomeVerifier does not return in a process that a store has started to verify a file. A program that opens stores
// calls BecomeVerifier first in main.
func BecomeVerifier() {
	if len(os.Args) != 2 || os.Args[1] != verifyFlag {
		return
	}
	debug.SetMaxStack(maxVerifierStack)
	if err := verify(os.NewFile(3, "state file")); err != nil {
		fmt.Print(err)
		os.Exit(exitDamaged)
	}
	os.Exit(0)
}

// verifyCopy verifies a copy of the file in a child process, because a damaged file may kill the process that maps it.
// The child gets a copy, because bbolt locks the file that it opens. The error is ErrDamaged if the file is damaged.
func verifyCopy(ctx context.Context, file *os.File) error {
	copied, err := memoryCopy(file)
	if err != nil {
		return registry.Errorf(registry.ErrUnavailable, "copy %s to verify it: %w", file.Name(), err)
	}
	defer copied.Close()
	var found, crash bytes.Buffer
	cmd := exec.CommandContext(ctx, "/proc/self/exe", verifyFlag)
	cmd.Env = []string{"GORACE=atexit_sleep_ms=0"} // else a build with the race detector sleeps for a second
	cmd.ExtraFiles, cmd.Stdout, cmd.Stderr = []*os.File{copied}, &found, &crash
	err = cmd.Run()
	exit, ended := errors.AsType[*exec.ExitError](err)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return registry.Errorf(registry.ErrUnavailable, "verify %s: %w", file.Name(), context.Cause(ctx))
	case !ended:
		return registry.Errorf(registry.ErrUnavailable, "verify %s: start the verifier: %w", file.Name(), err)
	case exit.ExitCode() == exitDamaged:
		return registry.Errorf(registry.ErrDamaged, "%s", found.String())
	}
	reason, _, _ := strings.Cut(crash.String(), "\n")
	return registry.Errorf(registry.ErrDamaged, "reading it crashes the verifier (%v): %s", exit, reason)
}

// memoryCopy copies a file into an anonymous memfd.
func memoryCopy(file *os.File) (*os.File, error) {
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate("state", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	copied := os.NewFile(uintptr(fd), "state")
	if _, err := io.Copy(copied, io.NewSectionReader(file, 0, info.Size())); err != nil {
		_ = copied.Close()
		return nil, err
	}
	return copied, nil
}

// verify reads a whole file that nothing writes meanwhile. It checks the pages, each checksum, and that no record is
// missing. The error describes the first damage found. Damage may also crash the process.
func verify(file *os.File) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%v", r)
		}
	}()
	if err := checkMetas(file); err != nil {
		return err
	}
	db, err := bolt.Open("", 0, &bolt.Options{
		OpenFile: func(string, int, os.FileMode) (*os.File, error) { return file, nil },
		ReadOnly: true, PreLoadFreelist: true, FreelistType: bolt.FreelistMapType, NoStatistics: true,
	})
	if err != nil {
		return err
	}
	return db.View(func(tx *bolt.Tx) error {
		if err := checkPages(tx, file); err != nil {
			return err
		}
		for err := range tx.Check() {
			return err
		}
		return checkContent(tx)
	})
}

// The layout of a bbolt file, as far as bbolt does not check it. Numbers have the byte order of the machine.
const (
	headerSize = 16 // of a page: id (8), flags (2), count (2), overflow (4)
	metaSize   = 64 // of a meta page's content
	boltMagic  = 0xED0CDAED
)

var order = binary.NativeEndian

// checkMetas checks that both meta pages are valid and that the file is as long as they say. bbolt accepts a file with
// only one valid meta page, and could then forget the last commit.
func checkMetas(file *os.File) error {
	info, err := file.Stat()
	if err != nil {
		return err
	}
	var size uint64 // of the pages in use, in bytes
	var last uint64 // number of the last transaction
	var pageSize uint64
	for i := range 2 {
		var page [headerSize + metaSize]byte
		if _, err := file.ReadAt(page[:], int64(i)*int64(pageSize)); err != nil {
			return fmt.Errorf("meta page %d: %w", i, err)
		}
		body := page[headerSize:]
		sum := fnv.New64a()
		_, _ = sum.Write(body[:metaSize-8])
		if order.Uint32(body) != boltMagic || order.Uint64(body[metaSize-8:]) != sum.Sum64() {
			return fmt.Errorf("meta page %d is damaged, or this is not a bbolt file", i)
		}
		pageSize = uint64(order.Uint32(body[8:]))
		if tx := order.Uint64(body[48:]); tx >= last {
			size, last = order.Uint64(body[40:])*pageSize, tx
		}
	}
	if uint64(info.Size()) < size {
		return fmt.Errorf("the file is cut off: it has %d of %d bytes", info.Size(), size)
	}
	return nil
}

// checkPages checks properties that bbolt's own check relies on or leaves out. No page may be longer than the file, and
// none may extend over a free page: bbolt compares only the first page with the free list, and would free the others a
// second time. A branch must name each page by the first key of that page. bbolt uses this key when it replaces the
// page in its branch; with another key, the branch would keep a freed page. bbolt itself checks that no page extends
// over another used page.
func checkPages(tx *bolt.Tx, file io.ReaderAt) error {
	pageSize := int64(tx.DB().Info().PageSize)
	for id, end := int64(2), tx.Size()/pageSize; id < end; id++ {
		info, err := tx.Page(int(id))
		if err != nil {
			return err
		}
		if info.Type == "free" {
			continue
		}
		if int64(info.OverflowCount) >= end-id {
			return fmt.Errorf("page %d is longer than the file", id)
		}
		for over := id + 1; over <= id+int64(info.OverflowCount); over++ {
			if next, err := tx.Page(int(over)); err != nil || next.Type == "free" {
				return fmt.Errorf("page %d extends over the free page %d", id, over)
			}
		}
		for i := 0; info.Type == "branch" && i < info.Count; i++ {
			key, child, err := keyOf(file, id*pageSize, i)
			if err != nil {
				return fmt.Errorf("page %d: %w", id, err)
			}
			first, _, err := keyOf(file, int64(child)*pageSize, 0)
			if err != nil {
				return fmt.Errorf("page %d: %w", child, err)
			}
			if !bytes.Equal(key, first) {
				return fmt.Errorf("page %d names page %d by another key than its first", id, child)
			}
		}
		id += int64(info.OverflowCount)
	}
	return nil
}

// keyOf reads the i-th key of the page that begins at pageStart in the file. If the page is a branch, child is the
// number of the page below that key.
func keyOf(file io.ReaderAt, pageStart int64, i int) (key []byte, child uint64, err error) {
	const elementSize, leafFlag = 16, 2
	var header [headerSize]byte
	var element [elementSize]byte
	at := pageStart + headerSize + elementSize*int64(i)
	if _, err := file.ReadAt(header[:], pageStart); err != nil {
		return nil, 0, err
	}
	if _, err := file.ReadAt(element[:], at); err != nil {
		return nil, 0, err
	}
	// An element of a branch has the key's offset and size, and the page (8 bytes). An element of a leaf has flags, the
	// key's offset and size, and the value's size. Offsets count from the element.
	offset, size := order.Uint32(element[:]), order.Uint32(element[4:])
	if order.Uint16(header[8:]) == leafFlag {
		offset, size = order.Uint32(element[4:]), order.Uint32(element[8:])
	}
	if size > bolt.MaxKeySize {
		return nil, 0, fmt.Errorf("key %d has %d bytes", i, size)
	}
	key = make([]byte, size)
	_, err = file.ReadAt(key, at+int64(offset))
	return key, order.Uint64(element[8:]), err
}

// checkContent checks each checksum, and compares each bucket with its tally. Each tally must have its bucket, too.
func checkContent(tx *bolt.Tx) error {
	counted := map[string]tally{}
	err := tx.ForEach(func(bucket []byte, b *bolt.Bucket) error {
		if b == nil {
			return fmt.Errorf("key %q is outside of any bucket", bucket)
		}
		name := string(bucket)
		var last []byte // the key before; nil: there is none
		var sum tally
		err := b.ForEach(func(key, value []byte) error {
			if len(key) == 0 || last != nil && bytes.Compare(last, key) >= 0 {
				return fmt.Errorf("bucket %s: key %q follows %q", name, key, last)
			}
			if _, err := verifiedText(name, key, value); err != nil { // a nested bucket fails, as its value is nil
				return err
			}
			sum.add(value)
			last = key
			return nil
		})
		counted[name] = sum
		return err
	})
	if err != nil {
		return err
	}
	meta := tx.Bucket([]byte(bucketMeta))
	if meta == nil {
		return fmt.Errorf("bucket %s is missing", bucketMeta)
	}
	var app string
	if err := decodeMeta(meta, metaApplication, &app); err != nil {
		return err
	}
	if app != application {
		return fmt.Errorf("the file belongs to %q, not to %s", app, application)
	}
	for name, got := range counted {
		var want tally
		if name == bucketMeta {
			continue
		}
		if err := decodeMeta(meta, metaTally+name, &want); err != nil {
			return err
		}
		if got != want {
			return fmt.Errorf("bucket %s has %d records, and its tally says %d, or the sums of their checksums differ",
				name, got.Records, want.Records)
		}
	}
	return meta.ForEach(func(name, _ []byte) error {
		bucket, isTally := strings.CutPrefix(string(name), metaTally)
		if _, there := counted[bucket]; isTally && !there {
			return fmt.Errorf("bucket %s is missing", bucket)
		}
		return nil
	})
}

// VerifyFile returns nil if the file at path is intact: its pages, each checksum, and the number of records. It writes
// nothing. ErrDamaged names the first damage; a file that is written to meanwhile may look damaged. ErrNotFound means
// that there is no file.
func VerifyFile(ctx context.Context, path string) error {
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return registry.Errorf(registry.ErrNotFound, "state file: %w", err)
	}
	if err != nil {
		return registry.Errorf(registry.ErrUnavailable, "state file: %w", err)
	}
	defer file.Close()
	err = verifyCopy(ctx, file)
	if errors.Is(err, registry.ErrDamaged) {
		return registry.Errorf(registry.ErrDamaged, "%s is damaged: %w. Nothing was changed in it. %s", path, err,
			remedy)
	}
	return err
}

const remedy = "Put a good copy in its place. Only if no volume is in use on this node, move it away: the shim then " +
	"starts with an empty state"

// quarantine keeps a copy of a damaged file beside it, and returns the error to report. The file itself stays: without
// it, the next start would begin with an empty state and forget volumes in use. The same damage is copied only once,
// even if the shim is started repeatedly.
func quarantine(path string, file *os.File, now time.Time, damaged error) error {
	kept, err := keepCopy(path, file, now)
	where := "A copy is " + kept + "."
	if err != nil {
		where = fmt.Sprintf("It could not be copied: %v.", err)
	}
	return registry.Errorf(registry.ErrDamaged,
		"%s is damaged: %w. Nothing was changed in it. %s Run `holdfast doctor`. %s", path, damaged, where, remedy)
}

// keepCopy copies the file to a file beside path, whose name has the time and the first bytes of a hash, and returns
// that name. If there already is a copy with the same hash, it returns the name of that copy.
func keepCopy(path string, file *os.File, now time.Time) (string, error) {
	info, err := file.Stat()
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	if _, err := io.Copy(sum, io.NewSectionReader(file, 0, info.Size())); err != nil {
		return "", err
	}
	short := fmt.Sprintf("%x", sum.Sum(nil)[:4])
	if kept, _ := filepath.Glob(path + ".damaged-*-" + short); len(kept) > 0 {
		return kept[0], nil
	}
	name := fmt.Sprintf("%s.damaged-%s-%s", path, now.UTC().Format("20060102T150405Z"), short)
	to, err := renameio.NewPendingFile(name, renameio.WithPermissions(fileMode),
		renameio.WithTempDir(filepath.Dir(path)))
	if err != nil {
		return "", err
	}
	defer to.Cleanup()
	if _, err := io.Copy(to, io.NewSectionReader(file, 0, info.Size())); err != nil {
		return "", err
	}
	return name, to.CloseAtomicallyReplace()
}
