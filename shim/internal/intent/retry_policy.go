package intent

import (
	"context"
	"fmt"
	"maps"
	"math"
	"time"

	"holdfast/registry"
)

// Forever is the Tries of a row without a limit: the call is retried until the caller's context ends.
const Forever = math.MaxInt

// Policy holds the deadline and the retry rules of one RPC.
type Policy struct {
	Deadline time.Duration  // the deadline of one try
	Backoff  Backoff        // the wait between two tries
	Rows     map[string]Row // by the name of the gRPC code; "" means no gRPC answer
	once     bool           // one try whatever the row says
}

// Row says what one answer means and how the call is retried after it.
type Row struct {
	Outcome registry.Outcome // OutcomeFailed or OutcomeUncertain
	Tries   int              // how many calls may get this answer before Send gives up
	Advice  string           // what the answer means and what an operator can do
}

// Row returns the row of a code. An unknown code has the row of UNKNOWN.
func (p Policy) Row(code string) Row {
	row, known := p.Rows[code]
	if !known {
		row = p.Rows["UNKNOWN"]
	}
	if p.once {
		row.Tries = 1
	}
	return row
}

// Once returns the policy with a single try, for a caller that does the retries itself.
func (p Policy) Once() Policy {
	p.once = true
	return p
}

// PolicyOf returns the policy of an RPC. Policies has each RPC of this build, but the state file may name an RPC of a
// newer build. Its policy treats every answer as uncertain and allows one try.
func PolicyOf(rpc registry.RPC) Policy {
	if p, known := Policies[rpc]; known {
		return p
	}
	return unknownRPC
}

// OutcomeOf returns what an answer says about the outcome of a call.
func OutcomeOf(rpc registry.RPC, code string) registry.Outcome {
	return PolicyOf(rpc).Row(code).Outcome
}

// Advice returns what an operator can do about an answer. It is empty before the first answer.
func Advice(rpc registry.RPC, code string) string {
	if code == "" {
		return ""
	}
	return PolicyOf(rpc).Row(code).Advice
}

// Waits returns the wait that an open call causes, with advice for an operator.
func Waits(open registry.Intent) registry.Wait {
	w, policy := open.Waits(), PolicyOf(open.RPC)
	w.Advice = policy.Row(open.Code).Advice
	if open.Outcome == registry.OutcomePending && open.Code == "CANCELLED" {
		w.Code, w.Detail = "", "" // the shim has cancelled the call, so the code is no answer of the plugin
	}
	if w.Code == "" && w.Detail == "" {
		w.Advice = fmt.Sprintf("the plugin has not answered yet; it has %.0f minutes, and is then asked again",
			policy.Deadline.Minutes())
	}
	return w
}

// few is the Tries of codes that a driver returns for a plain error or a recovered panic. Such an error rarely goes
// away by itself.
const few = 3

var (
	quick = Backoff{First: 200 * time.Millisecond, Max: 30 * time.Second}
	slow  = Backoff{First: time.Second, Max: time.Minute}
)

func failed(tries int, advice string) Row    { return Row{registry.OutcomeFailed, tries, advice} }
func uncertain(tries int, advice string) Row { return Row{registry.OutcomeUncertain, tries, advice} }

// common holds the rows for every call that changes something (CSI spec, "Error Scheme"). UNKNOWN, INTERNAL and
// DATA_LOSS do not say that the call had no effect; a recovered panic returns them too. RESOURCE_EXHAUSTED may mean
// that the response was too large, after the call took effect. An unreadable response also comes after the effect.
var common = map[string]Row{
	"": uncertain(few,
		"the connection to the plugin broke during the call: see in its log whether it crashes"),
	"CANCELLED": uncertain(few, "cancelled by the client; Holdfast repeats or undoes the call"),
	"DEADLINE_EXCEEDED": uncertain(Forever,
		"the plugin does not answer in time: it or its storage is slow, or hangs"),
	"UNAVAILABLE": uncertain(Forever,
		"the plugin cannot be reached, or cannot reach its storage: see that both run"),
	"ABORTED":            uncertain(Forever, "another operation is pending for the volume at the plugin: wait for it"),
	"RESOURCE_EXHAUSTED": uncertain(Forever, "the plugin's storage, or this node, is full: make room"),
	"UNKNOWN":            uncertain(few, "the plugin failed, and does not say how: its log may"),
	"INTERNAL":           uncertain(few, "something failed inside the plugin: its log should say what"),
	"DATA_LOSS": uncertain(few,
		"the plugin says that data is lost: look at its storage before anything else"),
	"INVALID_ARGUMENT": failed(1,
		"the plugin refuses the request as it is: change the volume, or what the job asks of it"),
	"NOT_FOUND": failed(few, "the plugin does not know the volume: see whether it still exists there"),
	"ALREADY_EXISTS": failed(1,
		"the plugin has the volume in use in another way: use it in the same way, or end the other use"),
	"PERMISSION_DENIED":   failed(1, "the plugin, or the volume's secrets, lack the right to do this: grant it"),
	"FAILED_PRECONDITION": failed(1, "the plugin refuses until something else is done: do what it asks for"),
	"OUT_OF_RANGE":        failed(1, "the plugin cannot make that size: ask for another"),
	"UNIMPLEMENTED": failed(1,
		"the plugin announced that it can do this, and cannot: use another version, or another plugin"),
	"OK": failed(1,
		"the plugin says that it is done, but it is not, or the answer cannot be used: its log may say why"),
	"UNAUTHENTICATED": failed(few, "the plugin refuses the volume's secrets: correct them"),

	registry.CodeUnreadable: uncertain(few, "the plugin's answer cannot be read, so it is not known what it did: "+
		"use another version of the plugin"),
}

