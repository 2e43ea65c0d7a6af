// Package chain lets steps that follow each other share transactions. A step of a chain that has ended well leaves what became of it to be
// written with what the next step has to have written before it begins: result and next intent are one commit, and not two.
//
// Who reads or commits with a context of the chain sees what was left (C1. TestTheChainSeesWhatItLeft). Nobody else does before it is
// written. So what is left must be of no use to others yet: it is written before the lane is left under which it was made, or never (C3.
// TestWhatCannotBeWrittenIsDropped), and within Longest even if no step follows (C2. TestLeftIsWrittenSoon). A process that dies before that
// finds the step's intent open, and repeats a call that was answered, as it would have, had it died a moment earlier. What stands on a
// result but has no intent of its own, as parts of a volume, commits something before it begins.
//
// It may be called from any goroutine. A commit of the chain that is under way holds up who reads with the same context, and nobody else.
package chain
