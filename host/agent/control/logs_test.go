package control

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"holdfast/hooks"
	"holdfast/host/agent"
	"holdfast/registry"
)

// serveUntilCutOff serves the API until end is called with errEnding, as if the agent ended.
func serveUntilCutOff(t *testing.T, s *Server, end *context.CancelCauseFunc) *Client {
	t.Helper()
	var life context.Context
	life, *end = context.WithCancelCause(t.Context())
	web := httptest.NewUnstartedServer(s.handler())
	web.Config.BaseContext = func(net.Listener) context.Context { return life }
	web.Start()
	t.Cleanup(web.Close)
	c := NewClient("")
	c.web.Transport = &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", web.Listener.Addr().String())
	}}
	return c
}

// The agent ends while a client follows the logs of a task that runs.
func TestLogsThatTheAgentCutsOffAreAnError(t *testing.T) {
	h := &fakeHost{}
	s, socket := serveAgent(t, h)
	task := hooks.Task{Name: "main", Driver: "raw_exec",
		Config: []byte(`{"command":"/bin/sh","args":["-c","echo hello; exec sleep 1000"]}`)}
	_, err := s.agent.Submit(t.Context(), &hooks.Job{ID: "long", Namespace: "default", Type: "service",
		Groups: []hooks.Group{{Name: "g", Count: 1, Tasks: []hooks.Task{task}}}}, agent.Source{}, h,
		agent.SubmitOptions{})
	must(t, err)
	c := NewClient(socket)
	job := awaitJob(t, c, "long", func(j Job) bool { return j.Status == "running" && j.Allocs[0].Tasks[0].PID != 0 })

	var end context.CancelCauseFunc
	var out strings.Builder
	err = serveUntilCutOff(t, s, &end).Logs(t.Context(), job.Allocs[0].ID, "main", agent.LogOptions{Follow: true},
		writerFunc(func(p []byte) error {
			out.Write(p)
			end(errEnding)
			return nil
		}))
	if !errors.Is(err, registry.ErrUnavailable) || out.String() != "hello\n" {
		t.Errorf("%q, %v", out.String(), err)
	}
	must(t, s.agent.StopAll(t.Context()))
}
