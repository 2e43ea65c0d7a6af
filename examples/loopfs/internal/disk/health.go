package disk

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Severity is how bad a problem is.
type Severity int

// The severities.
const (
	Degraded     Severity = iota // usable
	Inaccessible                 // not usable now
	Lost                         // data are lost
)

// Problem is an adverse condition of a volume or of the data directory.
type Problem struct {
	Severity Severity
	Reason   string // CamelCase
	Message  string
}

// Health checks the record and the bytes of a volume. It returns no problems for a healthy volume.
func (p *Pool) Health(id ID) ([]Problem, error) {
	r, err := p.Find(id)
	if status.Code(err) == codes.DataLoss {
		return []Problem{{Lost, "RecordDamaged", err.Error()}}, nil
	}
	if err != nil {
		return nil, err
	}
	return p.Backend(r.Backend).Check(r)
}

// StorageProblem checks the data directory. The reason is empty if it is healthy.
func (p *Pool) StorageProblem() Problem {
	var st unix.Statfs_t
	if err := errors.Join(p.Store.Check(), unix.Statfs(p.path, &st)); err != nil {
		return Problem{Inaccessible, "DataDirectoryMissing", err.Error()}
	}
	if st.Bavail < st.Blocks/50 {
		return Problem{Degraded, "DataDirectoryFull", fmt.Sprintf("%s has %d bytes free, less than 2%%; writes to volumes "+
			"fail when none is left", p.path, int64(st.Bavail)*st.Bsize)}
	}
	return Problem{}
}

func (l loop) Check(r Record) ([]Problem, error) {
	image, err := l.image(r.ID, os.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return []Problem{{Lost, "ImageMissing", "the image " + l.path + "/" + imageName(r.ID) + " is gone"}}, nil
	}
	if err != nil {
		return nil, err
	}
	defer image.Close()
	st, err := image.Stat()
	if err != nil {
		return nil, fmt.Errorf("stat the image: %w", err)
	}
	s, err := readSuper(image)
	switch {
	case err != nil:
		return []Problem{{Lost, "ImageUnreadable", err.Error()}}, nil
	case s.fs != "" && s.bytes > st.Size():
		return []Problem{{Lost, "ImageTruncated", fmt.Sprintf("the image has %d bytes, its %s has %d", st.Size(), s.fs,
			s.bytes)}}, nil
	case s.fs == "" && r.Formatted:
		return []Problem{{Lost, "FileSystemDamaged", "the superblock of the file system was overwritten"}}, nil
	case s.damaged:
		return []Problem{{Degraded, "FileSystemErrors", "the kernel found errors in the file system: unstage the volume " +
			"and run e2fsck"}}, nil
	case st.Size() < r.Bytes:
		return []Problem{{Degraded, "ImageShort", fmt.Sprintf("the image has %d bytes, the volume %d: expand it again",
			st.Size(), r.Bytes)}}, nil
	}
	return nil, nil
}

func (d dir) Check(r Record) ([]Problem, error) {
	if _, err := d.root.Stat(dirName(r.ID)); errors.Is(err, fs.ErrNotExist) {
		return []Problem{{Lost, "DirectoryMissing", "the directory " + d.path + "/" + dirName(r.ID) + " is gone"}}, nil
	} else if err != nil {
		return nil, fmt.Errorf("stat the volume's directory: %w", err)
	}
	return nil, nil
}
