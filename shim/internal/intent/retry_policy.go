package intent

import (
	"fmt"
	"maps"
	"math"
	"time"

	"holdfast/registry"
)

// Forever is the number of tries of what is tried until the caller's context ends.
const Forever = math.MaxInt

// Policy says how one RPC is sent and sent again.
type Policy struct {
	Deadline time.Duration  // of one try
	Rows     map[string]Row // by gRPC code, by name; "" is no gRPC answer at all
}

// Row says what is done about one answer.
type Row struct {
	Outcome registry.Outcome // what the answer says of the call: OutcomeFailed or OutcomeUncertain
	Tries   int              // how often the call is sent at most that is answered so; 0: once
	Backoff Backoff          // between two tries
	Advice  string           // for people: what it means, and what they may do about it
}

// Row is what is done about a code. One that gRPC does not have is treated as UNKNOWN.
func (p Policy) Row(code string) Row {
	row, known := p.Rows[code]
	if !known {
		row = p.Rows["UNKNOWN"]
	}
	row.Tries = max(row.Tries, 1)
	return row
}

// PolicyOf returns the policy of an RPC. Policies has one for each RPC of this build. For an RPC of a newer build,
// which the state file may name, the policy takes every answer as uncertain and allows no second try.
func PolicyOf(rpc registry.RPC) Policy {
	if p, known := Policies[rpc]; known {
		return p
	}
	return unknownRPC
}

// OutcomeOf is what an answer says of a call.
func OutcomeOf(rpc registry.RPC, code string) registry.Outcome {
	return PolicyOf(rpc).Row(code).Outcome
}

// Advice is what a person may do about an answer; empty: there is none yet.
func Advice(rpc registry.RPC, code string) string {
	if code == "" {
		return ""
	}
	return PolicyOf(rpc).Row(code).Advice
}

// Waits is what an open call holds up, and what a person may do about it.
func Waits(open registry.Intent) registry.Wait {
	w, policy := open.Waits(), PolicyOf(open.RPC)
	w.Advice = policy.Row(open.Code).Advice
	if open.Outcome == registry.OutcomePending && open.Code == "CANCELLED" {
		w.Code, w.Detail = "", "" // that was our word: the plugin has not said anything yet
	}
	if w.Code == "" && w.Detail == "" {
		w.Advice = fmt.Sprintf("the plugin has not answered yet; it has %.0f minutes, and is asked again then",
			policy.Deadline.Minutes())
	}
	return w
}

// few is for codes that a driver's plain error or recovered panic produces: they may pass, but rarely do by themselves.
const few = 3

var (
	quick = Backoff{First: 200 * time.Millisecond, Max: 30 * time.Second}
	slow  = Backoff{First: time.Second, Max: time.Minute}
)

func failed(tries int, advice string) Row { return Row{registry.OutcomeFailed, tries, quick, advice} }
func uncertain(tries int, advice string) Row {
	return Row{registry.OutcomeUncertain, tries, quick, advice}
}

// with is the row with another back-off.
func (r Row) with(b Backoff) Row {
	r.Backoff = b
	return r
}

