package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"holdfast/host"
	"holdfast/registry"
)

// blocksLine is a line of a list of blocks, which ends early with an error.
type blocksLine struct {
	*host.Blocks
	Error *errorBody `json:"error,omitempty"`
}

// streamBlocks sends the blocks of a snapshot, one part a line.
func (s *Server) streamBlocks(w http.ResponseWriter, r *http.Request) {
	q := host.BlockQuery{Snapshot: snapshotName(r), Base: host.SnapshotID(r.URL.Query().Get("base"))}
	if text := r.URL.Query().Get("offset"); text != "" {
		var err error
		if q.Offset, err = strconv.ParseInt(text, 10, 64); err != nil {
			refuse(w, registry.Invalid("offset: %q is not a number of bytes", text))
			return
		}
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	out := &flushWriter{ResponseWriter: w}
	lines := json.NewEncoder(out)
	err := s.host.SnapshotBlocks(r.Context(), q, func(part host.Blocks) error { return lines.Encode(blocksLine{Blocks: &part}) })
	switch {
	case err == nil || r.Context().Err() != nil:
	case !out.started:
		refuse(w, err)
	default:
		body, _ := errorBodyOf(fmt.Errorf("the list of blocks ended early: %w", err))
		_ = lines.Encode(blocksLine{Error: &body})
	}
}

// Blocks calls fn with the blocks of a snapshot, part by part. An error means that blocks are missing.
func (c SnapshotClient) Blocks(ctx context.Context, q host.BlockQuery, fn func(host.Blocks) error) error {
	values := url.Values{"namespace": {string(q.Snapshot.Namespace)}, "base": {string(q.Base)},
		"offset": {fmt.Sprint(q.Offset)}}
	body, err := c.open(ctx, http.MethodGet,
		c.kind+"/"+segment(string(q.Snapshot.ID))+"/blocks?"+values.Encode(), nil)
	if err != nil {
		return err
	}
	defer body.Close()
	for d := json.NewDecoder(body); ; {
		var line blocksLine
		err := d.Decode(&line)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case line.Error != nil:
			return line.Error.err()
		case line.Blocks == nil:
			continue
		}
		if err := fn(*line.Blocks); err != nil {
			return err
		}
	}
}
