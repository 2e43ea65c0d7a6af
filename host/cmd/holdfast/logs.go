package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"

	"github.com/spf13/cobra"

	"holdfast/host/agent"
	"holdfast/host/agent/control"
	"holdfast/host/agent/taskdriver"
	"holdfast/internal/display"
)

// logFlags are the flags of commands that print logs.
type logFlags struct {
	agent.LogOptions
	stdout, stderr bool
}

func (f *logFlags) flags(c *cobra.Command) {
	c.Flags().BoolVarP(&f.Follow, "follow", "f", false, "follow the logs until the task ends")
	c.Flags().IntVar(&f.Tail, "tail", 0, "print only the last lines of each stream (0: all)")
	c.Flags().BoolVar(&f.stdout, "stdout", false, "print only standard output")
	c.Flags().BoolVar(&f.stderr, "stderr", false, "print only standard error, to standard output")
	excludeFlags(c, "stdout", "stderr")
}

func newAllocLogs(p *program) *cobra.Command {
	f := &logFlags{}
	c := &cobra.Command{
		Use: "logs ID [TASK]", Short: "Print the logs of a task",
		Long: `Print the standard output and standard error of a task. TASK may be omitted if
the alloc has one task. Control characters are escaped on a terminal.`,
		RunE: func(c *cobra.Command, args []string) error {
			client, id := p.client(), args[0]
			if len(args) == 2 {
				return f.copy(c.Context(), client, id, args[1], f.outputs(p))
			}
			id, task, err := onlyTask(c, client, id)
			if err != nil {
				return err
			}
			return f.copy(c.Context(), client, id, task, f.outputs(p))
		},
	}
	f.flags(c)
	return c
}

// onlyTask returns the whole ID of an alloc, and its task. It fails if the alloc has several tasks.
func onlyTask(c *cobra.Command, client *control.Client, prefix string) (id, task string, err error) {
	a, err := client.Alloc(c.Context(), prefix)
	if err != nil {
		return "", "", err
	}
	if len(a.Tasks) != 1 {
		names, _ := values(a.Tasks, nil, func(t control.Task) string { return string(t.Name) })
		return "", "", usageError{fmt.Errorf("alloc %s has several tasks: %s; usage: %s", short(a.ID), listed(names),
			c.UseLine())}
	}
	return a.ID, string(a.Tasks[0].Name), nil
}

func newJobLogs(p *program) *cobra.Command {
	f := &logFlags{}
	c := &cobra.Command{
		Use: "logs ID [TASK]", Short: "Print the logs of a job",
		Long: `Print the logs of the newest allocs of a job. If these have several tasks in
all, each line begins with its alloc and task. Control characters are escaped on
a terminal.`,
		RunE: func(c *cobra.Command, args []string) error {
			client := p.client()
			job, err := client.Job(c.Context(), args[0])
			if err != nil {
				return err
			}
			list := newestTasks(job)
			if len(args) == 2 {
				list = slices.DeleteFunc(list, func(t jobTask) bool { return t.task != args[1] })
				if len(list) == 0 {
					return fmt.Errorf("no alloc of job %s has a task %q", job.ID, args[1])
				}
			}
			return f.copyAll(c.Context(), client, list, p)
		},
	}
	f.flags(c)
	return c
}

// jobTask is a task of an alloc.
type jobTask struct{ alloc, task string }

// newestTasks returns the tasks of the newest alloc in each slot of a job. Job.Allocs has the newest alloc last.
func newestTasks(job control.Job) (list []jobTask) {
	type slot struct {
		group string
		index uint64
	}
	newest := map[slot]control.Alloc{}
	for _, a := range job.Allocs {
		newest[slot{a.Group, a.Index}] = a
	}
	allocs := slices.SortedFunc(maps.Values(newest), func(x, y control.Alloc) int {
		return cmp.Or(cmp.Compare(x.Group, y.Group), cmp.Compare(x.Index, y.Index))
	})
	for _, a := range allocs {
		for _, t := range a.Tasks {
			list = append(list, jobTask{a.ID, string(t.Name)})
		}
	}
	return list
}

