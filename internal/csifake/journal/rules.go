package journal

import "fmt"

// Rule is one promise that a client of a CSI plugin makes.
type Rule struct {
	ID   string
	Text string
}

// Rules are the rules that Check checks. The numbers come from the project's table of CSI rules.
var Rules = []Rule{
	{"R0", "a journal is readable and has calls in it"},
	{"R1", "capabilities are learnt before anything else, and only advertised RPCs, modes, sources and mount groups " +
		"are used"},
	{"R2", "order up: ControllerPublish OK, NodeStage OK, NodePublish; an ephemeral volume is only published"},
	{"R3", "at most one call in flight per volume, across instances"},
	{"R4", "order down: NodeUnpublish all OK, NodeUnstage OK, ControllerUnpublish OK, DeleteVolume"},
	{"R6", "a retry after an uncertain outcome has identical fields; a modification has values for all parameters of " +
		"the one before"},
	{"R8", "in the end every published target is unpublished, every staged path unstaged, every attachment undone"},
	{"R9", "the staging path is absolute and is a directory as NodeStage arrives"},
	{"R10", "one staging path per volume and node, of that volume alone"},
	{"R11", "target paths are unique; the parent exists and the target does not as NodePublish arrives"},
	{"R12", "staging_target_path is set on NodePublish, stats, health and NodeExpand if and only if the plugin " +
		"stages; volume_path is right"},
	{"R13", "publish_context and volume_context are passed on unchanged"},
	{"R14", "node_id is what NodeGetInfo said, never empty, and at most 256 bytes long"},
	{"R15", "readonly is set on ControllerPublish only with PUBLISH_READONLY"},
	{"R16", "a capability that the plugin did not confirm is not used"},
	{"R17", "a volume of a single-node mode is on one node, and at one target unless many may write; one capability " +
		"for all targets"},
	{"R18", "no field is longer than CSI allows"},
	{"R20", "a plugin whose name breaks the rules gets no volumes"},
	{"R21", "names have no control characters"},
	{"R23", "keys of secrets consist of A-Z, a-z, 0-9, dot, underscore and dash"},
	{"R25", "ControllerUnpublish gets the secrets that ControllerPublish got"},
	{"R26", "topology is asked for only if advertised; a volume goes only to nodes that it can be reached from"},
	{"R28", "no node has more volumes attached than its NodeGetInfo allows"},
	{"R29", "a list continues with a token that the plugin gave"},
	{"R30", "NodeExpand only after ControllerExpand asked for it, to no more than its size, where the volume is " +
		"staged or published, and not again for a mount after FAILED_PRECONDITION; no OFFLINE expansion of a volume " +
		"in use"},
	{"R31", "CSI_ENDPOINT is unix:// and an absolute path that ends in .sock"},
	{"R32", "a group snapshot is read and deleted as a whole, with the ids of all its snapshots; none of them is " +
		"deleted alone"},
	{"R33", "blocks are listed only of snapshots that exist"},
	{"RU", "after an uncertain outcome only the same call or its undo is sent; in the end everything is undone"},
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

// Options say what else is known about the calls in a journal.
type Options struct {
	Settled bool     // everything was taken down: check R8, and that nothing uncertain is left (RU)
	Strict  bool     // R3: while an abandoned call still runs, only the identical request is legal
	ByNode  bool     // R3: several hosts share a volume; see overlap
	Allow   []string // IDs of rules that are not checked
}
