package control

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"testing"
	"testing/synctest"

	"holdfast/host/agent/taskdriver"
)

// A signal may arrive when the program has ended and events are not received any more.
func TestSignalAfterTheEndOfACommandDoesNotBlock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		agent, client := net.Pipe()
		ended, returned := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(returned)
			runOn(t.Context(), agent, taskdriver.ExecOptions{},
				func(context.Context, taskdriver.ExecOptions) (int, error) {
					<-ended
					return 7, nil
				})
		}()
		must(t, json.NewEncoder(client).Encode(execMessage{Signal: 15}))
		synctest.Wait()
		close(ended)
		var last execMessage
		if err := json.NewDecoder(client).Decode(&last); err != nil || last.Exit == nil || *last.Exit != 7 {
			t.Errorf("%+v, %v", last, err)
		}
		<-returned
	})
}

// Without an answer of the agent, a command in a task ends like any other: by the signal of its user, or because no
// agent is running.
func TestCommandInATaskNeedsAnAgent(t *testing.T) {
	socket := Socket(shortDir(t))
	l, err := net.Listen("unix", socket)
	must(t, err)
	defer l.Close()
	signal := errors.New("the user has sent a signal")
	ctx, cancel := context.WithCancelCause(t.Context())
	for _, c := range []struct {
		accepted func(net.Conn)
		want     error
	}{
		{func(conn net.Conn) { conn.Close() }, ErrNoAgent},
		{func(net.Conn) { cancel(signal) }, signal},
	} {
		go func() {
			conn, err := l.Accept()
			if err == nil {
				c.accepted(conn)
			}
		}()
		if _, err := NewClient(socket).Exec(ctx, "a", "t", taskdriver.ExecOptions{}); !errors.Is(err, c.want) {
			t.Errorf("%v, want %v", err, c.want)
		}
	}
}
