package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/hashicorp/go-hclog"

	"holdfast/shim/internal/lifecycle"
)

// migrate is the exit code of a migration of the state to a cluster. It reads the cluster block from standard input. It
// prints two JSON objects: the secrets that other nodes will need, before it moves anything, and the number of records
// moved.
func migrate(state, node string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	log := hclog.New(&hclog.LoggerOptions{Name: "migrate", Level: hclog.Warn, Output: os.Stderr})
	text, err := io.ReadAll(os.Stdin)
	if err == nil {
		var moved int
		out := json.NewEncoder(os.Stdout)
		moved, err = lifecycle.Offline{State: state, Logger: log}.Migrate(ctx, text, node,
			func(all []lifecycle.SecretUse) {
				_ = out.Encode(map[string]any{"secrets": all})
			})
		if err == nil {
			err = out.Encode(map[string]any{"moved": moved})
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "holdfast-shim:", err)
		return 1
	}
	return 0
}
