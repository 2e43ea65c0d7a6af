package taskdriver

import (
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

// rotation writes one stream to files of bounded size, stdout.0, stdout.1 and so on, and keeps the newest. It never fails its
// writer: a task must not be stopped by a full disk. What cannot be written is lost.
type rotation struct {
	dir    string
	stream Stream
	size   int64
	keep   int
	number int
	used   int64
	file   *os.File
}

// newRotation goes on where an earlier attempt has ended.
func newRotation(t Task, s Stream) *rotation {
	r := &rotation{dir: filepath.Join(t.Dir, "logs"), stream: s, size: t.LogSize, keep: t.LogFiles}
	if r.size <= 0 {
		r.size = DefaultLogSize
	}
	if r.keep <= 0 {
		r.keep = DefaultLogFiles
	}
	if numbers := logNumbers(r.dir, s); len(numbers) > 0 {
		r.number = numbers[len(numbers)-1]
	}
	r.open()
	return r
}

func (r *rotation) Write(p []byte) (int, error) {
	for rest := p; len(rest) > 0; {
		if r.used >= r.size {
			r.next()
		}
		if r.file == nil {
			r.open() // there may be room again
		}
		n := min(int64(len(rest)), r.size-r.used)
		if r.file != nil {
			written, _ := r.file.Write(rest[:n])
			r.used += int64(written)
		}
		rest = rest[n:]
	}
	return len(p), nil
}

func (r *rotation) next() {
	r.close()
	r.number++
	r.open()
}

func (r *rotation) open() {
	r.file, _ = os.OpenFile(logName(r.dir, r.stream, r.number), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	r.used = 0
	if r.file != nil {
		r.used, _ = r.file.Seek(0, io.SeekEnd)
	}
	for _, n := range logNumbers(r.dir, r.stream) {
		if n <= r.number-r.keep {
			_ = os.Remove(logName(r.dir, r.stream, n))
		}
	}
}

func (r *rotation) close() {
	if r.file != nil {
		_ = r.file.Close()
	}
}

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

// followEvery is how often a follower looks for more.
const followEvery = 100 * time.Millisecond

// copyLogs copies a stream from its oldest kept byte, over rotations.
func copyLogs(ctx context.Context, h Handle, s Stream, follow bool, to io.Writer) error {
	dir := filepath.Join(h.Dir, "logs")
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	at := &position{number: -1}
	for {
		_, ended, err := readExit(h)
		if err != nil {
			return err
		}
		if err := at.copy(dir, s, to); err != nil {
			return fmt.Errorf("logs of %s: %w", h.ID, err)
		}
		if ended || !follow {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// position is how far a reader has come.
type position struct {
	number int
	offset int64
}

// copy goes on from the position to the end of what is there now.
func (p *position) copy(dir string, s Stream, to io.Writer) error {
	for _, n := range logNumbers(dir, s) {
		if n < p.number {
			continue
		}
		if n > p.number {
			p.number, p.offset = n, 0
		}
		f, err := os.Open(logName(dir, s, n))
		if errors.Is(err, fs.ErrNotExist) {
			continue // rotated away
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
