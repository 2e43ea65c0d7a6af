package registry

import "fmt"

// CodeUnreadable stands in CallError.Code for an answer that came and cannot be read: it is larger than a message may
// be, or is not the message that it has to be, or holds text that is not UTF-8. The plugin has acted. gRPC itself says
// RESOURCE_EXHAUSTED or INTERNAL of that, as a plugin does of other things.
const CodeUnreadable = "UNREADABLE"

// CallError is a CSI call that did not end well. The driver makes it; nobody reads its text for logic.
type CallError struct {
	RPC      RPC         `json:"rpc"`
	Instance InstanceKey `json:"instance"`
	// gRPC code by name, "UNAVAILABLE", or CodeUnreadable; empty: no gRPC answer at all
	Code    string  `json:"code"`
	Outcome Outcome `json:"outcome"` // OutcomeFailed or OutcomeUncertain
	Attempt uint64  `json:"attempt"` // tries so far, with this one; 0: nobody counts
	Detail  string  `json:"detail"`  // what the plugin said: bounded and redacted, for people
	Kind    error   `json:"-"`       // one of Kinds
	Lost    bool    `json:"-"`       // the plugin had the request, and the connection was lost before it answered
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

// Is holds for the kind, and for ErrUncertain when the outcome is not known.
func (e *CallError) Is(target error) bool {
	return target == e.Kind || target == ErrUncertain && e.Outcome == OutcomeUncertain
}
