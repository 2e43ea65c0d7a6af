package registry

import (
	"errors"
	"fmt"
)

// The kinds of error form a closed set. errors.Is works with them on both sides of the wire. The error text describes
// the failure, and the kind determines the next action.
var (
	// ErrInvalid means that the request is wrong. Repeating it unchanged fails again.
	ErrInvalid = errors.New("invalid")
	// ErrNotFound means that the requested object does not exist.
	ErrNotFound = errors.New("not found")
	// ErrConflict means that the holders named in the text block the request. Wait for them or choose another usage.
	ErrConflict = errors.New("conflict")
	// ErrExists means that a different object of that name exists.
	ErrExists = errors.New("already exists")
	// ErrUnavailable means that the plugin, shim or store is not reachable now. The same call may succeed later.
	ErrUnavailable = errors.New("unavailable")
	// ErrUncertain means that the outcome of a sent call is unknown. Only the same call or its undo is legal.
	ErrUncertain = errors.New("outcome unknown")
	// ErrUnsupported means that the plugin, the host or the task driver lacks support. Retrying does not help.
	ErrUnsupported = errors.New("not supported")
	// ErrExhausted means that a limit is reached, such as disk space or volumes of a node. Release resources first.
	ErrExhausted = errors.New("resource exhausted")
	// ErrFenced means that a newer generation owns the state. A shim that gets this error exits.
	ErrFenced = errors.New("fenced by a newer generation")
	// ErrDenied means that the caller or the credentials lack permission.
	ErrDenied = errors.New("permission denied")
	// ErrDamaged means that stored state fails its checksum or is inconsistent. `holdfast doctor` explains it.
	ErrDamaged = errors.New("stored state is damaged")
	// ErrInternal means that a plugin or Holdfast violated its own invariants.
	ErrInternal = errors.New("internal error")
)

// Kinds lists every kind, in the order in which the wire numbers them. Append only.
var Kinds = []error{
	ErrInvalid, ErrNotFound, ErrConflict, ErrExists, ErrUnavailable, ErrUncertain, ErrUnsupported, ErrExhausted,
	ErrFenced, ErrDenied, ErrDamaged, ErrInternal,
}

// Invalid returns an ErrInvalid whose text is only the formatted message.
func Invalid(format string, args ...any) error { return Errorf(ErrInvalid, format, args...) }

// Errorf returns an error of the kind whose text is only the formatted message. It also wraps the operands of %w.
func Errorf(kind error, format string, args ...any) error {
	return &kindError{kind: kind, err: fmt.Errorf(format, args...)}
}

type kindError struct{ kind, err error }

func (e *kindError) Error() string   { return e.err.Error() }
func (e *kindError) Unwrap() []error { return []error{e.kind, e.err} }
