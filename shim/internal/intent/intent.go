package intent

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"holdfast/registry"
)

// undo is the call that takes back what another one did. CreateVolume has none here: it is repeated first, which tells the id.
var undo = map[registry.RPC]registry.RPC{
	registry.ControllerPublishRPC: registry.ControllerUnpublishRPC,
	registry.NodeStageRPC:         registry.NodeUnstageRPC,
	registry.NodePublishRPC:       registry.NodeUnpublishRPC,
}

// Legal is nil if next may be sent for a volume whose intent open is open, else an ErrConflict that names the uncertain call.
func Legal(open, next registry.Intent) error {
	if same(open, next) || undo[open.RPC] == next.RPC && open.Alloc == next.Alloc && open.Request == next.Request {
		return nil
	}
	return registry.Errorf(registry.ErrConflict, "%s of %s cannot be sent now: %s", next.RPC, next.Name, Describe(open))
}

// MayRun says whether a call is likely to run at its plugin still: it has not been answered, or so that it does.
func MayRun(open registry.Intent) bool {
	return open.Outcome == registry.OutcomePending || open.Code == "ABORTED"
}

// Hasty says whether the undo of an open call would be sent while that one is likely to run. Of two different calls at once for one volume nobody knows
// which has the last word (CSI spec, "Concurrency"). A call that its own caller has called off is open as such.
func Hasty(open registry.Intent) bool { return undo[open.RPC] != "" && MayRun(open) }

// same says whether next is the call of open once more.
func same(open, next registry.Intent) bool { return open.RPC == next.RPC && open.Hash == next.Hash }

// Describe says for people which call is open, for whom, since when, and what may be done.
func Describe(open registry.Intent) string {
	s := fmt.Sprintf("%s of %s", open.RPC, open.Name)
	if open.Alloc != "" {
		s += fmt.Sprintf(" for alloc %s as %q", open.Alloc, open.Request)
	}
	s += fmt.Sprintf(" has no certain answer since %s (attempt %d", open.Since.UTC().Format(time.RFC3339), open.Attempt)
	if open.Detail != "" {
		s += ", " + strings.TrimPrefix(open.Code+": "+open.Detail, ": ")
	}
	s += "); until it has one, only the same call again"
	if back := undo[open.RPC]; back != "" {
		s += " or " + string(back)
	}
	return s + " is legal"
}

// Hash is the hash of a request: of the JSON forms of its parts. Secrets and the paths that only one instance knows are not part
// of that form, so that a request is the same one after a secret was rotated or the plugin was updated.
func Hash(rpc registry.RPC, parts ...any) string {
	sum := sha256.New()
	enc := json.NewEncoder(sum)
	for _, part := range append([]any{rpc}, parts...) {
		if err := enc.Encode(part); err != nil {
			panic(fmt.Sprintf("intent: a request that has no JSON form: %v", err)) // requests are plain data
		}
	}
	return hex.EncodeToString(sum.Sum(nil))
}

// Event is an event that tells what became of the call of i.
func Event(kind registry.EventKind, i registry.Intent, at time.Time) registry.Event {
	e := registry.Event{
		Kind: kind, Role: RoleOf(i.RPC), Plugin: i.Volume.Plugin, Alloc: i.Alloc, Volume: i.Name, External: i.Volume.External,
		Request: i.Request, Cause: registry.Cause(i.RPC), At: at,
	}
	if i.RPC == registry.CreateVolumeRPC {
		e.External = "" // not known before it is done
	}
	return e
}

// RoleOf is the role of a plugin that serves a call.
func RoleOf(rpc registry.RPC) registry.Role {
	if strings.HasPrefix(string(rpc), "Node") {
		return registry.RoleNode
	}
	return registry.RoleController
}

// answers says whether a code is the plugin's own word on the call. The others may come of a call that never reached it.
func answers(code string) bool {
	switch code {
	case "", "CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE":
		return false
	}
	return true
}

// Answers says whether a code is the plugin's own word on the call.
func Answers(code string) bool { return answers(code) }

// Vague says whether a code does not say whether the call had an effect.
func Vague(code string) bool {
	row, known := common[code]
	return !known || row.Outcome == registry.OutcomeUncertain
}

// Silent says whether a code is of a plugin that did not look at the volume: it says nothing of what an earlier try has done.
func Silent(code string) bool {
	switch code {
	case "PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED":
		return true
	}
	return false
}

// Settled is nil if the error of a call says that it has come to a certain end, whichever: it does not run any more.
func Settled(err error) error {
	if call, ok := errors.AsType[*registry.CallError](err); ok && call.Outcome == registry.OutcomeFailed && !errors.Is(err, registry.ErrUncertain) {
		return nil
	}
	return err
}

// maxDetail bounds a stored error text that is not a plugin's, in bytes.
const maxDetail = 1024

// judge makes a CallError of whatever a call returned. What is not known to have failed is uncertain.
func judge(rpc registry.RPC, err error) *registry.CallError {
	if err == nil {
		return nil
	}
	if call, ok := errors.AsType[*registry.CallError](err); ok {
		judged := *call
		if judged.Outcome != registry.OutcomeFailed {
			judged.Outcome = registry.OutcomeUncertain
		}
		return &judged
	}
	call := &registry.CallError{RPC: rpc, Outcome: registry.OutcomeUncertain, Kind: registry.ErrUncertain, Detail: err.Error()}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		call.Code = "DEADLINE_EXCEEDED"
	case errors.Is(err, context.Canceled):
		call.Code = "CANCELLED"
	case errors.Is(err, registry.ErrUnavailable):
		call.Code = "UNAVAILABLE"
	}
	if len(call.Detail) > maxDetail {
		call.Detail = strings.ToValidUTF8(call.Detail[:maxDetail], "")
	}
	return call
}
