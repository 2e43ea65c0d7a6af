package lifecycle

import (
	"fmt"
	"slices"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

// State is the state of a shim process.
type State string

const (
	Candidate  State = "candidate"
	Activating State = "activating"
	Active     State = "active"
	Quiesced   State = "quiesced" // active, but takes no new mutating calls
	Releasing  State = "releasing"
	Released   State = "released" // a candidate again
	Gone       State = "gone"
)

// legalMoves lists the states that may follow a state. Besides, any state may become Gone.
var legalMoves = map[State][]State{
	Candidate:  {Activating},
	Activating: {Active, Candidate, Released}, // to the previous state, if activation fails
	Active:     {Quiesced, Releasing},
	Quiesced:   {Quiesced, Active, Releasing}, // to Active if the handover was given up
	Releasing:  {Released},
	Released:   {Activating},
}

// move returns to if the move is legal, else s and an ErrConflict.
func (s State) move(to State) (State, error) {
	if to == Gone || slices.Contains(legalMoves[s], to) {
		return to, nil
	}
	return s, registry.Errorf(registry.ErrConflict, "this shim is %s; it cannot become %s", s, to)
}

// proto returns the state as it is sent to the host. A state in transition is sent as the state before it.
func (s State) proto() pb.LifecycleState {
	switch s {
	case Candidate, Activating:
		return pb.LifecycleState_LIFECYCLE_STATE_CANDIDATE
	case Active, Quiesced, Releasing:
		return pb.LifecycleState_LIFECYCLE_STATE_ACTIVE
	case Released:
		return pb.LifecycleState_LIFECYCLE_STATE_RELEASED
	case Gone:
		return pb.LifecycleState_LIFECYCLE_STATE_GONE
	}
	panic(fmt.Sprintf("state %q has no value on the wire", string(s)))
}
