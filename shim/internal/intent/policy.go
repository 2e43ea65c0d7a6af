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
	Advice  string           // what a person may do about it
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

// PolicyOf is the policy of an RPC. One that has none gets that of NodePublishVolume.
func PolicyOf(rpc registry.RPC) Policy {
	if p, known := Policies[rpc]; known {
		return p
	}
	return Policies[registry.NodePublishRPC]
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
	if open.Code == "" && open.Detail == "" {
		w.Advice = fmt.Sprintf("wait: the plugin has %.0f minutes to answer, and is asked again then", policy.Deadline.Minutes())
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

// common is what holds for every call that changes something (CSI spec, "Error Scheme"). Nothing says that what ended with UNKNOWN, INTERNAL or
// DATA_LOSS was not applied, and a recovered panic answers so; RESOURCE_EXHAUSTED is also what an answer over the size limit looks like, and
// the plugin has acted by then.
var common = map[string]Row{
	"":                    uncertain(few, "look at the plugin's logs: its connection breaks"),
	"CANCELLED":           uncertain(few, "nothing: it was called off, and is sent again or undone"),
	"DEADLINE_EXCEEDED":   uncertain(Forever, "wait, or look at the plugin's logs: it does not answer in time"),
	"UNAVAILABLE":         uncertain(Forever, "wait, or look at the plugin: it cannot be reached, or its storage cannot"),
	"ABORTED":             uncertain(Forever, "wait: the plugin says that another operation is pending for the volume"),
	"RESOURCE_EXHAUSTED":  uncertain(Forever, "make room at the plugin's storage or on this node"),
	"UNKNOWN":             uncertain(few, "look at the plugin's logs"),
	"INTERNAL":            uncertain(few, "look at the plugin's logs"),
	"DATA_LOSS":           uncertain(few, "look at the plugin's storage: it says that data is lost"),
	"INVALID_ARGUMENT":    failed(1, "change the volume or the request for it: the plugin refuses it as it is"),
	"NOT_FOUND":           failed(few, "check that the volume still exists at the plugin"),
	"ALREADY_EXISTS":      failed(1, "the volume is in use in another way at the plugin: use it alike, or end the other use"),
	"PERMISSION_DENIED":   failed(1, "give the plugin, or the secrets of the volume, the right to do this"),
	"FAILED_PRECONDITION": failed(1, "do what the plugin asks for; it refuses until then"),
	"OUT_OF_RANGE":        failed(1, "ask for another size"),
	"UNIMPLEMENTED":       failed(1, "use a plugin that can do this: this one announced it, and cannot"),
	"OK":                  failed(1, "look at the plugin: it says to have done what it has not, or answers what cannot be used"),
	"UNAUTHENTICATED":     failed(few, "correct the volume's secrets: the plugin refuses them"),
}

// Policies is the retry table: per RPC what differs from common.
var Policies = map[registry.RPC]Policy{
	// A person waits for it, and another request may fit where this one does not.
	registry.CreateVolumeRPC: {5 * time.Minute, rows(slow, map[string]Row{
		"RESOURCE_EXHAUSTED": uncertain(few, "make room at the plugin's storage, or ask for less or elsewhere"),
		"NOT_FOUND":          failed(1, "check that the snapshot or volume that it is to be made of exists"),
		"ALREADY_EXISTS":     failed(1, "another volume of that name exists at the plugin: change the name, or ask for the same"),
	})},
	registry.DeleteVolumeRPC: {5 * time.Minute, rows(slow, map[string]Row{
		"NOT_FOUND":           failed(1, "nothing: it is gone, which is what was asked for"),
		"FAILED_PRECONDITION": failed(1, "end what uses the volume at the plugin: snapshots, clones, other nodes"),
	})},
	registry.ControllerPublishRPC: {2 * time.Minute, rows(slow, map[string]Row{
		"NOT_FOUND":           failed(few, "check that the plugin knows the volume and this node"),
		"RESOURCE_EXHAUSTED":  uncertain(few, "release another volume on this node: the plugin attaches no more, or place the alloc elsewhere"),
		"FAILED_PRECONDITION": failed(Forever, "wait until the volume is released on the other node, or release it there"),
	})},
	registry.ControllerUnpublishRPC: {2 * time.Minute, rows(slow, map[string]Row{
		"NOT_FOUND": failed(1, "check that the plugin knows the volume and the node; if it is gone for good, deregister it by `holdfast doctor`"),
	})},
	registry.NodeStageRPC: {5 * time.Minute, rows(quick, nil)}, // may make a file system
	registry.NodeUnstageRPC: {2 * time.Minute, rows(quick, map[string]Row{
		"NOT_FOUND": failed(1, "look at what is still mounted there: the plugin does not know the volume any more"),
	})},
	registry.NodePublishRPC: {2 * time.Minute, rows(quick, nil)},
	registry.NodeUnpublishRPC: {2 * time.Minute, rows(quick, map[string]Row{
		"NOT_FOUND": failed(1, "look at what is still mounted there: the plugin does not know the volume any more"),
	})},
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

// Delay is the wait after the try of that number, which counts from 1: between half and all of First*2^(try-1), at most Max.
// random is in [0, 1).
func (b Backoff) Delay(try uint64, random float64) time.Duration {
	full := b.Max
	if try = max(try, 1); try <= 62 && b.First <= b.Max>>(try-1) {
		full = b.First << (try - 1)
	}
	return full - time.Duration(random*float64(full)/2)
}
