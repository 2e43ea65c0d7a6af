package registry

import (
	"errors"
	"fmt"
)

// CodeUnreadable is the CallError.Code of a response that cannot be decoded: it is too large, of another message type,
// or has text that is not UTF-8. The plugin has acted. gRPC reports RESOURCE_EXHAUSTED or INTERNAL for it, which
// plugins also return for other reasons.
const CodeUnreadable = "UNREADABLE"

// CallError is a failed CSI call. Package csi creates it. No code depends on its text.
type CallError struct {
	RPC      RPC         `json:"rpc"`
	Instance InstanceKey `json:"instance"`
	// gRPC code by name, "UNAVAILABLE", or CodeUnreadable; empty: no gRPC answer at all
	Code    string  `json:"code"`
	Outcome Outcome `json:"outcome"` // OutcomeFailed or OutcomeUncertain
	Attempt uint64  `json:"attempt"` // tries so far, with this one; 0: not counted
	Detail  string  `json:"detail"`  // the plugin's message, bounded and redacted, for people
	Kind    error   `json:"-"`       // one of Kinds
	Lost    bool    `json:"-"`       // the connection was lost after the request was sent
}

func (e *CallError) Error() string {
	by := "plugin " + string(e.Instance.Plugin)
	if alloc := string(e.Instance.Alloc); alloc != "" {
		by += " (alloc " + alloc[:min(8, len(alloc))] + ")"
	}
	switch {
	case e.Instance.Plugin == "" && e.Code == "":
		return fmt.Sprintf("%s got no answer: %s", e.RPC, e.Detail)
	case e.Instance.Plugin == "": // it was not sent
		return fmt.Sprintf("%s: %s: %s", e.RPC, e.Code, e.Detail)
	case e.Code == "":
		return fmt.Sprintf("%s: %s got no answer: %s", by, e.RPC, e.Detail)
	}
	return fmt.Sprintf("%s: %s failed: %s: %s", by, e.RPC, e.Code, e.Detail)
}

// Is reports true for the kind, and for ErrUncertain if the outcome is unknown.
func (e *CallError) Is(target error) bool {
	return target == e.Kind || target == ErrUncertain && e.Outcome == OutcomeUncertain
}

// NoAnswer reports whether err says that the plugin cannot be reached or did not answer in time. Any other error of a
// call concerns one volume.
func NoAnswer(err error) bool {
	call, found := errors.AsType[*CallError](err)
	return found && (call.Code == "UNAVAILABLE" || call.Code == "DEADLINE_EXCEEDED")
}
