package driver

import (
	"cmp"
	"slices"
	"strings"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/registry"
)

// maxDetail bounds what is kept of a plugin's error text, in bytes.
const maxDetail = 1 << 10

// verdict is what a gRPC code says of a call: whether it may still take effect, and what kind of error it is.
type verdict struct {
	outcome registry.Outcome
	kind    error
}

// verdicts is by code (CSI spec "Error Scheme"). UNKNOWN, INTERNAL and DATA_LOSS count as uncertain: nothing says that what failed so was
// not applied, and a recovered panic answers so.
var verdicts = map[codes.Code]verdict{
	codes.Canceled:           {registry.OutcomeUncertain, registry.ErrUnavailable},
	codes.Unknown:            {registry.OutcomeUncertain, registry.ErrInternal},
	codes.InvalidArgument:    {registry.OutcomeFailed, registry.ErrInvalid},
	codes.DeadlineExceeded:   {registry.OutcomeUncertain, registry.ErrUnavailable},
	codes.NotFound:           {registry.OutcomeFailed, registry.ErrNotFound},
	codes.AlreadyExists:      {registry.OutcomeFailed, registry.ErrExists},
	codes.PermissionDenied:   {registry.OutcomeFailed, registry.ErrDenied},
	codes.ResourceExhausted:  {registry.OutcomeUncertain, registry.ErrExhausted},
	codes.FailedPrecondition: {registry.OutcomeFailed, registry.ErrConflict},
	codes.Aborted:            {registry.OutcomeUncertain, registry.ErrUnavailable},
	codes.OutOfRange:         {registry.OutcomeFailed, registry.ErrInvalid},
	codes.Unimplemented:      {registry.OutcomeFailed, registry.ErrUnsupported},
	codes.Internal:           {registry.OutcomeUncertain, registry.ErrInternal},
	codes.Unavailable:        {registry.OutcomeUncertain, registry.ErrUnavailable},
	codes.DataLoss:           {registry.OutcomeUncertain, registry.ErrInternal},
	codes.Unauthenticated:    {registry.OutcomeFailed, registry.ErrDenied},
}

// names of the codes as the CSI spec writes them.
var names = map[codes.Code]string{
	codes.Canceled: "CANCELLED", codes.Unknown: "UNKNOWN", codes.InvalidArgument: "INVALID_ARGUMENT", codes.DeadlineExceeded: "DEADLINE_EXCEEDED",
	codes.NotFound: "NOT_FOUND", codes.AlreadyExists: "ALREADY_EXISTS", codes.PermissionDenied: "PERMISSION_DENIED",
	codes.ResourceExhausted: "RESOURCE_EXHAUSTED", codes.FailedPrecondition: "FAILED_PRECONDITION", codes.Aborted: "ABORTED",
	codes.OutOfRange: "OUT_OF_RANGE", codes.Unimplemented: "UNIMPLEMENTED", codes.Internal: "INTERNAL", codes.Unavailable: "UNAVAILABLE",
	codes.DataLoss: "DATA_LOSS", codes.Unauthenticated: "UNAUTHENTICATED",
}

// failure is err, of a call to the instance, as everybody else knows it; nil stays nil. What is in hide does not appear in its text.
func failure(rpc registry.RPC, at registry.InstanceKey, err error, hide []string) error {
	if err == nil {
		return nil
	}
	st, isStatus := status.FromError(err)
	v, known := verdicts[st.Code()]
	if !isStatus || !known {
		v = verdict{registry.OutcomeUncertain, registry.ErrInternal}
	}
	out := &registry.CallError{RPC: rpc, Instance: at, Outcome: v.outcome, Kind: v.kind, Detail: Redact(err.Error(), hide)}
	if isStatus {
		out.Code, out.Detail = cmp.Or(names[st.Code()], "UNKNOWN"), Redact(st.Message(), hide)
	}
	return out
}

// hidden collects what must not appear in texts: the values of secrets, mount flags, and the values of both contexts.
func hidden(secrets map[string]registry.SecretValue, flags registry.Flags, contexts ...map[string]string) []string {
	var out []string
	for _, v := range secrets {
		out = append(out, v.Reveal())
	}
	out = append(out, flags.List()...)
	for _, c := range contexts {
		for _, v := range c {
			out = append(out, v)
		}
	}
	return out
}

// shortest is what a value must be long, in bytes, to be hidden: a flag such as "ro" or a value "1" would blot out everything else.
const shortest = 4

// Redact is s as it may be shown: bounded, printable, one line, and without the values in hide.
func Redact(s string, hide []string) string {
	hide = slices.SortedFunc(slices.Values(hide), func(x, y string) int { return len(y) - len(x) })
	for _, value := range hide {
		if len(value) >= shortest {
			s = strings.ReplaceAll(s, value, "***")
		}
	}
	if len(s) > maxDetail {
		s = s[:maxDetail] + "…"
	}
	if !utf8.ValidString(s) {
		s = strings.ToValidUTF8(s, "\uFFFD")
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 || r == '\u2028' || r == '\u2029' {
			return ' '
		}
		return r
	}, s)
}
