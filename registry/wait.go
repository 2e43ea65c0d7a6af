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
	StepPublish   Step = "publish"   // NodePublishVolume
	StepUnpublish Step = "unpublish" // NodeUnpublishVolume
	StepUnstage   Step = "unstage"   // NodeUnstageVolume
	StepDetach    Step = "detach"    // ControllerUnpublishVolume
)

var steps = map[RPC]Step{
	ControllerPublishRPC: StepAttach, NodeStageRPC: StepStage, NodePublishRPC: StepPublish,
	NodeUnpublishRPC: StepUnpublish, NodeUnstageRPC: StepUnstage, ControllerUnpublishRPC: StepDetach,
}

// Step is the step that the call is; empty: it is none of an alloc's.
func (r RPC) Step() Step { return steps[r] }

// Wait is what one request of an alloc waits for, and why: for people.
type Wait struct {
	Alloc   AllocID     `json:"alloc,omitempty"`
	Request RequestName `json:"request,omitempty"`
	Volume  VolumeName  `json:"volume,omitzero"`
	Step    Step        `json:"step,omitempty"`    // that does not get on; empty: it is not one step
	For     string      `json:"for,omitempty"`     // for whom or what: the holders of a volume, a plugin, what else is under way
	RPC     RPC         `json:"rpc,omitempty"`     // the call that did not end well; empty: none was sent
	Code    string      `json:"code,omitempty"`    // its gRPC code, by name; empty with an RPC: no answer
	Detail  string      `json:"detail,omitempty"`  // what the driver said: bounded and redacted
	Attempt uint64      `json:"attempt,omitempty"` // tries so far
	Since   time.Time   `json:"since,omitzero"`
	Next    time.Time   `json:"next,omitzero"`    // when it is tried again; zero: as soon as what it waits for is there
	Advice  string      `json:"advice,omitempty"` // what a person may do
}

// Waits is what an open call holds up.
func (i Intent) Waits() Wait {
	return Wait{
		Alloc: i.Alloc, Request: i.Request, Volume: i.Name, Step: i.RPC.Step(), For: "plugin " + string(i.Volume.Plugin), RPC: i.RPC,
		Code: i.Code, Detail: i.Detail, Attempt: i.Attempt, Since: i.Since, Next: i.Next,
	}
}

// String is the wait in one line, without its times.
func (w Wait) String() string {
	var s []string
	if w.Volume.ID != "" {
		s = append(s, "volume "+string(w.Volume.ID))
	}
	if w.Step != "" {
		s = append(s, "waits for its "+string(w.Step))
	}
	if w.For != "" {
		s = append(s, "for "+w.For)
	}
	line := strings.Join(s, " ")
	if w.RPC != "" {
		line = fmt.Sprintf("%s: %s (try %d): %s", line, w.RPC, w.Attempt, w.said())
	} else if w.Detail != "" {
		line = strings.TrimPrefix(line+": "+w.Detail, ": ")
	}
	return line
}

func (w Wait) said() string {
	switch {
	case w.Code != "":
		return w.Code + ": " + w.Detail
	case w.Detail != "":
		return "no answer: " + w.Detail
	}
	return "no answer yet"
}

// Waits is a list of waits in one line.
func Waits(list []Wait) string {
	lines := make([]string, len(list))
	for i, w := range list {
		lines[i] = w.String()
	}
	return strings.Join(lines, "; ")
}