// unknownRPC is the policy of RPCs that this build does not know.
var unknownRPC = Policy{Deadline: 5 * time.Minute, Backoff: slow, Rows: map[string]Row{
	"UNKNOWN": uncertain(1, "this shim does not know the call; continue with the newer shim that sent it"),
}}

// Policies is the retry table. Each RPC lists its differences from common.
var Policies = map[registry.RPC]Policy{
	// A user waits for the call, and a different request may succeed.
	registry.CreateVolumeRPC: policy(5*time.Minute, slow, map[string]Row{
		"RESOURCE_EXHAUSTED": uncertain(few,
			"the plugin's storage has no room for the volume: make room, or ask for less or for another place"),
		"NOT_FOUND": failed(1,
			"the plugin does not know the source of the volume: see whether the source exists there"),
		"ALREADY_EXISTS": failed(1,
			"the plugin has another volume of that name: choose another name, or ask for the same"),
		// The plugin has probably made the volume, and would answer a retry in the same way. The record stays, so that
		// an operator can decide.
		registry.CodeUnreadable: failed(1,
			"the plugin has probably made the volume, and its answer cannot be read: use another version of it"),
	}),
	registry.DeleteVolumeRPC: policy(5*time.Minute, slow, map[string]Row{
		"NOT_FOUND": failed(1, "nothing: it is gone, which is what was asked for"),
		"FAILED_PRECONDITION": failed(1,
			"something at the plugin uses the volume: end that first (snapshots, clones, other nodes)"),
	}),
	registry.CreateSnapshotRPC: policy(5*time.Minute, slow, map[string]Row{
		"NOT_FOUND": failed(1, "the plugin does not know the volume: see whether it still exists there"),
		"ALREADY_EXISTS": failed(1,
			"the plugin has a snapshot of another volume by that name: choose another name"),
		"RESOURCE_EXHAUSTED": uncertain(few, "the plugin's storage has no room for the snapshot: make some"),
	}),
	registry.DeleteSnapshotRPC: policy(5*time.Minute, slow, map[string]Row{
		"NOT_FOUND":           failed(1, "nothing: it is gone, which is what was asked for"),
		"FAILED_PRECONDITION": failed(1, "the plugin needs the snapshot: delete first what was made from it"),
	}),
	registry.CreateGroupSnapshotRPC: policy(5*time.Minute, slow, map[string]Row{
		"NOT_FOUND": failed(1,
			"the plugin does not know one of the volumes: see whether all still exist there"),
		"ALREADY_EXISTS": failed(1,
			"the plugin has a group snapshot of other volumes by that name: choose another name"),
		"FAILED_PRECONDITION": failed(1,
			"the plugin cannot snapshot these volumes together: configure them as it asks for"),
		"RESOURCE_EXHAUSTED": uncertain(few, "the plugin's storage has no room for the snapshots: make some"),
	}),
	registry.DeleteGroupSnapshotRPC: policy(5*time.Minute, slow, map[string]Row{
		"NOT_FOUND": failed(1, "nothing: it is gone, which is what was asked for"),
		"INVALID_ARGUMENT": failed(1,
			"the plugin has other snapshots in the group than Holdfast knows: look at the group there"),
		"FAILED_PRECONDITION": failed(1,
			"the plugin needs a snapshot of the group: delete first what was made from it"),
	}),
	registry.ControllerPublishRPC: policy(2*time.Minute, slow, map[string]Row{
		"NOT_FOUND": failed(few,
			"the plugin does not know the volume, or this node: see whether both exist there"),
		"RESOURCE_EXHAUSTED": uncertain(few,
			"the plugin attaches no more volumes to this node: release one, or place the alloc elsewhere"),
		"FAILED_PRECONDITION": failed(Forever,
			"the volume is attached elsewhere: wait until it is released there, or release it"),
	}),
	registry.ControllerUnpublishRPC: policy(2*time.Minute, slow, map[string]Row{
		"NOT_FOUND": failed(1, "the plugin does not know the volume or the node, and does not say that the "+
			"volume is detached: see there whether it is"),
	}),
	registry.NodeStageRPC:     policy(5*time.Minute, quick, nil), // may make a file system
	registry.NodeUnstageRPC:   policy(2*time.Minute, quick, unmountRows()),
	registry.NodePublishRPC:   policy(2*time.Minute, quick, nil),
	registry.NodeUnpublishRPC: policy(2*time.Minute, quick, unmountRows()),
	registry.ControllerExpandRPC: policy(2*time.Minute, slow, alterRows(map[string]Row{
		"FAILED_PRECONDITION": failed(few,
			"the plugin does not expand the volume while it is used: end its jobs, and expand it then"),
		"OUT_OF_RANGE": failed(1, "the plugin cannot make the volume so large: ask for another size"),
		"RESOURCE_EXHAUSTED": failed(few,
			"the plugin's storage has no room for the larger volume: make room, or ask for less"),
	})),
	registry.ControllerModifyRPC: policy(2*time.Minute, slow, alterRows(map[string]Row{
		"INVALID_ARGUMENT": failed(1,
			"the plugin refuses the parameters: see its documentation for names and values"),
		"RESOURCE_EXHAUSTED": failed(few,
			"the plugin's storage has no room for the change: make room, or ask for less"),
	})),
	registry.NodeExpandRPC: policy(2*time.Minute, quick, alterRows(map[string]Row{
		"FAILED_PRECONDITION": failed(1,
			"the volume cannot grow while it is mounted as it is: end its jobs; it is tried again at the next mount"),
		"OUT_OF_RANGE":       failed(1, "the node's plugin cannot make the volume so large: its log may say why"),
		"RESOURCE_EXHAUSTED": failed(few, "this node, or the plugin's storage, is full: make room"),
	})),
}

