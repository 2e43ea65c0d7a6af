package control

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"holdfast/host"
	"holdfast/registry"
)

// blocksLine is a line in a list of blocks. If the list ends early, its last line has an error.
type blocksLine struct {
	*host.Blocks
	Error *errorBody `json:"error,omitempty"`
}

// errNoBlocks means that the first part of a list of blocks did not arrive within the time limit of its request.
var errNoBlocks = errors.New("the plugin has sent no blocks yet (see holdfast plugin status)")

// streamBlocks sends the blocks of a snapshot, one part per line. The time limit of the request covers only the first
// part.
func (s *Server) streamBlocks(w http.ResponseWriter, r *http.Request) {
	q := host.BlockQuery{Snapshot: snapshotName(r), Base: host.SnapshotID(query(r, "base"))}
	if text := query(r, "offset"); text != "" {
		var err error
		if q.Offset, err = strconv.ParseInt(text, 10, 64); err != nil {
			writeError(w, registry.Invalid("offset: %q is not a number of bytes", text))
			return
		}
	}
	wait, err := timeLimit(r)
	if err != nil {
		writeError(w, err)
		return
	}
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	limit := time.AfterFunc(cmp.Or(wait, math.MaxInt64), func() { cancel(errNoBlocks) }) // wait 0: no limit
	defer limit.Stop()
	w.Header().Set("Content-Type", "application/x-ndjson")
	out := &flushWriter{ResponseWriter: w}
	lines := json.NewEncoder(out)
	err = s.host.SnapshotBlocks(ctx, q, func(part host.Blocks) error {
		limit.Stop()
		return lines.Encode(blocksLine{Blocks: &part})
	})
	if err != nil && errors.Is(context.Cause(ctx), errNoBlocks) {
		err = registry.Errorf(registry.ErrUnavailable, "waited %v: %w", wait, errNoBlocks)
	}
	switch {
	case err == nil:
	case !out.started:
		writeError(w, err)
	default:
		body, _ := errorBodyOf(fmt.Errorf("the list of blocks ended early: %w", err))
		_ = lines.Encode(blocksLine{Error: &body})
	}
}

// Blocks calls fn with the blocks of a snapshot, part by part. It waits up to c.Wait for the first part. An error means
// that blocks are missing.
func (c SnapshotClient) Blocks(ctx context.Context, q host.BlockQuery, fn func(host.Blocks) error) error {
	values := url.Values{"base": {string(q.Base)}, "offset": {fmt.Sprint(q.Offset)}, "wait": {c.Wait.String()}}
	body, err := c.open(ctx, http.MethodGet, c.path(q.Snapshot, "/blocks", values), nil)
	if err != nil {
		return err
	}
	return eachLine(body, func(line blocksLine) error {
		switch {
		case line.Error != nil:
			return line.Error.err()
		case line.Blocks == nil:
			return nil
		}
		return fn(*line.Blocks)
	})
}
