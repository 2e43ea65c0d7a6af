package mount

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// partQuestion is a Part, or the place of one, as a Lookout asks its helper for it: paths may be of any bytes.
type partQuestion struct {
	Root   []byte `json:"root"`
	At     []byte `json:"at"`
	Volume []byte `json:"volume,omitempty"` // empty: it is to be unmounted
	Path   []byte `json:"path,omitempty"`
	Make   bool   `json:"make,omitempty"`
}

// answer does it. Who has asked holds the other end of in: when that is gone, so is this process.
func (q partQuestion) answer(in io.Reader) error {
	go func() {
		_, _ = io.Copy(io.Discard, in)
		os.Exit(1)
	}()
	if len(q.Volume) == 0 {
		return UnmountPart(string(q.Root), string(q.At))
	}
	unix.Umask(0) // what is made has the mode of what it is made in
	return MountPart(Part{Root: string(q.Root), Volume: string(q.Volume), Path: string(q.Path), Make: q.Make, At: string(q.At)})
}

// MountPart is the function of this name. ErrHung: it may still be mounted; until that is over nothing is asked of p.At. Without a deadline
// ctx has one of ten seconds.
func (l *Lookout) MountPart(ctx context.Context, helper []string, p Part) error {
	q := partQuestion{Root: []byte(p.Root), At: []byte(p.At), Volume: []byte(p.Volume), Path: []byte(p.Path), Make: p.Make}
	return l.part(ctx, helper, q, "mount a part")
}

// UnmountPart is the function of this name, with a deadline as MountPart has one. ErrHung: it goes on.
func (l *Lookout) UnmountPart(ctx context.Context, helper []string, root, at string) error {
	return l.part(ctx, helper, partQuestion{Root: []byte(root), At: []byte(at)}, "unmount a part")
}

func (l *Lookout) part(ctx context.Context, helper []string, q partQuestion, verb string) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	place := filepath.Join(string(q.Root), string(q.At))
	what := "the part at " + place
	if l.hangs(what) {
		return fmt.Errorf("%s at %s: %w: an earlier try still goes on", verb, place, ErrHung)
	}
	until, limited := ctx.Deadline()
	if !limited {
		until = time.Now().Add(longest)
	}
	a, err := start(helper, until)
	if err != nil {
		return err
	}
	defer l.end(a)
	defer context.AfterFunc(ctx, a.interrupt)()
	_, err = a.ask(question{Part: &q, Within: time.Until(until)}, func(line answer) { a.at[line.TID] = what })
	if told := (*told)(nil); err == nil || errors.As(err, &told) {
		return err
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		err = context.Cause(ctx)
	}
	return fmt.Errorf("%s at %s: %w", verb, place, err)
}
