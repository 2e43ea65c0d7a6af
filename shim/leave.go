package main

import (
	"context"
	"encoding/json"
	"flag"
	"io"
	"os"

	"holdfast/shim/internal/lifecycle"
)

// leaveOptions are the flags of the command that ends a node's membership of its cluster.
type leaveOptions struct {
	node, confirm string
	lost          bool
}

func leaveFlags() *leaveOptions {
	l := &leaveOptions{}
	flag.StringVar(&l.node, "leave", "", "have node NAME, whose state is -state, leave the cluster that standard "+
		"input describes, and exit")
	flag.BoolVar(&l.lost, "lost", false,
		"of -leave: the cluster is gone for good, so nothing is read from standard input")
	flag.StringVar(&l.confirm, "confirm", "", "of -lost: the ID of the cluster")
	return l
}

// run has the node leave the cluster. It prints a JSON object with the ID of the cluster.
func (l *leaveOptions) run(ctx context.Context, offline lifecycle.Offline, out *json.Encoder) (err error) {
	var id string
	if l.lost {
		id, err = offline.LeaveLost(ctx, l.node, l.confirm)
	} else {
		var text []byte
		if text, err = io.ReadAll(os.Stdin); err == nil {
			id, err = offline.Leave(ctx, text, l.node)
		}
	}
	if err != nil {
		return err
	}
	return out.Encode(map[string]string{"left": id})
}
