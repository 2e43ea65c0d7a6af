package csi

import (
	"fmt"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// kinds maps gRPC codes to kinds of error (CSI spec "Error Scheme"). Package intent has the retry table.
var kinds = map[codes.Code]error{
	codes.Canceled:           registry.ErrUnavailable,
	codes.Unknown:            registry.ErrInternal,
	codes.InvalidArgument:    registry.ErrInvalid,
	codes.DeadlineExceeded:   registry.ErrUnavailable,
	codes.NotFound:           registry.ErrNotFound,
	codes.AlreadyExists:      registry.ErrExists,
	codes.PermissionDenied:   registry.ErrDenied,
	codes.ResourceExhausted:  registry.ErrExhausted,
	codes.FailedPrecondition: registry.ErrConflict,
	codes.Aborted:            registry.ErrUnavailable,
	codes.OutOfRange:         registry.ErrInvalid,
	codes.Unimplemented:      registry.ErrUnsupported,
	codes.Internal:           registry.ErrInternal,
	codes.Unavailable:        registry.ErrUnavailable,
	codes.DataLoss:           registry.ErrInternal,
	codes.Unauthenticated:    registry.ErrDenied,
}

// codeName returns the code of err as the CSI spec writes it. A number that gRPC does not define is UNKNOWN, as the
// gRPC specification demands.
func codeName(err error) string {
	c := status.Code(err)
	if isUnreadable(err) {
		return registry.CodeUnreadable
	}
	if _, known := kinds[c]; !known {
		c = codes.Unknown
	}
	return code.Code_name[int32(c)]
}

// failure returns the error of a call to the instance. The outcome is failed, whatever the code, if the call was not
// sent or changes nothing: then it can have no effect.
func failure(rpc registry.RPC, at registry.InstanceKey, err error, t *callTrace, r redactor) *registry.CallError {
	text, kind := classify(err, r)
	sent := t.sent.Load()
	outcome := registry.OutcomeFailed
	if _, changes := intent.Policies[rpc]; changes && sent {
		outcome = intent.OutcomeOf(rpc, codeName(err))
	}
	return &registry.CallError{
		RPC: rpc, Instance: at, Code: codeName(err), Outcome: outcome, Kind: kind, Detail: text,
		Lost: sent && !t.answered.Load() && status.Code(err) == codes.Unavailable,
	}
}

// AnswerError returns the error of a call that the plugin has answered with OK, although the answer cannot be right.
func AnswerError(rpc registry.RPC, at registry.InstanceKey, format string, args ...any) error {
	return &registry.CallError{
		RPC: rpc, Instance: at, Code: "OK", Outcome: registry.OutcomeFailed, Kind: registry.ErrInternal,
		Detail: fmt.Sprintf(format, args...),
	}
}

// classify returns the redacted text and the kind of a call's error.
func classify(err error, r redactor) (text string, kind error) {
	st := status.Convert(err)
	kind, known := kinds[st.Code()]
	if !known || isUnreadable(err) {
		kind = registry.ErrInternal
	}
	return r.redact(st.Message()), kind
}
