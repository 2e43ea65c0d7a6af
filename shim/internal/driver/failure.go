package driver

import (
	"cmp"
	"encoding/base64"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// maxDetail bounds what is kept of a plugin's error text, in bytes.
const maxDetail = 1 << 10

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
func codeName(err error) string { return cmp.Or(names[status.Code(err)], "UNKNOWN") }

// failure is err, of a call to the instance, as everybody else knows it; nil stays nil. A call whose request has not left has failed,
// whatever its code is: it can have no effect. What is in hide does not appear in its text.
func failure(rpc registry.RPC, at registry.InstanceKey, err error, left bool, hide []string) error {
	if err == nil {
		return nil
	}
	text, kind := judge(err, hide)
	outcome := intent.OutcomeOf(rpc, codeName(err))
	if !left {
		outcome = registry.OutcomeFailed
	}
	return &registry.CallError{RPC: rpc, Instance: at, Code: codeName(err), Outcome: outcome, Kind: kind, Detail: text}
}

// judge is what err says, and its kind.
func judge(err error, hide []string) (text string, kind error) {
	st := status.Convert(err)
	kind, known := kinds[st.Code()]
	if !known {
		kind = registry.ErrInternal
	}
	return Redact(st.Message(), hide), kind
}

// Redact is s as it may be shown: bounded, printable, one line, and without the values in hide, also as Go, JSON, base64 and URLs write them.
func Redact(s string, hide []string) string {
	without := strings.NewReplacer(pairs(hide)...)
	s = without.Replace(printable(without.Replace(s)))
	if len(s) > maxDetail {
		s = s[:maxDetail] + "…"
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
}

// pairs is every form of the values, each with what stands for it, the longest first: one may be part of another.
func pairs(values []string) (list []string) {
	var all []string
	for _, v := range values {
		all = append(all, forms(v)...)
	}
	slices.SortFunc(all, func(x, y string) int { return cmp.Or(cmp.Compare(len(y), len(x)), cmp.Compare(x, y)) })
	for _, form := range slices.Compact(all) {
		list = append(list, form, "***")
	}
	return list
}

// forms is how a value may be written.
func forms(v string) []string {
	if v == "" {
		return nil
	}
	quoted := strconv.Quote(v)
	all := []string{v, quoted[1 : len(quoted)-1]}
	if len(v) >= shortest {
		all = append(all, base64.RawStdEncoding.EncodeToString([]byte(v)), base64.RawURLEncoding.EncodeToString([]byte(v)),
			url.QueryEscape(v), url.PathEscape(v))
	}
	return all
}
