package registry

import (
	"fmt"
	"strings"
	"time"
)

// Step is one step of the volume life cycle for an alloc.
type Step string

const (
	StepCreate    Step = "create"    // CreateVolume, for a create block
	StepClaim     Step = "claim"     // the right to the volume
	StepPlugin    Step = "plugin"    // a healthy instance of its plugin
	StepTurn      Step = "turn"      // the end of another operation on the volume
	StepAttach    Step = "attach"    // ControllerPublishVolume
	StepStage     Step = "stage"     // NodeStageVolume
	StepExpand    Step = "expand"    // NodeExpandVolume
	StepPublish   Step = "publish"   // NodePublishVolume
	StepOwn       Step = "own"       // owner and mode of the files
	StepUnpublish Step = "unpublish" // NodeUnpublishVolume
	StepUnstage   Step = "unstage"   // NodeUnstageVolume
	StepDetach    Step = "detach"    // ControllerUnpublishVolume
)

var steps = map[RPC]Step{
	ControllerPublishRPC: StepAttach, NodeStageRPC: StepStage, NodeExpandRPC: StepExpand, NodePublishRPC: StepPublish,
	NodeUnpublishRPC: StepUnpublish, NodeUnstageRPC: StepUnstage, ControllerUnpublishRPC: StepDetach,
}

// Step returns the step that the call performs, or empty if no step uses the call.
func (r RPC) Step() Step { return steps[r] }

// Wait describes what one request of an alloc waits for. It is for people.
type Wait struct {
	Alloc   AllocID     `json:"alloc,omitempty"`
	Request RequestName `json:"request,omitempty"`
	Volume  VolumeName  `json:"volume,omitzero"`
	Step    Step        `json:"step,omitempty"` // the blocked step; empty: no single step
	// For names the holders of a volume, a plugin or another operation.
	For     string    `json:"for,omitempty"`
	Role    Role      `json:"role,omitempty"`    // the awaited role, for StepPlugin
	RPC     RPC       `json:"rpc,omitempty"`     // the failed or open call; empty: none was sent
	Code    string    `json:"code,omitempty"`    // name of its gRPC code; empty with an RPC: no response
	Detail  string    `json:"detail,omitempty"`  // the driver's message, bounded and redacted
	Attempt uint64    `json:"attempt,omitempty"` // tries so far
	Since   time.Time `json:"since,omitzero"`
	Next    time.Time `json:"next,omitzero"`    // time of the next try; zero: when the awaited condition holds
	Advice  string    `json:"advice,omitempty"` // how to resolve the wait
}

// Waits returns the Wait that an open call causes.
func (i Intent) Waits() Wait {
	return Wait{
		Alloc: i.Alloc, Request: i.Request, Volume: i.Name, Step: i.RPC.Step(),
		For: "plugin " + string(i.Volume.Plugin), RPC: i.RPC, Code: i.Code, Detail: i.Detail,
		Attempt: i.Attempt, Since: i.Since, Next: i.Next,
	}
}

// String formats the wait and its reason in one line, without times.
func (w Wait) String() string {
	if w.Step == StepClaim && w.Detail != "" {
		return w.Detail // it names the volume
	}
	line := w.pending()
	if reason := w.reason(); reason != "" {
		line += ": " + reason
	}
	return line
}

// pending says which volume waits, and for what.
func (w Wait) pending() string {
	name := "volume " + w.Volume.String()
	if w.Volume.ID == "" {
		name = fmt.Sprintf("the volume of request %q", w.Request)
	}
	switch {
	case w.Step == StepPlugin && w.For != "":
		return name + " waits for " + w.For
	case w.Step == StepClaim, w.Step == StepPlugin, w.Step == StepTurn:
		return name + " waits for its " + string(w.Step)
	case w.Step == "" && w.RPC == "":
		return name + " waits"
	}
	return name + " is not " + w.Participle() + " yet"
}

// reason says why the wait continues; empty: not known.
func (w Wait) reason() string {
	switch {
	case w.RPC != "" && w.Code != "":
		return fmt.Sprintf("%s: %s failed: %s: %s", w.For, w.RPC, w.Code, w.Detail)
	case w.RPC != "" && w.Detail != "":
		return fmt.Sprintf("%s: %s got no answer: %s", w.For, w.RPC, w.Detail)
	case w.RPC != "":
		return fmt.Sprintf("waiting for %s to answer %s", w.For, w.RPC)
	case w.Step == StepTurn && w.Detail == "":
		return w.For
	}
	return w.Detail
}

// Participle returns the volume's state after the step, as in "staged".
func (w Wait) Participle() string {
	if done, known := participles[w.Step]; known {
		return done
	}
	switch w.RPC {
	case CreateVolumeRPC:
		return "created"
	case DeleteVolumeRPC:
		return "deleted"
	case ControllerExpandRPC:
		return "expanded"
	case ControllerModifyRPC:
		return "modified"
	}
	return "ready"
}

var participles = map[Step]string{
	StepCreate: "created", StepAttach: "attached", StepOwn: "owned", StepStage: "staged", StepExpand: "expanded",
	StepPublish: "published", StepUnpublish: "unpublished", StepUnstage: "unstaged", StepDetach: "detached",
}

// Waits formats a list of waits in one line.
func Waits(list []Wait) string {
	lines := make([]string, len(list))
	for i, w := range list {
		lines[i] = w.String()
	}
	return strings.Join(lines, "; ")
}