// outputs returns the destination of each stream of a task.
func (f *logFlags) outputs(p *program) map[taskdriver.Stream]io.Writer {
	out, errs := display.Exact(p.out), display.Exact(p.errs)
	switch {
	case f.stdout:
		return map[taskdriver.Stream]io.Writer{taskdriver.Stdout: out}
	case f.stderr:
		return map[taskdriver.Stream]io.Writer{taskdriver.Stderr: out}
	}
	return map[taskdriver.Stream]io.Writer{taskdriver.Stdout: out, taskdriver.Stderr: errs}
}

// copyAll copies the logs of tasks, one after the other. With Follow it copies them at the same time.
func (f *logFlags) copyAll(ctx context.Context, client *control.Client, list []jobTask, p *program) error {
	if len(list) == 1 {
		return f.copy(ctx, client, list[0].alloc, list[0].task, f.outputs(p))
	}
	var lock sync.Mutex // lines are written as a whole
	return callAll(list, f.Follow, func(t jobTask) error {
		streams, lines := f.outputs(p), []*lineWriter{}
		for name, to := range streams {
			w := &lineWriter{to: to, lock: &lock, prefix: fmt.Sprintf("%s %s | ", short(t.alloc), t.task)}
			streams[name], lines = w, append(lines, w)
		}
		err := f.copy(ctx, client, t.alloc, t.task, streams)
		for _, w := range lines {
			err = errors.Join(err, w.flush())
		}
		return err
	})
}

// copy copies streams of a task, one after the other. With Follow it copies them at the same time.
func (f *logFlags) copy(
	ctx context.Context, client *control.Client, alloc, task string, streams map[taskdriver.Stream]io.Writer,
) error {
	names := slices.Sorted(maps.Keys(streams)) // stderr comes first, because it is usually short
	return callAll(names, f.Follow, func(name taskdriver.Stream) error {
		o := f.LogOptions
		o.Stream = name
		return client.Logs(ctx, alloc, task, o, streams[name])
	})
}

// callAll calls do for each item. With concurrently it makes all calls at the same time. It returns equal errors once.
func callAll[T any](list []T, concurrently bool, do func(T) error) error {
	var wg sync.WaitGroup
	errs := make([]error, len(list))
	for i, item := range list {
		wg.Go(func() { errs[i] = do(item) })
		if !concurrently {
			wg.Wait()
		}
	}
	wg.Wait()
	errs = slices.DeleteFunc(errs, func(err error) bool { return err == nil })
	errs = slices.CompactFunc(errs, func(x, y error) bool { return x.Error() == y.Error() })
	return failures(errs).err()
}

// maxLine bounds the part of a line that is kept in memory, because a task may never write a line break. A longer line
// is split.
const maxLine = 64 << 10

// lineWriter writes whole lines, each with a prefix.
type lineWriter struct {
	to     io.Writer
	lock   *sync.Mutex
	prefix string
	part   []byte // incomplete last line
}

func (w *lineWriter) Write(p []byte) (int, error) {
	w.part = append(w.part, p...)
	var text []byte
	for {
		i := bytes.IndexByte(w.part, '\n')
		if i < 0 {
			break
		}
		text = append(append(text, w.prefix...), w.part[:i+1]...)
		w.part = w.part[i+1:]
	}
	if len(w.part) >= maxLine {
		text = append(append(append(text, w.prefix...), w.part...), '\n')
		w.part = nil
	}
	w.lock.Lock()
	defer w.lock.Unlock()
	if _, err := w.to.Write(text); err != nil {
		return 0, err
	}
	return len(p), nil
}

// flush ends an incomplete last line.
func (w *lineWriter) flush() error {
	if len(w.part) == 0 {
		return nil
	}
	_, err := w.Write([]byte("\n"))
	return err
}
