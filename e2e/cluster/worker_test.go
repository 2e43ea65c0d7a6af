package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"holdfast/host"
)

// worker uses volumes for one alloc after another.
type worker struct {
	*node
	random *rand.Rand
}

// use makes an alloc and runs its life. If working ends before the alloc has begun to claim its volume, use ends too.
func (w *worker) use(ctx, working context.Context, alloc string) {
	volume := w.random.IntN(w.Volumes)
	l := line{Alloc: alloc, Volume: volumeID(volume), Mode: modesOf(volume)[w.random.IntN(5)/4],
		Write: w.random.IntN(3) > 0}
	if strings.HasSuffix(l.Mode, "reader-only") {
		l.Write = false
	}
	text := fmt.Sprintf("job \"user\" {\n group \"g\" {\n volume \"data\" {\n type = \"csi\"\n source = %q\n "+
		"access_mode = %q\n attachment_mode = \"file-system\"\n read_only = %v\n }\n task \"t\" {\n driver = "+
		"\"raw_exec\"\n volume_mount {\n volume = \"data\"\n destination = \"/data\"\n }\n }\n }\n}\n", l.Volume,
		l.Mode, !l.Write)
	w.persist(ctx, "parse", func(ctx context.Context) error {
		job, _, err := w.host.Parse(ctx, host.Source{Name: "user.hcl", Text: []byte(text)}, host.ParseOptions{})
		if err == nil {
			l.Sealed = job.Groups[0].Sealed
		}
		return err
	})
	w.life(ctx, working, l, false)
}

// continued continues the life of an alloc that an earlier process has begun.
func (w *worker) continued(ctx, working context.Context, l line) {
	if l.Kind == releaseBegins || w.random.IntN(2) == 0 {
		w.release(ctx, l)
		return
	}
	w.life(ctx, working, l, true)
}

// life has an alloc wait for its volume, claim it, write to it and release it. After a random time, an alloc stops
// waiting, and tries to claim its volume while others hold it; on each node this happens about once a second. tried
// means that the alloc has begun to claim its volume before.
func (w *worker) life(ctx, working context.Context, l line, tried bool) {
	for tries := 0; tries < 4; tries++ {
		limit := 2 * time.Second * time.Duration(max(1, w.Workers))
		waiting, cancel := context.WithTimeout(working, time.Duration(w.random.Int64N(int64(limit))))
		done := w.turns.wait(waiting, l.Volume, l.use())
		cancel()
		if working.Err() != nil {
			done()
			break
		}
		path, err := w.prepare(ctx, l)
		if tried = true; err == nil {
			done()
			w.write(l, path)
			break
		}
		time.Sleep(time.Duration(w.random.Int64N(int64(time.Second)))) // by then this node should know the holders
		done()
	}
	if tried {
		w.release(ctx, l)
	}
}

func (w *worker) prepare(ctx context.Context, l line) (path string, err error) {
	limit := time.Minute
	if w.random.IntN(8) == 0 { // the caller gives up early
		limit = time.Duration(w.random.Int64N(int64(3 * time.Second)))
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	l.Kind = prepareBegins
	w.note(l)
	plans, err := w.host.PrepareAlloc(ctx, group(l))
	l.Kind, l.Error, l.Sealed = prepareEnded, textOf(err), nil
	l.Refused = errors.Is(err, host.ErrConflict) && strings.Contains(l.Error, "while it is held by")
	w.note(l)
	if err != nil && unexplained(err) {
		w.note(line{Kind: broken, Error: "prepare: " + err.Error()})
	}
	for _, v := range plans["t"].Env {
		if v.Name == "HOLDFAST_VOLUME_DATA" {
			path = v.Value
		}
	}
	return path, err
}

// write does the work of the alloc's task.
func (w *worker) write(l line, path string) {
	name := filepath.Join(path, writesFile)
	for _, what := range []string{"begin", "end"} {
		f, err := os.OpenFile(name, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
		if err == nil {
			_, err = fmt.Fprintln(f, what, l.Alloc, w.Name, l.Mode)
			err = errors.Join(err, f.Close())
		}
		if l.Write != (err == nil) {
			w.note(line{Kind: broken, Error: fmt.Sprintf("alloc %s writes to its volume (allowed: %v): %v", l.Alloc,
				l.Write, err)})
		}
		if !l.Write {
			return
		}
		time.Sleep(time.Duration(w.random.Int64N(int64(50 * time.Millisecond))))
	}
}

func (w *worker) release(ctx context.Context, l line) {
	w.persist(ctx, "release", func(ctx context.Context) error {
		l.Kind, l.Error, l.Sealed = releaseBegins, "", nil
		w.note(l)
		err := w.host.ReleaseAlloc(ctx, host.AllocID(l.Alloc))
		l.Kind, l.Error = releaseEnded, textOf(err)
		w.note(l)
		return err
	})
}
