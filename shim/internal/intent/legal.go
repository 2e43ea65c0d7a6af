package intent

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"holdfast/registry"
)

// undo maps a call to the call that undoes it. CreateVolume has none, because only its repetition returns the external
// id.
var undo = map[registry.RPC]registry.RPC{
	registry.ControllerPublishRPC: registry.ControllerUnpublishRPC,
	registry.NodeStageRPC:         registry.NodeUnstageRPC,
	registry.NodePublishRPC:       registry.NodeUnpublishRPC,
}

// checkLegal returns nil if next may be sent while open is the open intent of the volume: if next repeats or undoes the
// open call. While the open call may still run at a former executor's plugin, its undo has to wait: ErrUnavailable
// names that node. In any other case ErrConflict names the open call.
func checkLegal(executor registry.Executor, open, next registry.Intent) error {
	if repeats(open, next) {
		return nil
	}
	if at, found := executor.FormerAmong(open.Senders); found {
		return registry.Errorf(registry.ErrUnavailable, "%s of %s cannot be sent now: %s", next.RPC, next.Name,
			registry.MayRunAt(at, open.RPC))
	}
	if undo[open.RPC] == next.RPC && open.Alloc == next.Alloc && open.Request == next.Request &&
		open.Node == next.Node {
		return nil
	}
	return registry.Errorf(registry.ErrConflict, "%s of %s cannot be sent now: %s", next.RPC, next.Name, Describe(open))
}

// WithSender returns the senders of a call with the executor that is about to send it. If the executor is empty, the
// call needs none, and the senders stay as they are.
func WithSender(senders []registry.NodeName, executor registry.NodeName) []registry.NodeName {
	if executor == "" || slices.Contains(senders, executor) {
		return senders
	}
	return append(slices.Clone(senders), executor)
}

// WithoutSender returns the senders of a call without the executor, whose plugin has answered it.
func WithoutSender(senders []registry.NodeName, executor registry.NodeName) []registry.NodeName {
	return slices.DeleteFunc(slices.Clone(senders), func(n registry.NodeName) bool { return n == executor })
}

// EndsCall reports whether the error shows that the plugin runs no try of the call any more. The call may have had an
// effect.
func EndsCall(err *registry.CallError) bool {
	return Answers(err.Code) && err.Code != "ABORTED" && !RejectsCall(err.Code)
}

// MayRun reports whether a call probably still runs at its plugin: its outcome is pending, or the last answer was
// ABORTED.
func MayRun(open registry.Intent) bool {
	return open.Outcome == registry.OutcomePending || open.Code == "ABORTED"
}

// UndoOverlaps reports whether an undo sent now would overlap with the open call. The outcome of two concurrent calls
// for one volume is undefined (CSI spec, "Concurrency").
func UndoOverlaps(open registry.Intent) bool { return undo[open.RPC] != "" && MayRun(open) }

// repeats reports whether next repeats the call of open.
func repeats(open, next registry.Intent) bool { return open.RPC == next.RPC && open.Hash == next.Hash }

// Describe returns a text for display: the open call, its alloc, its age, and which calls are legal now.
func Describe(open registry.Intent) string {
	s := fmt.Sprintf("%s of %s", open.RPC, open.Name)
	if open.Alloc != "" {
		s += fmt.Sprintf(" for alloc %s as %q", open.Alloc, open.Request)
	}
	if open.Node != "" {
		s += fmt.Sprintf(" for node %s", open.Node)
	}
	s += fmt.Sprintf(" has had no certain answer since %s (attempt %d", open.Since.UTC().Format(time.RFC3339),
		open.Attempt)
	if open.Detail != "" {
		s += ", " + strings.TrimPrefix(open.Code+": "+open.Detail, ": ")
	}
	s += "); until it has one, only the same call again"
	if back := undo[open.RPC]; back != "" {
		s += " or " + string(back)
	}
	return s + " is legal"
}

// Hash returns a hash of the JSON forms of a request's parts. The parts contain no secrets and no paths of one
// instance, so the hash stays the same after a secret is rotated or the plugin is updated.
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

// Event returns an event about the call of i.
func Event(kind registry.EventKind, i registry.Intent, at time.Time) registry.Event {
	e := registry.Event{
		Kind: kind, Role: RoleOf(i.RPC), Plugin: i.Volume.Plugin, Alloc: i.Alloc, Volume: i.Name,
		External: i.Volume.External,
		Request:  i.Request, Cause: registry.Cause(i.RPC), At: at,
	}
	if i.RPC == registry.CreateVolumeRPC {
		e.External = "" // not known before the call is done
	}
	return e
}

// RoleOf returns the role in which a plugin serves a call.
func RoleOf(rpc registry.RPC) registry.Role {
	if strings.HasPrefix(string(rpc), "Node") {
		return registry.RoleNode
	}
	return registry.RoleController
}

// Answers reports whether a code is certainly the plugin's own answer. gRPC sets the other codes too, also for a call
// that never reached the plugin.
func Answers(code string) bool {
	switch code {
	case "", "CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE":
		return false
	}
	return true
}

// Inconclusive reports whether a code does not say whether the call had an effect.
func Inconclusive(code string) bool {
	row, known := common[code]
	return !known || row.Outcome == registry.OutcomeUncertain
}

// RejectsCall reports whether a plugin that answers with the code has not looked at the volume. Such an answer says
// nothing about the effect of an earlier try.
func RejectsCall(code string) bool {
	switch code {
	case "PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED":
		return true
	}
	return false
}

// UnknownEnd returns the error of an open call whose outcome is no longer awaited. Even if the last answer was certain,
// the error is vague, because a later try may be under way.
func UnknownEnd(open registry.Intent) *registry.CallError {
	unknown := &registry.CallError{RPC: open.RPC, Code: open.Code, Detail: cmp.Or(open.Detail, "it has no answer")}
	if open.Code == "" || !Inconclusive(open.Code) {
		unknown.Code = "UNKNOWN"
	}
	return unknown
}

// Unsettled returns nil if the call has certainly ended: err is nil or a certain failure. Otherwise it returns err.
func Unsettled(err error) error {
	if call, ok := errors.AsType[*registry.CallError](err); ok && call.Outcome == registry.OutcomeFailed &&
		!errors.Is(err, registry.ErrUncertain) {
		return nil
	}
	return err
}

// maxDetail bounds a stored error text that does not come from a plugin, in bytes.
const maxDetail = 1024

// callError converts the error of a call to a CallError. Unless the call has certainly failed, the outcome is
// uncertain.
func callError(rpc registry.RPC, err error) *registry.CallError {
	if err == nil {
		return nil
	}
	if call, ok := errors.AsType[*registry.CallError](err); ok {
		made := *call
		if made.Outcome != registry.OutcomeFailed {
			made.Outcome = registry.OutcomeUncertain
		}
		return &made
	}
	call := &registry.CallError{RPC: rpc, Outcome: registry.OutcomeUncertain, Kind: registry.ErrUncertain,
		Detail: err.Error()}
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
