package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"time"
)

// fenceFunc returns a host.Config.Fence that runs the program with the name of the node. It is nil if program is empty.
func fenceFunc(program string) (func(ctx context.Context, node string) error, error) {
	if program == "" {
		return nil, nil
	}
	path, err := exec.LookPath(program)
	if err != nil {
		return nil, badFlag("fence-command", "=%s: %v", program, err)
	}
	return func(ctx context.Context, node string) error {
		var output bytes.Buffer
		cmd := exec.CommandContext(ctx, path, node)
		cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &output, &output, time.Second
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("%s %s: %w; its output ends with %q", path, node, errors.Join(context.Cause(ctx), err),
				tailOf(output.Bytes(), 200))
		}
		return nil
	}, nil
}

// tailOf returns the end of a text, at most n bytes.
func tailOf(text []byte, n int) []byte {
	text = bytes.TrimSpace(text)
	return text[max(0, len(text)-n):]
}
