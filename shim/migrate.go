package main

import (
	"context"
	"encoding/json"
	"io"
	"os"

	"holdfast/shim/internal/lifecycle"
)

// migrate moves the state into the cluster that standard input describes, as a node of this name. It prints two JSON
// objects: before it moves anything the secrets that other nodes will need, and then the number of records moved.
func migrate(ctx context.Context, offline lifecycle.Offline, node string, out *json.Encoder) error {
	text, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	moved, err := offline.Migrate(ctx, text, node, func(all []lifecycle.SecretUse) {
		_ = out.Encode(map[string]any{"secrets": all})
	})
	if err != nil {
		return err
	}
	return out.Encode(map[string]any{"moved": moved})
}
