package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/hashicorp/go-hclog"

	"holdfast/shim/internal/lifecycle"
)

// leaving ends a node's membership of its cluster.
type leaving struct {
	node, confirm string
	lost          bool
}

func leaveFlags() *leaving {
	l := &leaving{}
	flag.StringVar(&l.node, "leave", "", "have node NAME, whose state is -state, leave the cluster that standard "+
		"input describes, and exit")
	flag.BoolVar(&l.lost, "lost", false,
		"of -leave: the cluster is gone for good, so nothing is read from standard input")
	flag.StringVar(&l.confirm, "confirm", "", "of -lost: the ID of the cluster")
	return l
}

// run is the exit code. It prints a JSON object with the ID of the cluster.
func (l *leaving) run(state string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	offline := lifecycle.Offline{State: state,
		Logger: hclog.New(&hclog.LoggerOptions{Name: "leave", Level: hclog.Warn, Output: os.Stderr})}
	id, err := "", error(nil)
	if l.lost {
		id, err = offline.LeaveLost(ctx, l.node, l.confirm)
	} else {
		var text []byte
		if text, err = io.ReadAll(os.Stdin); err == nil {
			id, err = offline.Leave(ctx, text, l.node)
		}
	}
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(map[string]string{"left": id})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "holdfast-shim:", err)
		return 1
	}
	return 0
}
