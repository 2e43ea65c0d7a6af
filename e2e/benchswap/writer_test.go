package benchswap

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// stroke is one write that was synced.
type stroke struct {
	At   time.Time
	Took time.Duration
}

// writer is the process that writes to a volume all the while: it appends a block and syncs it.
type writer struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	strokes chan []stroke
	err     error // readable after strokes
}

func startWriter(dir string) (*writer, error) {
	cmd := other("writer")
	cmd.Args = append(cmd.Args, filepath.Join(dir, "log"))
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	w := &writer{cmd: cmd, in: in, strokes: make(chan []stroke, 1)}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() { w.strokes <- w.read(out) }()
	return w, nil
}

func (w *writer) read(out io.Reader) (all []stroke) {
	for dec := json.NewDecoder(bufio.NewReader(out)); ; {
		var s stroke
		switch err := dec.Decode(&s); err {
		case nil:
			all = append(all, s)
		case io.EOF:
			return all
		default:
			w.err = err
			return all
		}
	}
}

// stop returns all that was written. An error of any write is one of the process.
func (w *writer) stop() ([]stroke, error) {
	if err := w.in.Close(); err != nil {
		return nil, err
	}
	all := <-w.strokes
	if err := w.cmd.Wait(); err != nil {
		return all, fmt.Errorf("the task that writes to a volume: %w", err)
	}
	return all, w.err
}

// writeEvery is the time from one write to the next.
const writeEvery = 5 * time.Millisecond

// write is the process. The file begins anew before it fills the disk.
func write() error {
	file, err := os.OpenFile(os.Args[len(os.Args)-1], os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer file.Close()
	ended := make(chan struct{})
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); close(ended) }()
	out := bufio.NewWriterSize(os.Stdout, 1<<16)
	defer out.Flush()
	enc, block := json.NewEncoder(out), make([]byte, 4096)
	tick := time.NewTicker(writeEvery)
	defer tick.Stop()
	for n := int64(0); ; n++ {
		select {
		case <-ended:
			return nil
		case <-tick.C:
		}
		began := time.Now()
		if _, err := file.WriteAt(block, n%4096*int64(len(block))); err != nil {
			return err
		}
		if err := file.Sync(); err != nil {
			return err
		}
		if err := enc.Encode(stroke{began, time.Since(began)}); err != nil {
			return err
		}
	}
}
