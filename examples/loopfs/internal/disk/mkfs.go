package disk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"

	"holdfast/examples/loopfs/internal/mount"
)

// mkfs has the command that makes a file system in an empty image.
var mkfs = map[string][]string{
	"ext4": {"mkfs.ext4", "-q", "-F", "-m", "0"},
	"xfs":  {"mkfs.xfs", "-q", "-f"},
}

// FileSystems returns the types that the loop backend supports.
func FileSystems() []string { return []string{"ext4", "xfs"} }

func (l *loop) FileSystem(id ID, given string) (string, error) {
	image, err := l.image(id, os.O_RDONLY)
	if err != nil {
		return "", err
	}
	defer image.Close()
	s, err := readSuper(image)
	if s.fs != "" || err != nil {
		return s.fs, err
	}
	empty, err := isBlank(image)
	if err == nil && !empty {
		err = Errorf(ErrInUse, "volume %s holds data that are neither ext4 nor xfs; loopfs does not overwrite them", id)
	}
	return given, err
}

// format makes the file system where no byte was ever written.
func (l *loop) format(ctx context.Context, id ID, fs string) error {
	have, err := l.FileSystem(id, "")
	if have == fs || err != nil {
		return err
	}
	if have != "" {
		return Errorf(ErrInUse, "volume %s holds %s, requested is %s; loopfs never formats a volume twice", id, have,
			fs)
	}
	if user, err := l.HeldBy(id); user != "" || err != nil {
		return errors.Join(err, Errorf(ErrInUse, "volume %s cannot be formatted: %s still uses it", id, user))
	}
	image, err := l.image(id, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer image.Close()
	st, err := image.Stat()
	if err != nil {
		return fmt.Errorf("stat the image: %w", err)
	}
	if fs == "xfs" && st.Size() < MinXFSBytes {
		return Errorf(ErrInUse, "volume %s has %d bytes, xfs needs %d: expand it first, or ask for xfs when it is created",
			id, st.Size(), MinXFSBytes)
	}
	return l.replace(ctx, id, func(part *os.File) error {
		if err := errors.Join(part.Truncate(st.Size()), tool(ctx, part, 0, mkfs[fs]...)); err != nil {
			return err
		}
		if s, err := readSuper(part); s.fs != fs || err != nil {
			return errors.Join(err, fmt.Errorf("%s made no %s", mkfs[fs][0], fs))
		}
		return nil
	})
}

// tool runs a program with an open image as its argument. Exit codes up to most are success.
func tool(ctx context.Context, image *os.File, most int, command ...string) error {
	path, err := exec.LookPath(command[0])
	if err != nil {
		return Errorf(ErrUnavailable, "install %s (e2fsprogs, xfsprogs): %w", command[0], err)
	}
	cmd := exec.CommandContext(ctx, path, append(command[1:], "/proc/self/fd/3")...)
	cmd.ExtraFiles = []*os.File{image}
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", command[0], context.Cause(ctx))
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.Exited() && exit.ExitCode() <= most {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w: %s", command[0], err, bytes.TrimSpace(out))
	}
	return nil
}

// growUnmounted enlarges the file system of an unmounted volume to the size of its image.
func (l *loop) growUnmounted(ctx context.Context, id ID, fs string) error {
	image, err := l.image(id, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer image.Close()
	s, err := readSuper(image)
	if err != nil {
		return err
	}
	st, err := image.Stat()
	switch {
	case err != nil:
		return fmt.Errorf("stat the image: %w", err)
	case s.bytes >= st.Size():
		return nil
	case fs == "ext4" && !capable(unix.CAP_SYS_RESOURCE):
		return l.growCopy(ctx, id, image, s, st.Size())
	}
	return l.unmountedRoot(id, fs, func(root *os.File) error { return growFS(root, s, st.Size()) })
}

// unmountedRoot calls do with the root directory of an unmounted volume.
func (l *loop) unmountedRoot(id ID, fs string, do func(root *os.File) error) error {
	dev, err := l.attach(id, unix.LO_FLAGS_AUTOCLEAR)
	if err != nil {
		return err
	}
	defer dev.Close()
	return mount.Detached(dev.Name(), fs, do)
}

// growCopy enlarges ext4 where the kernel refuses to. It works on a copy, as resize2fs must not be killed.
func (l *loop) growCopy(ctx context.Context, id ID, image *os.File, s super, size int64) error {
	if nearlyFull(size, s.bytes) {
		return nil
	}
	return l.replace(ctx, id, func(part *os.File) error {
		if unix.IoctlFileClone(int(part.Fd()), int(image.Fd())) != nil {
			if err := copySparse(ctx, part, image); err != nil {
				return err
			}
		}
		if err := growFile(part, size); err != nil {
			return err
		}
		if err := tool(ctx, part, 1, "e2fsck", "-f", "-p"); err != nil {
			return err
		}
		return tool(ctx, part, 0, "resize2fs", "-f")
	})
}

// nearlyFull reports whether an ext4 may be as large as possible: ext4 omits a last group that has too few blocks for
// its own tables.
func nearlyFull(size, fs int64) bool { return size-fs < min(size/32, 8<<20) }
