package disk

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Problem is an adverse condition of a volume.
type Problem = csi.VolumeHealth_VolumeHealthEntry

// problem returns the only problem of a volume.
func problem(kind csi.VolumeHealthErrorType, reason, format string, args ...any) []*Problem {
	return []*Problem{{Status: kind, Reason: reason, Message: fmt.Sprintf(format, args...)}}
}

// Health checks the record and the bytes of a volume. It returns no problems for a healthy volume.
func (p *Pool) Health(id ID) ([]*Problem, error) {
	r, err := p.find(id)
	if status.Code(err) == codes.DataLoss {
		return problem(csi.VolumeHealthErrorType_DATA_LOSS, "RecordDamaged", "%v", err), nil
	}
	if err != nil {
		return nil, err
	}
	return p.Backend(r.Backend).Check(r)
}

func (l loop) Check(r Record) ([]*Problem, error) {
	image, err := l.image(r.ID, os.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return problem(csi.VolumeHealthErrorType_DATA_LOSS, "ImageMissing", "%v", err), nil
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
		return problem(csi.VolumeHealthErrorType_DATA_LOSS, "ImageUnreadable", "%v", err), nil
	case s.bytes > st.Size():
		return problem(csi.VolumeHealthErrorType_DATA_LOSS, "ImageTruncated", "the image has %d bytes, its %s has %d",
			st.Size(), s.fs, s.bytes), nil
	case s.fs == "" && r.Formatted:
		return problem(csi.VolumeHealthErrorType_DATA_LOSS, "FileSystemDamaged", "the superblock was overwritten"), nil
	case s.damaged:
		return problem(csi.VolumeHealthErrorType_DEGRADED, "FileSystemErrors", "the kernel found errors in the file "+
			"system: unstage the volume and run e2fsck"), nil
	case st.Size() < r.Bytes:
		return problem(csi.VolumeHealthErrorType_DEGRADED, "ImageShort", "the image has %d bytes, the volume %d: expand "+
			"it again", st.Size(), r.Bytes), nil
	}
	return nil, nil
}

func (d dir) Check(r Record) ([]*Problem, error) {
	_, err := d.root.Stat(dirName(r.ID))
	if errors.Is(err, fs.ErrNotExist) {
		return problem(csi.VolumeHealthErrorType_DATA_LOSS, "DirectoryMissing", "%v", err), nil
	}
	return nil, err
}
