// Package durable writes files that are whole after a crash.
package durable

import (
	"errors"
	"os"
	"path/filepath"

	"github.com/google/renameio/v2"
)

// WriteFile replaces a file. After a crash the file has either the old or the new content. Only the current user can
// read it.
func WriteFile(path string, text []byte) error {
	dir := filepath.Dir(path)
	if err := renameio.WriteFile(path, text, 0o600, renameio.WithTempDir(dir)); err != nil {
		return err
	}
	return SyncDir(dir)
}

// SyncDir makes the names in a directory durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
