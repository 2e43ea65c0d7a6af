package wire

import (
	"context"
	"errors"
	"slices"
	"strings"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

// codeOf lists the gRPC code of each of registry.Kinds, in their order.
var codeOf = []codes.Code{
	codes.InvalidArgument,    // ErrInvalid
	codes.NotFound,           // ErrNotFound
	codes.FailedPrecondition, // ErrConflict
	codes.AlreadyExists,      // ErrExists
	codes.Unavailable,        // ErrUnavailable
	codes.Aborted,            // ErrUncertain
	codes.Unimplemented,      // ErrUnsupported
	codes.ResourceExhausted,  // ErrExhausted
	codes.FailedPrecondition, // ErrFenced
	codes.PermissionDenied,   // ErrDenied
	codes.DataLoss,           // ErrDamaged
	codes.Internal,           // ErrInternal
}

// maxText bounds an error's text on the wire, in bytes.
const maxText = 16 << 10

// Status returns err as a gRPC status that carries its kind. A status passes through; nil stays nil.
func Status(err error) error {
	if err == nil {
		return nil
	}
	if _, is := status.FromError(err); is {
		return err
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return withDetail(codes.DeadlineExceeded, err)
	case errors.Is(err, context.Canceled):
		return withDetail(codes.Canceled, err)
	}
	if at := kindIndex(err); at >= 0 {
		return withDetail(codeOf[at], err)
	}
	return withDetail(codes.Unknown, err)
}

func withDetail(code codes.Code, err error) error {
	detail := &pb.ErrorDetail{Kind: Kind(err)}
	if call, ok := errors.AsType[*registry.CallError](err); ok {
		detail.Call = &pb.CallFailure{
			Rpc: text(string(call.RPC)), Instance: InstanceKeyProto(call.Instance), Code: text(call.Code),
			Outcome: string(call.Outcome), Detail: text(call.Detail),
		}
	}
	st, failed := status.New(code, text(err.Error())).WithDetails(protoadapt.MessageV1Of(detail))
	if failed != nil {
		return status.Error(code, text(err.Error()))
	}
	return st.Err()
}

// Error returns the error that a status carries, with its kind. Without a kind, the code selects one. Errors of the
// transport become ErrUnavailable. Context errors are preserved.
func Error(err error) error {
	if err == nil {
		return nil
	}
	st, is := status.FromError(err)
	if !is {
		return err
	}
	for _, d := range st.Details() {
		if detail, ok := d.(*pb.ErrorDetail); ok {
			return fromDetail(st, detail)
		}
	}
	switch st.Code() {
	case codes.DeadlineExceeded:
		return registry.Errorf(context.DeadlineExceeded, "%s", st.Message())
	case codes.Canceled:
		return registry.Errorf(context.Canceled, "%s", st.Message())
	case codes.Unknown:
		return registry.Errorf(registry.ErrInternal, "%s", st.Message())
	}
	if at := slices.Index(codeOf, st.Code()); at >= 0 {
		return registry.Errorf(registry.Kinds[at], "%s", st.Message())
	}
	return registry.Errorf(registry.ErrInternal, "%s: %s", st.Code(), st.Message())
}

func fromDetail(st *status.Status, detail *pb.ErrorDetail) error {
	kind, known := KindError(detail.Kind)
	switch {
	case known:
	case st.Code() == codes.DeadlineExceeded:
		kind = context.DeadlineExceeded
	case st.Code() == codes.Canceled:
		kind = context.Canceled
	}
	if detail.Call == nil {
		return registry.Errorf(kind, "%s", st.Message())
	}
	call := &registry.CallError{
		RPC: registry.RPC(detail.Call.Rpc), Instance: InstanceKey(detail.Call.Instance), Code: detail.Call.Code,
		Outcome: registry.Outcome(detail.Call.Outcome), Detail: detail.Call.Detail, Kind: kind,
	}
	return &callText{text: st.Message(), call: call}
}

// callText is a call's error with the text that the peer put around it.
type callText struct {
	text string
	call *registry.CallError
}

func (e *callText) Error() string { return e.text }
func (e *callText) Unwrap() error { return e.call }

// kindIndex returns the index of err's kind in registry.Kinds, or -1. ErrUncertain takes precedence over other kinds.
func kindIndex(err error) int {
	if errors.Is(err, registry.ErrUncertain) {
		return slices.Index(registry.Kinds, registry.ErrUncertain)
	}
	return slices.IndexFunc(registry.Kinds, func(kind error) bool { return errors.Is(err, kind) })
}

// text returns s as valid UTF-8 of at most maxText bytes.
func text(s string) string {
	if len(s) > maxText {
		s = s[:maxText] + "…"
	}
	if !utf8.ValidString(s) {
		s = strings.ToValidUTF8(s, "\uFFFD")
	}
	return s
}

// Kind returns the number of err's kind on the wire.
func Kind(err error) pb.ErrorKind { return pb.ErrorKind(kindIndex(err) + 1) }

// KindError returns the kind of error with that number. An unknown number is ErrInternal.
func KindError(k pb.ErrorKind) (kind error, known bool) {
	if at := int(k) - 1; at >= 0 && at < len(registry.Kinds) {
		return registry.Kinds[at], true
	}
	return registry.ErrInternal, false
}
