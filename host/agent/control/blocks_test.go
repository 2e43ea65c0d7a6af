package control

import (
	"context"
	"errors"
	"net/http"
	"testing"

	"holdfast/host"
	"holdfast/registry"
)

// blocksHost sends parts of a list of blocks, and then the agent ends or is killed.
type blocksHost struct {
	fakeHost
	parts  []host.Blocks
	end    context.CancelCauseFunc
	killed bool
}

func (h *blocksHost) SnapshotBlocks(ctx context.Context, _ host.BlockQuery, fn func(host.Blocks) error) error {
	for _, part := range h.parts {
		if err := fn(part); err != nil {
			return err
		}
	}
	if h.killed {
		panic(http.ErrAbortHandler)
	}
	h.end(errEnding)
	<-ctx.Done()
	return context.Cause(ctx)
}

// The agent ends while it sends a list of blocks or before the first part, or it is killed. A backup that takes such a
// list for complete loses data.
func TestListOfBlocksThatTheAgentCutsOffIsAnError(t *testing.T) {
	one := []host.Blocks{{Ranges: []host.BlockRange{{Size: 4096}}}}
	for _, h := range []*blocksHost{{}, {parts: one}, {parts: one, killed: true}} {
		got := 0
		c := serveUntilCutOff(t, &Server{host: h}, &h.end)
		err := c.Snapshots(Snapshots).Blocks(t.Context(), host.BlockQuery{Snapshot: host.SnapshotName{ID: "s"}},
			func(host.Blocks) error {
				got++
				return nil
			})
		if got != len(h.parts) || !errors.Is(err, registry.ErrUnavailable) {
			t.Errorf("%d of %d parts, then %v", got, len(h.parts), err)
		}
	}
}
