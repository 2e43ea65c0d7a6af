package mount

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// ErrHung: there was no answer in time. What was asked for may still happen.
var ErrHung = errors.New("no answer in time")

// Lookout does what may hang in a helper process, which is given up when its time is over: it is killed, and reaped when the kernel lets go
// of it, at a later call. What such a process still hangs on is not asked again: there is one of them for each thing that hangs, and not
// one for each call. It keeps in use what it hangs on, as everyone does who asked. The helper has nothing open that its caller has, so
// nothing else is held up by it.
//
// helper is the command that runs LookMain. The zero Lookout is ready. Calls may be concurrent.
type Lookout struct {
	mu   sync.Mutex
	left []*aide // killed, and not dead yet
}

// longest is how long a look may take if its caller says nothing.
const longest = 10 * time.Second

// Look looks at each path: what is there, and whether what serves it answers. A path that hangs is Hung when the context's deadline is
// over, which is no error; without a deadline there is one of ten seconds. The error is about the paths that are not in the answer, as the
// helper did not come to them. Links are not followed, devices not opened. While a look lasts, what is looked at is in use.
func (l *Lookout) Look(ctx context.Context, helper, paths []string) (map[string]Seen, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	paths = slices.Compact(slices.Sorted(slices.Values(paths)))
	seen := make(map[string]Seen, len(paths))
	for _, p := range paths {
		if l.hangs(looking + p) {
			seen[p] = Seen{Hung: true}
		}
	}
	err := l.look(ctx, helper, slices.DeleteFunc(slices.Clone(paths), func(p string) bool { return seen[p].Hung }), seen)
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return nil, context.Cause(ctx)
	case len(seen) == len(paths):
		return seen, nil
	}
	return seen, fmt.Errorf("look at %d of %d paths: %w", len(paths)-len(seen), len(paths), err)
}

// looking is what a thread is at that looks at a path.
const looking = "look at "

func (l *Lookout) look(ctx context.Context, helper, paths []string, seen map[string]Seen) error {
	until, limited := ctx.Deadline()
	if !limited {
		until = time.Now().Add(longest)
	}
	if len(paths) == 0 {
		return nil
	}
	a, err := start(helper, until)
	if err != nil {
		return err
	}
	defer l.end(a)
	defer context.AfterFunc(ctx, a.interrupt)()
	_, err = a.ask(question{Look: bytesOf(paths), Within: time.Until(until)}, func(line answer) {
		if line.Seen == nil {
			a.at[line.TID] = looking + paths[line.N]
			return
		}
		seen[paths[line.N]] = *line.Seen
		delete(a.at, line.TID)
	})
	if errors.Is(err, ErrHung) {
		for _, what := range a.at {
			seen[strings.TrimPrefix(what, looking)] = Seen{Hung: true}
		}
	}
	return err
}

// Users is the function of this name. The calling process is not counted.
func (l *Lookout) Users(helper []string, within time.Duration, points []string) (map[string][]User, error) {
	found := make(map[string][]User, len(points))
	if len(points) == 0 {
		return found, nil
	}
	q := question{Users: bytesOf(points), Within: within}
	last, err := l.ask(helper, q, func(*aide, answer) {})
	if err != nil {
		return nil, fmt.Errorf("find the users of %d mount points: %w", len(points), err)
	}
	for i, users := range last.Users {
		if len(users) > 0 {
			found[points[i]] = users
		}
	}
	return found, nil
}

// Unmount is the function of this name. ErrHung: the unmount goes on.
func (l *Lookout) Unmount(helper []string, within time.Duration, root, rel string) error {
	what := "unmount " + filepath.Join(root, rel)
	if l.hangs(what) {
		return fmt.Errorf("%s: %w: an earlier one still goes on", what, ErrHung)
	}
	q := question{Unmount: &mounted{[]byte(root), []byte(rel)}, Within: within}
	_, err := l.ask(helper, q, func(a *aide, line answer) { a.at[line.TID] = what })
	if told := (*told)(nil); err == nil || errors.As(err, &told) {
		return err
	}
	return fmt.Errorf("%s: %w", what, err)
}

// ask has a helper of its own answer a question.
func (l *Lookout) ask(helper []string, q question, take func(*aide, answer)) (last answer, err error) {
	a, err := start(helper, time.Now().Add(q.Within))
	if err != nil {
		return last, err
	}
	defer l.end(a)
	return a.ask(q, func(line answer) { take(a, line) })
}

// end kills a helper.
func (l *Lookout) end(a *aide) {
	a.close()
	if a.dies() {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.left = append(l.left, a)
}

// hangs says whether an earlier helper still hangs on what is asked for now. It reaps those that do not hang any more.
func (l *Lookout) hangs(what string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.left = slices.DeleteFunc(l.left, (*aide).reaped)
	return slices.ContainsFunc(l.left, func(a *aide) bool { return a.hangs(what) })
}

func bytesOf(texts []string) (out [][]byte) {
	for _, t := range texts {
		out = append(out, []byte(t))
	}
	return out
}
