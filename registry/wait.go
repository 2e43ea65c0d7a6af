package registry

import (
	"fmt"
	"strings"
	"time"
)

// Step is one thing that has to happen between an alloc and a volume.
type Step string

const (
	StepClaim     Step = "claim"     // the right to the volume
	StepPlugin    Step = "plugin"    // a healthy instance of its plugin
	StepTurn      Step = "turn"      // the end of what else is under way for the volume
	StepAttach    Step = "attach"    // ControllerPublishVolume
	StepStage     Step = "stage"     // NodeStageVolume
	StepExpand    Step = "expand"    // NodeExpandVolume
	StepPublish   Step = "publish"   // NodePublishVolume
	StepUnpublish Step = "unpublish" // NodeUnpublishVolume
	StepUnstage   Step = "unstage"   // NodeUnstageVolume
	StepDetach    Step = "detach"    // ControllerUnpublishVolume
)

var steps = map[RPC]Step{
	ControllerPublishRPC: StepAttach, NodeStageRPC: StepStage, NodeExpandRPC: StepExpand, NodePublishRPC: StepPublish,
	NodeUnpublishRPC: StepUnpublish, NodeUnstageRPC: StepUnstage, ControllerUnpublishRPC: StepDetach,
}

// Step is the step that the call is; empty: it is none of an alloc's.
func (r RPC) Step() Step { return steps[r] }

// Wait is what one request of an alloc waits for, and why: for people.
type Wait struct {
	Alloc   AllocID     `json:"alloc,omitempty"`
	Request RequestName `json:"request,omitempty"`
	Volume  VolumeName  `json:"volume,omitzero"`
	Step    Step        `json:"step,omitempty"` // that does not get on; empty: it is not one step
	// for whom or what: the holders of a volume, a plugin, what else is under way
	For     string    `json:"for,omitempty"`
	Role    Role      `json:"role,omitempty"`    // that is waited for, with StepPlugin
	RPC     RPC       `json:"rpc,omitempty"`     // the call that did not end well; empty: none was sent
	Code    string    `json:"code,omitempty"`    // its gRPC code, by name; empty with an RPC: no answer
	Detail  string    `json:"detail,omitempty"`  // what the driver said: bounded and redacted
	Attempt uint64    `json:"attempt,omitempty"` // tries so far
	Since   time.Time `json:"since,omitzero"`
	Next    time.Time `json:"next,omitzero"`    // when it is tried again; zero: as soon as what it waits for is there
	Advice  string    `json:"advice,omitempty"` // what a person may do
}

// Waits is what an open call holds up.
func (i Intent) Waits() Wait {
	return Wait{
		Alloc: i.Alloc, Request: i.Request, Volume: i.Name, Step: i.RPC.Step(), For: "plugin " +
			string(i.Volume.Plugin), RPC: i.RPC,
		Code: i.Code, Detail: i.Detail, Attempt: i.Attempt, Since: i.Since, Next: i.Next,
	}
}

// String is the wait in one line, without its times: what is not so yet, and what stands in the way.
func (w Wait) String() string {
	if w.Step == StepClaim && w.Detail != "" {
		return w.Detail // it names the volume
	}
	line := w.what()
	if why := w.why(); why != "" {
		line += ": " + why
	}
	return line
}

func (w Wait) what() string {
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

func (w Wait) why() string {
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

// Participle is what the volume is when the step is done: "staged".
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
	}
	return "ready"
}

var participles = map[Step]string{
	StepAttach: "attached", StepStage: "staged", StepExpand: "expanded", StepPublish: "published",
	StepUnpublish: "unpublished", StepUnstage: "unstaged", StepDetach: "detached",
}

// Waits is a list of waits in one line.
func Waits(list []Wait) string {
	lines := make([]string, len(list))
	for i, w := range list {
		lines[i] = w.String()
	}
	return strings.Join(lines, "; ")
}
