// Package alloc tells the story of an alloc: its volumes are claimed, attached, staged and published before its tasks start, and
// taken back in the opposite order after they have ended.
//
// Allocs owns the one lane per volume: of all that Holdfast does with a volume, at most one thing is under way at any time, whoever
// asked for it (A1. TestOneLanePerVolume). Prepare and Release are an idempotent pair: Release is legal in any state, cancels a Prepare
// that waits, and goes on by itself until everything is taken back, over restarts too (A2. TestReleaseResumes). Nothing is taken down
// later while something earlier failed, and a claim is the last to go (A3. TestDownOrder).
//
// Sync compares them with what the host says is alive. What it does not name is taken down, as if the host had said so.
package alloc
