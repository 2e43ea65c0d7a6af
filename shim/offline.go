package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/hashicorp/go-hclog"

	"holdfast/shim/internal/lifecycle"
)

// runOffline runs a command on the state of a node whose agent is stopped, and returns the exit code.
func runOffline(
	state, name string, command func(context.Context, lifecycle.Offline, *json.Encoder) error,
) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	log := hclog.New(&hclog.LoggerOptions{Name: name, Level: hclog.Warn, Output: os.Stderr})
	err := command(ctx, lifecycle.Offline{State: state, Logger: log}, json.NewEncoder(os.Stdout))
	if err != nil {
		fmt.Fprintln(os.Stderr, "holdfast-shim:", err)
		return 1
	}
	return 0
}
