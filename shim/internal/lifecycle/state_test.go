package lifecycle

import (
	"errors"
	"testing"

	"holdfast/registry"
)

var states = []State{Candidate, Activating, Active, Quiesced, Releasing, Released, Gone}

// TestMoves tries every pair of states. The table lists the legal moves; any other move is a conflict and changes
// nothing.
func TestMoves(t *testing.T) {
	drawn := map[State]string{ // by state, in the order of states
		Candidate:  " A    G",
		Activating: "C a  rG",
		Active:     "   qR G",
		Quiesced:   "  aqR G",
		Releasing:  "     rG",
		Released:   " A    G",
		Gone:       "      G",
	}
	for _, from := range states {
		for i, to := range states {
			legal := drawn[from][i] != ' '
			got, err := from.move(to)
			switch {
			case legal && (got != to || err != nil):
				t.Errorf("%s to %s: %s, %v", from, to, got, err)
			case !legal && (got != from || !errors.Is(err, registry.ErrConflict)):
				t.Errorf("%s to %s: %s, %v", from, to, got, err)
			}
		}
	}
}
