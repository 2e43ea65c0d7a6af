package control

import (
	"context"
	"encoding/json"
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
