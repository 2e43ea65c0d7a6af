package intent

import (
	"maps"
	"math"
	"time"

	"holdfast/registry"
)

// Forever is the number of tries of what is tried until the caller's context ends.
const Forever = math.MaxInt

// Policy says how one RPC is tried again.
type Policy struct {
	Deadline time.Duration  // of one try
	Backoff  Backoff        // between two tries
	Retry    map[string]int // by gRPC code: how often it is sent at most; not listed: once
}

// Tries is how often a call is sent at most that ends with code.
func (p Policy) Tries(code string) int { return max(p.Retry[code], 1) }

// PolicyOf is the policy of an RPC.
func PolicyOf(rpc registry.RPC) Policy { return Policies[rpc] }

// few is for codes that a driver's plain error or recovered panic produces: they may pass, but rarely do by themselves.
const few = 3

// usual is what holds for every RPC where Policies has nothing else: INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, OUT_OF_RANGE,
// FAILED_PRECONDITION, PERMISSION_DENIED, UNAUTHENTICATED and UNIMPLEMENTED are returned at once, as the same call gets the same
// answer until someone changes something.
var usual = map[string]int{
	"ABORTED":            Forever, // another call for the volume is pending at the plugin
	"UNAVAILABLE":        Forever,
	"DEADLINE_EXCEEDED":  Forever,
	"RESOURCE_EXHAUSTED": Forever,
	"CANCELLED":          few,
	"UNKNOWN":            few,
	"INTERNAL":           few,
	"DATA_LOSS":          few,
	"":                   few, // no gRPC answer at all
}

// Policies is the retry table.
var Policies = map[registry.RPC]Policy{
	// A person waits for it, and another request may fit where this one does not.
	registry.CreateVolumeRPC:        {5 * time.Minute, slow, but("RESOURCE_EXHAUSTED", few)},
	registry.DeleteVolumeRPC:        {5 * time.Minute, slow, usual},
	registry.ControllerPublishRPC:   {2 * time.Minute, slow, usual},
	registry.ControllerUnpublishRPC: {2 * time.Minute, slow, usual},
	registry.NodeStageRPC:           {5 * time.Minute, quick, usual}, // may make a file system
	registry.NodeUnstageRPC:         {2 * time.Minute, quick, usual},
	registry.NodePublishRPC:         {2 * time.Minute, quick, usual},
	registry.NodeUnpublishRPC:       {2 * time.Minute, quick, usual},
}

var (
	quick = Backoff{First: 200 * time.Millisecond, Max: 30 * time.Second}
	slow  = Backoff{First: time.Second, Max: time.Minute}
)

// but is the usual table with another number of tries for one code.
func but(code string, tries int) map[string]int {
	table := maps.Clone(usual)
	table[code] = tries
	return table
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
