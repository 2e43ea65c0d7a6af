package journal

import "fmt"

// Rule is one promise that a client of a CSI plugin makes.
type Rule struct {
	ID   string
	Text string
}

// Rules are those that Check judges. The numbers are those of the project's table of CSI rules.
var Rules = []Rule{
	{"R0", "a journal is readable and has calls in it"},
	{"R1", "capabilities are learnt before anything else, and only advertised RPCs are called"},
	{"R2", "order up: ControllerPublish OK, NodeStage OK, NodePublish"},
	{"R3", "at most one call in flight per volume, across instances"},
	{"R4", "order down: NodeUnpublish all OK, NodeUnstage OK, ControllerUnpublish OK, DeleteVolume"},
	{"R6", "a retry after an uncertain outcome has identical fields"},
	{"R8", "in the end every published target is unpublished, every staged path unstaged, every attachment undone"},
	{"R9", "the staging path is absolute and is a directory as NodeStage arrives"},
	{"R10", "one staging path per volume and node, of that volume alone"},
	{"R11", "target paths are unique; the parent exists and the target does not as NodePublish arrives"},
	{"R12", "staging_target_path is set on NodePublish if and only if the plugin stages"},
	{"R13", "publish_context and volume_context are passed on unchanged"},
	{"R14", "node_id is what NodeGetInfo said, and never empty"},
	{"R15", "readonly is set on ControllerPublish only with PUBLISH_READONLY"},
	{"R19", "no path is longer than the limit that was asked for"},
	{"R30", "NodeExpand only after ControllerExpand asked for it, of a volume that is staged or published"},
	{"RU", "from an uncertain outcome only the same call or its negation; what was sent is undone in the end"},
}

// Violation is one broken rule.
type Violation struct {
	Rule string
	Line int // number of the line in the journal, from 1; 0 is the journal as a whole
	Text string
}

func (v Violation) String() string {
	if v.Line == 0 {
		return fmt.Sprintf("%s: %s", v.Rule, v.Text)
	}
	return fmt.Sprintf("%s: line %d: %s", v.Rule, v.Line, v.Text)
}

// Options say what else is true of the story that a journal tells.
type Options struct {
	Settled bool     // everything was taken down: R8, and nothing uncertain is left (RU)
	Strict  bool     // R3: beside an abandoned call that still runs, only the identical request is legal
	ByNode  bool     // R3: calls of different nodes may overlap, for several hosts that share a volume
	MaxPath int      // R19: longest legal path in bytes; 0 is any
	Empty   bool     // R0: a journal without a call is fine
	Allow   []string // ids of rules that are not judged
}