// common is what holds for every call that changes something (CSI spec, "Error Scheme"). Nothing says that what ended
// with UNKNOWN, INTERNAL or DATA_LOSS was not applied, and a recovered panic answers so; RESOURCE_EXHAUSTED is also
// what a plugin's own limit on the size of its answers looks like, and the plugin has acted by then, as it has where
// its answer cannot be read.
var common = map[string]Row{
	"":                    uncertain(few, "the connection to the plugin broke during the call: see in its log whether it crashes"),
	"CANCELLED":           uncertain(few, "cancelled by the client; Holdfast repeats or undoes the call"),
	"DEADLINE_EXCEEDED":   uncertain(Forever, "the plugin does not answer in time: it or its storage is slow, or hangs"),
	"UNAVAILABLE":         uncertain(Forever, "the plugin cannot be reached, or cannot reach its storage: see that both run"),
	"ABORTED":             uncertain(Forever, "another operation is pending for the volume at the plugin: wait for it"),
	"RESOURCE_EXHAUSTED":  uncertain(Forever, "the plugin's storage, or this node, is full: make room"),
	"UNKNOWN":             uncertain(few, "the plugin failed, and does not say how: its log may"),
	"INTERNAL":            uncertain(few, "something failed inside the plugin: its log should say what"),
	"DATA_LOSS":           uncertain(few, "the plugin says that data is lost: look at its storage before anything else"),
	"INVALID_ARGUMENT":    failed(1, "the plugin refuses the request as it is: change the volume, or what the job asks of it"),
	"NOT_FOUND":           failed(few, "the plugin does not know the volume: see whether it still exists there"),
	"ALREADY_EXISTS":      failed(1, "the plugin has the volume in use in another way: use it alike, or end the other use"),
	"PERMISSION_DENIED":   failed(1, "the plugin, or the volume's secrets, lack the right to do this: grant it"),
	"FAILED_PRECONDITION": failed(1, "the plugin refuses until something else is done: do what it asks for"),
	"OUT_OF_RANGE":        failed(1, "the plugin cannot make that size: ask for another"),
	"UNIMPLEMENTED":       failed(1, "the plugin announced that it can do this, and cannot: use another version, or another plugin"),
	"OK":                  failed(1, "the plugin says that it is done, but it is not, or the answer cannot be used: its log may say why"),
	"UNAUTHENTICATED":     failed(few, "the plugin refuses the volume's secrets: correct them"),

	registry.CodeUnreadable: uncertain(few, "the plugin's answer cannot be read, so it is not known what it did: "+
		"use another version of the plugin"),
}

// unknownRPC is the policy of RPCs that this build does not know.
var unknownRPC = Policy{5 * time.Minute, cautious()}

func cautious() map[string]Row {
	table := map[string]Row{}
	for code := range common {
		table[code] = Row{registry.OutcomeUncertain, 1, slow,
			"this shim does not know the call; continue with the newer shim that sent it"}
	}
	return table
}

// Policies is the retry table: per RPC what differs from common.
var Policies = map[registry.RPC]Policy{
	// A person waits for it, and another request may fit where this one does not.
	registry.CreateVolumeRPC: {5 * time.Minute, rows(slow, map[string]Row{
		"RESOURCE_EXHAUSTED": uncertain(few, "the plugin's storage has no room for it: make some, or ask for less, or elsewhere"),
		"NOT_FOUND":          failed(1, "the plugin does not know what this one is to be made of: see whether it exists there"),
		"ALREADY_EXISTS":     failed(1, "the plugin has another volume of that name: choose another name, or ask for the same"),
		// The plugin has made the volume, and would say the same of it again: the record says so until a person
		// decides.
		registry.CodeUnreadable: failed(1, "the plugin has probably made the volume, and its answer cannot be read: use another version of it"),
	})},
	registry.DeleteVolumeRPC: {5 * time.Minute, rows(slow, map[string]Row{
		"NOT_FOUND":           failed(1, "nothing: it is gone, which is what was asked for"),
		"FAILED_PRECONDITION": failed(1, "something at the plugin uses the volume: end that first (snapshots, clones, other nodes)"),
	})},
	registry.ControllerPublishRPC: {2 * time.Minute, rows(slow, map[string]Row{
		"NOT_FOUND":           failed(few, "the plugin does not know the volume, or this node: see whether both exist there"),
		"RESOURCE_EXHAUSTED":  uncertain(few, "the plugin attaches no more volumes to this node: release one, or place the alloc elsewhere"),
		"FAILED_PRECONDITION": failed(Forever, "the volume is attached elsewhere: wait until it is released there, or release it"),
	})},
	registry.ControllerUnpublishRPC: {2 * time.Minute, rows(slow, map[string]Row{
		"NOT_FOUND": failed(1, "the plugin does not know the volume, or the node, and does not say that it is detached: see there whether it is"),
	})},
	registry.NodeStageRPC:     {5 * time.Minute, rows(quick, nil)}, // may make a file system
	registry.NodeUnstageRPC:   {2 * time.Minute, rows(quick, unmounting())},
	registry.NodePublishRPC:   {2 * time.Minute, rows(quick, nil)},
	registry.NodeUnpublishRPC: {2 * time.Minute, rows(quick, unmounting())},
	registry.ControllerExpandRPC: {2 * time.Minute, rows(slow, expanding(map[string]Row{
		"FAILED_PRECONDITION": failed(few, "the plugin does not expand the volume while it is used: end its jobs, and expand it then"),
		"OUT_OF_RANGE":        failed(1, "the plugin cannot make the volume so large: ask for another size"),
		"RESOURCE_EXHAUSTED":  failed(few, "the plugin's storage has no room for it: make some, or ask for less"),
	}))},
	registry.NodeExpandRPC: {2 * time.Minute, rows(quick, expanding(map[string]Row{
		"FAILED_PRECONDITION": failed(1, "the volume cannot grow while it is mounted as it is: end its jobs; it is tried again at the next mount"),
		"OUT_OF_RANGE":        failed(1, "the node's plugin cannot make the volume so large: its log may say why"),
		"RESOURCE_EXHAUSTED":  failed(few, "this node, or the plugin's storage, is full: make room"),
	}))},
}

