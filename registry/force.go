package registry

import (
	"fmt"
	"time"
)

// Force holds the options of a release by force, for volumes that cannot be released in order.
type Force struct {
	By string // the operator, for the events; required unless DryRun is set
	// Confirm repeats the ID of the alloc or volume. Without it, steps that may lose data are refused.
	Confirm string
	DryRun  bool // only return the steps
}

// Forced records a release by force. The zero value means that there was none.
type Forced struct {
	By    string    `json:"by,omitempty"`
	Since time.Time `json:"since,omitzero"`
}

// ReleaseAction is what a step of a release does. The set is closed.
type ReleaseAction string

const (
	ReleaseSend    ReleaseAction = "send"    // send the CSI call
	ReleaseSkip    ReleaseAction = "skip"    // do not send the CSI call; Detail says why
	ReleaseUnmount ReleaseAction = "unmount" // unmount Target, which nothing uses
	ReleaseRefuse  ReleaseAction = "refuse"  // nothing is done; Detail says what is in the way
	ReleaseFence   ReleaseAction = "fence"   // have the host fence the node Target
	ReleaseClaim   ReleaseAction = "release" // release the claim
)

// ReleaseStep is one step of a release by force, or of a detach.
type ReleaseStep struct {
	Volume  VolumeName    `json:"volume,omitzero"`
	Request RequestName   `json:"request,omitempty"`
	Action  ReleaseAction `json:"action"`
	RPC     RPC           `json:"rpc,omitempty"`
	Target  string        `json:"target,omitempty"` // a path, or a node
	Detail  string        `json:"detail,omitempty"`
}

// String formats the step in one line.
func (s ReleaseStep) String() string {
	text := string(s.Action)
	switch {
	case s.Action == ReleaseClaim:
		text = "release the claim on"
	case s.RPC != "":
		text += fmt.Sprintf(" %s of", s.RPC)
	case s.Action == ReleaseUnmount, s.Action == ReleaseFence:
		text += " " + s.Target + " of"
	default:
		text += ":"
	}
	text += " volume " + s.Volume.String()
	if s.RPC != "" && s.Target != "" {
		text += " at " + s.Target
	}
	if s.Detail != "" {
		text += ": " + s.Detail
	}
	return text
}