// unmountRows returns the rows that differ for calls that remove a mount. A plugin that has lost its records returns
// one of these codes each time. The mount stays, because only an operator can know that it is unused.
func unmountRows() map[string]Row {
	const byHand = "end what uses the mount and umount it by hand; the rest follows by itself"
	return map[string]Row{
		"NOT_FOUND": failed(1, "the plugin does not know the volume any more, and leaves it mounted: "+byHand),
		"OK": failed(1, "the plugin says that it is done, and has unmounted nothing: its log may say why. "+
			"If it has forgotten the mount, "+byHand),
	}
}

// alterRows returns the rows that differ for expansions and modifications. They have no undo, and no other call depends
// on them, so an answered call does not block other calls for its volume. Repeating the call shows whether it took
// effect.
func alterRows(differing map[string]Row) map[string]Row {
	differing["UNKNOWN"] = failed(few, "the plugin failed, and does not say how: its log may")
	differing["INTERNAL"] = failed(few, "something failed inside the plugin: its log should say what")
	differing["DATA_LOSS"] = failed(few, "the plugin says that data is lost: look at its storage before anything else")
	differing[registry.CodeUnreadable] = failed(few, "the plugin's answer cannot be read: use another version of it")
	return differing
}

// policy returns a policy with the common rows and those in differing.
func policy(deadline time.Duration, b Backoff, differing map[string]Row) Policy {
	table := maps.Clone(common)
	maps.Copy(table, differing)
	return Policy{Deadline: deadline, Backoff: b, Rows: table}
}

// Backoff is a delay that doubles with each try up to Max.
type Backoff struct{ First, Max time.Duration }

// Delay returns the wait after a try, counted from 1. It is between half and all of First*2^(try-1), at most Max.
// random is in [0, 1).
func (b Backoff) Delay(try uint64, random float64) time.Duration {
	full := b.Max
	if try = max(try, 1); try <= 62 && b.First <= b.Max>>(try-1) {
		full = b.First << (try - 1)
	}
	return full - time.Duration(random*float64(full)/2)
}

// Sleep waits for d or until ctx ends. It reports whether it waited for d.
func Sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
