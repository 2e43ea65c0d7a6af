package store

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"holdfast/registry"
)

// A file that was damaged between two shims is refused by the next one, which spares it the walk, before bbolt maps it: the process does not
// die of a SIGBUS, the damage is reported, a copy is kept, and the file stays as it is.
func TestDamageBetweenTwoShimsIsRefused(t *testing.T) {
	whole := sample(t)
	first, err := verifyMeta(bytes.NewReader(whole), int64(len(whole)))
	if err != nil {
		t.Fatal(err)
	}
	left := Left{first.generation, first.seq}
	files := map[string][]byte{"the list of free pages is zero": bytes.Clone(whole)}
	walker, err := newPages(bytes.NewReader(whole), int64(len(whole)))
	if err != nil {
		t.Fatal(err)
	}
	clear(files["the list of free pages is zero"][walker.meta.freelist*pageSize : (walker.meta.freelist+1)*pageSize])
	for size := 0; size < len(whole); size += pageSize {
		files[fmt.Sprint("cut to ", size)] = whole[:size]
		files[fmt.Sprint("cut within a page after ", size)] = whole[:size+100]
	}
	for what, bytesOfFile := range files {
		t.Run(what, func(t *testing.T) {
			path := statePath(t)
			if err := os.WriteFile(path, bytesOfFile, 0o600); err != nil {
				t.Fatal(err)
			}
			s, err := Open(t.Context(), Options{Path: path, Left: left, Generation: left.Generation + 1})
			if err == nil {
				_ = s.Close()
			}
			if !errors.Is(err, registry.ErrDamaged) {
				t.Errorf("opened: %v", err)
			}
			if now, _ := os.ReadFile(path); !bytes.Equal(now, bytesOfFile) {
				t.Error("the file was changed")
			}
			if kept, _ := filepath.Glob(path + ".damaged-*"); len(kept) != 1 {
				t.Errorf("copies: %v", kept)
			}
		})
	}
}

// Left spares the walk and nothing else: the meta pages and the meta bucket are read, the records are not.
func TestLeftFileIsOpenedWithoutTheWalk(t *testing.T) {
	path := statePath(t)
	if err := os.WriteFile(path, sample(t), 0o600); err != nil {
		t.Fatal(err)
	}
	reads := &counted{}
	if err := reads.open(path); err != nil {
		t.Fatal(err)
	}
	defer reads.Close()
	info, err := reads.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := verifyMeta(reads, info.Size()); err != nil || reads.n*pageSize > int(info.Size())/4 {
		t.Errorf("%d reads of a file of %d pages: %v", reads.n, info.Size()/pageSize, err)
	}
}

type counted struct {
	*os.File
	n int
}

func (c *counted) open(path string) (err error) {
	c.File, err = os.Open(path)
	return err
}

func (c *counted) ReadAt(p []byte, at int64) (int, error) {
	c.n++
	return c.File.ReadAt(p, at)
}
