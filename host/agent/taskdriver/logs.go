package taskdriver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// logWriter writes one stream to files of limited size, stdout.0, stdout.1 and so on, and keeps only the newest. A
// write never fails, because a full disk must not stop a task. Output that cannot be written is lost.
type logWriter struct {
	dir    string
	stream Stream
	size   int64 // of one file
	keep   int
	number int
	used   int64
	file   *os.File
}

// openLogs returns a writer that continues the newest file of an earlier attempt. Size and keep are those of Task.
func openLogs(taskDir string, s Stream, size int64, keep int) *logWriter {
	w := &logWriter{dir: filepath.Join(taskDir, "logs"), stream: s,
		size: cmp.Or(size, DefaultLogSize), keep: cmp.Or(keep, DefaultLogFiles)}
	if numbers := logNumbers(w.dir, s); len(numbers) > 0 {
		w.number = numbers[len(numbers)-1]
	}
	w.open()
	return w
}

func (w *logWriter) Write(p []byte) (int, error) {
	for rest := p; len(rest) > 0; {
		if w.used >= w.size {
			w.close()
			w.number++
			w.open()
		}
		if w.file == nil {
			w.open() // the disk may have space again
		}
		n := min(int64(len(rest)), w.size-w.used)
		if w.file != nil {
			written, _ := w.file.Write(rest[:n])
			w.used += int64(written)
		}
		rest = rest[n:]
	}
	return len(p), nil
}

// open opens the file with the current number to append to it, and removes old files. If that fails, w.file is nil.
func (w *logWriter) open() {
	w.file, _ = os.OpenFile(logName(w.dir, w.stream, w.number), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	w.used = 0
	if w.file != nil {
		w.used, _ = w.file.Seek(0, io.SeekEnd)
	}
	for _, n := range logNumbers(w.dir, w.stream) {
		if n <= w.number-w.keep {
			_ = os.Remove(logName(w.dir, w.stream, n))
		}
	}
}

func (w *logWriter) close() { w.file.Close() } // nil is fine

func logName(dir string, s Stream, n int) string {
	return filepath.Join(dir, string(s)+"."+strconv.Itoa(n))
}

// logNumbers lists the files of a stream, oldest first.
func logNumbers(dir string, s Stream) []int {
	entries, _ := os.ReadDir(dir)
	var numbers []int
	for _, e := range entries {
		if rest, found := strings.CutPrefix(e.Name(), string(s)+"."); found {
			if n, err := strconv.Atoi(rest); err == nil {
				numbers = append(numbers, n)
			}
		}
	}
	slices.Sort(numbers)
	return numbers
}

// HasOutput reports whether the log files in the directory of a task have output.
func HasOutput(taskDir string) bool {
	entries, _ := os.ReadDir(filepath.Join(taskDir, "logs"))
	return slices.ContainsFunc(entries, func(e fs.DirEntry) bool {
		info, err := e.Info()
		return err == nil && info.Size() > 0
	})
}

// followInterval is how often a follower reads the files.
const followInterval = 100 * time.Millisecond

// copyLogs copies a stream from its oldest kept byte, across rotations. With follow it copies until the attempt has
// ended.
func copyLogs(ctx context.Context, h Handle, s Stream, follow bool, to io.Writer) error {
	at := &logPosition{number: -1}
	return poll(ctx, followInterval, func() (bool, error) {
		ended, err := h.hasEnded()
		if err != nil {
			return false, err
		}
		return ended || !follow, at.copy(h, s, to)
	})
}

// hasEnded reports whether the exit of the attempt is recorded, or was: the next attempt removes the records, and so
// does the removal of the task's directory.
func (h Handle) hasEnded() (bool, error) {
	if _, recorded, err := readExit(h); err != nil || recorded {
		return recorded, err
	}
	var last Handle
	found, err := readRecord(h.Dir, handleFile, &last)
	return !found || last.ID != h.ID, err
}

// logPosition is the position of a reader.
type logPosition struct {
	number int
	offset int64
}

// copy copies the output between the position and the current end, and advances the position.
func (p *logPosition) copy(h Handle, s Stream, to io.Writer) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("read logs of task %s: %w", h.ID, err)
		}
	}()
	dir := filepath.Join(h.Dir, "logs")
	for _, n := range logNumbers(dir, s) {
		if n < p.number {
			continue
		}
		if n > p.number {
			p.number, p.offset = n, 0
		}
		f, err := os.Open(logName(dir, s, n))
		if errors.Is(err, fs.ErrNotExist) {
			continue // a rotation has removed it
		}
		if err != nil {
			return err
		}
		copied, err := io.Copy(to, io.NewSectionReader(f, p.offset, 1<<62))
		p.offset += copied
		f.Close()
		if err != nil {
			return err
		}
	}
	return nil
}
