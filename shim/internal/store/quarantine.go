package store

import (
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/registry"
)

// quarantine keeps a copy of a damaged file beside it, and makes the error that says so. The file stays where it is, untouched:
// were it moved away, the next start would find nothing and begin anew, and volumes in use would be forgotten. The same
// damage is copied once, however often the shim is started.
func quarantine(path string, file *os.File, now time.Time, damaged error) error {
	kept, err := keepCopy(path, file, now)
	where := "A copy is " + kept + "."
	if err != nil {
		where = fmt.Sprintf("It could not be copied: %v.", err)
	}
	return registry.Errorf(registry.ErrDamaged, "%s is damaged: %w. Nothing was changed in it. %s Run `holdfast doctor`, or put a "+
		"good copy in its place. Only if nothing on this node uses a volume: move it away, and the shim starts with nothing",
		path, damaged, where)
}

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
	if err := writeCopy(name, io.NewSectionReader(file, 0, info.Size())); err != nil {
		_ = os.Remove(name)
		return "", err
	}
	return name, nil
}

func writeCopy(name string, from io.Reader) error {
	to, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, fileMode)
	if err != nil {
		return err
	}
	_, err = io.Copy(to, from)
	if err == nil {
		err = to.Sync()
	}
	if closed := to.Close(); err == nil {
		err = closed
	}
	return err
}
