package csi

import (
	"cmp"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// kinds is what kind of error a gRPC code is (CSI spec "Error Scheme"). What it says of the call is in the retry table (package intent).
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

// names of the codes as the CSI spec writes them.
var names = map[codes.Code]string{
	codes.Canceled: "CANCELLED", codes.Unknown: "UNKNOWN", codes.InvalidArgument: "INVALID_ARGUMENT", codes.DeadlineExceeded: "DEADLINE_EXCEEDED",
	codes.NotFound: "NOT_FOUND", codes.AlreadyExists: "ALREADY_EXISTS", codes.PermissionDenied: "PERMISSION_DENIED",
	codes.ResourceExhausted: "RESOURCE_EXHAUSTED", codes.FailedPrecondition: "FAILED_PRECONDITION", codes.Aborted: "ABORTED",
	codes.OutOfRange: "OUT_OF_RANGE", codes.Unimplemented: "UNIMPLEMENTED", codes.Internal: "INTERNAL", codes.Unavailable: "UNAVAILABLE",
	codes.DataLoss: "DATA_LOSS", codes.Unauthenticated: "UNAUTHENTICATED",
}

// codeName is the code of err by name. A number that gRPC does not have is UNKNOWN, as the gRPC specification asks.
func codeName(err error) string {
	if isUnreadable(err) {
		return registry.CodeUnreadable
	}
	return cmp.Or(names[status.Code(err)], "UNKNOWN")
}

// failure is err, of a call to the instance, as everybody else knows it. A call whose request has not left has failed,
// whatever its code is: it can have no effect. Neither can a call that changes nothing. Secrets in its text are masked.
func failure(rpc registry.RPC, at registry.InstanceKey, err error, left bool, masks *strings.Replacer) *registry.CallError {
	text, kind := judge(err, masks)
	outcome := registry.OutcomeFailed
	if _, changes := intent.Policies[rpc]; changes && left {
		outcome = intent.OutcomeOf(rpc, codeName(err))
	}
	return &registry.CallError{RPC: rpc, Instance: at, Code: codeName(err), Outcome: outcome, Kind: kind, Detail: text}
}

// judge is what err says, and its kind.
func judge(err error, masks *strings.Replacer) (text string, kind error) {
	st := status.Convert(err)
	kind, known := kinds[st.Code()]
	if !known || isUnreadable(err) {
		kind = registry.ErrInternal
	}
	return Redact(st.Message(), masks), kind
}
