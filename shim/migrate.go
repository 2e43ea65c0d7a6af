package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/hashicorp/go-hclog"

	"holdfast/shim/internal/lifecycle"
)

// migrate is the exit code of a migration of the state to a cluster. It reads the cluster block from standard input, and
// prints the number of records moved.
func migrate(state, node string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	log := hclog.New(&hclog.LoggerOptions{Name: "migrate", Level: hclog.Warn, Output: os.Stderr})
	text, err := io.ReadAll(os.Stdin)
	if err == nil {
		var moved int
		moved, err = lifecycle.Offline{State: state, Logger: log}.Migrate(ctx, text, node)
		if err == nil {
			_, err = fmt.Println(moved)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "holdfast-shim:", err)
		return 1
	}
	return 0
}