// unmounting is what differs for calls that take a mount away. A plugin that has lost its records gives either answer
// each time. The mount is left to a person: only a person knows that nothing uses it.
func unmounting() map[string]Row {
	const byHand = "end what uses the mount and umount it by hand; the rest follows by itself"
	return map[string]Row{
		"NOT_FOUND": failed(1, "the plugin does not know the volume any more, and leaves it mounted: "+byHand),
		"OK": failed(1, "the plugin says that it is done, and has unmounted nothing: its log may say why. "+
			"If it has forgotten the mount, "+byHand),
	}
}

// expanding is what differs for calls that make a volume larger. They have no undo, and nothing stands on them, so one
// that the plugin has answered does not hold up the others for its volume; what it may have done is found out by the
// same call again.
func expanding(differing map[string]Row) map[string]Row {
	differing["UNKNOWN"] = failed(few, "the plugin failed, and does not say how: its log may")
	differing["INTERNAL"] = failed(few, "something failed inside the plugin: its log should say what")
	differing["DATA_LOSS"] = failed(few, "the plugin says that data is lost: look at its storage before anything else")
	differing[registry.CodeUnreadable] = failed(few, "the plugin's answer cannot be read: use another version of it")
	return differing
}

// rows is the common table with that back-off, and with those rows in place of its own.
func rows(b Backoff, differing map[string]Row) map[string]Row {
	table := maps.Clone(common)
	maps.Copy(table, differing)
	for code, row := range table {
		table[code] = row.with(b)
	}
	return table
}

// Once is the policy of a call that is sent once: whoever sends it tries again by himself.
func (p Policy) Once() Policy {
	p.Rows = maps.Clone(p.Rows)
	for code, row := range p.Rows {
		row.Tries = 1
		p.Rows[code] = row
	}
	return p
}

// Backoff is a delay that doubles from try to try and stays at Max.
type Backoff struct{ First, Max time.Duration }

// Delay is the wait after the try of that number, which counts from 1: between half and all of First*2^(try-1), at most
// Max. random is in [0, 1).
func (b Backoff) Delay(try uint64, random float64) time.Duration {
	full := b.Max
	if try = max(try, 1); try <= 62 && b.First <= b.Max>>(try-1) {
		full = b.First << (try - 1)
	}
	return full - time.Duration(random*float64(full)/2)
}
