package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"holdfast/host/agent/control"
)

// The first agent ends without an answer, the second with an error, and the third answers.
func TestWaitForAJobOutlivesItsAgent(t *testing.T) {
	dir, err := os.MkdirTemp("", "h-")
	must(t, err)
	defer os.RemoveAll(dir)
	socket := filepath.Join(dir, "agent.sock")
	l, err := net.Listen("unix", socket)
	must(t, err)
	asked := 0
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		switch asked++; asked {
		case 1:
			panic(http.ErrAbortHandler)
		case 2:
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprint(w, `{"error":"the agent is ending","kind":"unavailable"}`)
		default:
			fmt.Fprint(w, `{"id":"notes","status":"running"}`)
		}
	})}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	job, err := (&program{address: socket, errs: io.Discard}).awaitJob(t.Context(), control.Job{})
	if err != nil || job.Status != "running" || asked != 3 {
		t.Errorf("%+v, %v, asked %d times", job, err, asked)
	}
	if err := server.Close(); err != nil {
		t.Error(err)
	}
	<-served
}
