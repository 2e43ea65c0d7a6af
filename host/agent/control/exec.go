package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"syscall"
	"time"

	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

// upgradeExec is the protocol of a connection to a program in a task: execMessages as JSON in both directions.
const upgradeExec = "exec"

// execMessage has one of its fields set, or Rows and Cols.
type execMessage struct {
	// Fields from the client. It sends each part of the input only after the agent has taken the part before.
	Stdin  []byte         `json:"stdin,omitempty"`
	End    bool           `json:"end,omitempty"` // the input ends
	Rows   uint16         `json:"rows,omitempty"`
	Cols   uint16         `json:"cols,omitempty"`
	Signal syscall.Signal `json:"signal,omitempty"`

	// Fields from the agent. The last message has Exit or Error.
	Taken  bool       `json:"taken,omitempty"`
	Stdout []byte     `json:"stdout,omitempty"`
	Stderr []byte     `json:"stderr,omitempty"`
	Exit   *int       `json:"exit,omitempty"`
	Error  *errorBody `json:"error,omitempty"`
}

// execWriteLimit is how long a client may take to receive the rest of the output when the agent ends.
const execWriteLimit = time.Second

// serveExec runs a program in a task until it ends. If the client closes its connection, serveExec kills the program.
func (s *Server) serveExec(w http.ResponseWriter, r *http.Request) {
	rec, err := s.agent.Find(r.PathValue("id"))
	var run func(context.Context, taskdriver.ExecOptions) (int, error)
	task := host.TaskName(r.PathValue("task"))
	if err == nil {
		run, err = s.agent.Exec(rec.ID, task)
	}
	if err == nil && r.Header.Get("Upgrade") != upgradeExec {
		err = registry.Invalid("the request lacks the header \"Upgrade: %s\"; use holdfast alloc exec", upgradeExec)
	}
	if err != nil {
		writeError(w, err)
		return
	}
	s.upgraded.Add(1)
	defer s.upgraded.Done()
	conn, err := switchTo(upgradeExec, w)
	if err != nil {
		return
	}
	defer conn.Close()
	s.log.Info("running a command in a task", "alloc", rec.ID, "task", task, "by", operatorOf(r))
	q := r.URL.Query()
	runOn(r.Context(), conn, taskdriver.ExecOptions{Command: q["command"], Term: q.Get("term")}, run)
}

// runOn runs a program whose streams and events come from a connection.
func runOn(ctx context.Context, conn net.Conn, o taskdriver.ExecOptions,
	run func(context.Context, taskdriver.ExecOptions) (int, error)) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now().Add(execWriteLimit)) })
	defer stop()
	input, events, out := newExecInput(), make(chan taskdriver.ExecEvent), &execWriter{to: json.NewEncoder(conn)}
	var reader sync.WaitGroup
	reader.Go(func() { cancel(input.read(ctx, json.NewDecoder(conn), events)) })
	reader.Go(func() { input.pass(out) })
	o.Stdin, o.Events = input.PipeReader, events
	o.Stdout = writerFunc(func(p []byte) error { return out.send(execMessage{Stdout: p}) })
	o.Stderr = writerFunc(func(p []byte) error { return out.send(execMessage{Stderr: p}) })
	code, err := run(ctx, o)
	last := execMessage{Exit: &code}
	if err != nil {
		body, _ := errorBodyOf(err)
		last = execMessage{Error: &body}
	}
	_ = out.send(last)
	_ = conn.Close()
	cancel(nil) // the reader may wait for events to be received
	reader.Wait()
}

// execInput is the standard input of a program, which need not read it.
type execInput struct {
	*io.PipeReader
	write  *io.PipeWriter
	chunks chan []byte // capacity 1, so that read continues and notices that the client has left
}

func newExecInput() *execInput {
	r, w := io.Pipe()
	return &execInput{r, w, make(chan []byte, 1)}
}

// pass writes chunks to the program's input, and tells the client that they are taken.
func (i *execInput) pass(out *execWriter) {
	for c := range i.chunks {
		_, _ = i.write.Write(c) // fails after the program has ended
		_ = out.send(execMessage{Taken: true})
	}
}

// read receives the client's messages and passes them on, until the client leaves.
func (i *execInput) read(ctx context.Context, from *json.Decoder, events chan<- taskdriver.ExecEvent) error {
	defer i.write.Close()
	defer close(i.chunks)
	for {
		var m execMessage
		if err := from.Decode(&m); err != nil {
			return errClientLeft
		}
		switch {
		case m.End:
			_ = i.write.Close()
		case len(m.Stdin) > 0:
			select {
			case i.chunks <- m.Stdin:
			case <-ctx.Done():
			}
		default:
			select {
			case events <- taskdriver.ExecEvent{Rows: m.Rows, Cols: m.Cols, Signal: m.Signal}:
			case <-ctx.Done():
			}
		}
	}
}

var errClientLeft = errors.New("the client has left")

// execWriter sends messages one after the other, also for concurrent callers.
type execWriter struct {
	mu sync.Mutex
	to *json.Encoder
}

func (w *execWriter) send(m execMessage) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.to.Encode(m)
}

type writerFunc func([]byte) error

func (f writerFunc) Write(p []byte) (int, error) { return len(p), f(p) }

// Exec runs a program in a task, and returns its exit code. A read of Stdin may still be running when Exec returns.
func (c *Client) Exec(ctx context.Context, alloc, task string, o taskdriver.ExecOptions) (int, error) {
	q := url.Values{"command": o.Command, "term": {o.Term}}
	conn, err := c.dialUpgraded(ctx, upgradeExec, "/alloc/"+segment(alloc)+"/exec/"+segment(task)+"?"+q.Encode())
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	out, done := &execWriter{to: json.NewEncoder(conn)}, make(chan struct{})
	taken := make(chan struct{}, 1) // receives once the agent has taken the last part of the input
	defer close(done)
	go func() { // may still be blocked in Read when the program ends
		_, _ = io.Copy(writerFunc(func(p []byte) error {
			err := out.send(execMessage{Stdin: p})
			select {
			case <-taken:
			case <-done:
			}
			return err
		}), o.Stdin)
		_ = out.send(execMessage{End: true})
	}()
	go func() {
		for {
			select {
			case e := <-o.Events:
				_ = out.send(execMessage{Rows: e.Rows, Cols: e.Cols, Signal: e.Signal})
			case <-done:
				return
			}
		}
	}()
	for messages := json.NewDecoder(conn); ; {
		var m execMessage
		if err = messages.Decode(&m); err != nil && ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		switch {
		case err != nil:
			return 0, registry.Errorf(registry.ErrUnavailable, "the agent ended before the command did: %w", err)
		case m.Error != nil:
			return 0, fmt.Errorf("%s", m.Error.Error) // without its kind, which the caller would relate to the alloc
		case m.Exit != nil:
			return *m.Exit, nil
		case m.Taken:
			taken <- struct{}{}
		case len(m.Stdout) > 0:
			_, err = o.Stdout.Write(m.Stdout)
		case len(m.Stderr) > 0:
			_, err = o.Stderr.Write(m.Stderr)
		}
		if err != nil {
			return 0, err
		}
	}
}
