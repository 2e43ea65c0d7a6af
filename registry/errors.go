package registry

import (
	"errors"
	"fmt"
)

// The kinds of error: a closed set. errors.Is against them holds on both sides of the wire. The text around a kind says
// what happened; the kind says what its reader may do next.
var (
	// ErrInvalid: the request itself is wrong. Change it; the same again fails again.
	ErrInvalid = errors.New("invalid")
	// ErrNotFound: what the request names does not exist (any more).
	ErrNotFound = errors.New("not found")
	// ErrConflict: someone else holds what is asked for; the text names them. Wait for them, or choose another usage.
	ErrConflict = errors.New("conflict")
	// ErrExists: something else of that name exists already.
	ErrExists = errors.New("already exists")
	// ErrUnavailable: what would answer is not there now (plugin, shim, store). The same call may succeed later.
	ErrUnavailable = errors.New("unavailable")
	// ErrUncertain: the call was sent and its outcome is not known. Only the same call again, or its undo, is legal.
	ErrUncertain = errors.New("outcome unknown")
	// ErrUnsupported: the plugin, the host or the task's driver cannot do this, now and later.
	ErrUnsupported = errors.New("not supported")
	// ErrExhausted: a limit is reached (disk full, volumes of a node). Releasing something helps.
	ErrExhausted = errors.New("resource exhausted")
	// ErrFenced: a newer generation owns the state. The shim that sees this exits.
	ErrFenced = errors.New("fenced by a newer generation")
	// ErrDenied: the caller, or the credentials in the request, may not do this.
	ErrDenied = errors.New("permission denied")
	// ErrDamaged: stored state fails its checksum or contradicts itself. `holdfast doctor` explains it.
	ErrDamaged = errors.New("stored state is damaged")
	// ErrInternal: a plugin or Holdfast itself broke its own rules.
	ErrInternal = errors.New("internal error")
)

// Kinds lists every kind, in the order in which the wire numbers them. Append only.
var Kinds = []error{
	ErrInvalid, ErrNotFound, ErrConflict, ErrExists, ErrUnavailable, ErrUncertain, ErrUnsupported, ErrExhausted,
	ErrFenced,
	ErrDenied, ErrDamaged, ErrInternal,
}

// Invalid makes an ErrInvalid whose text is only what the format says: these texts are read by people.
func Invalid(format string, args ...any) error { return Errorf(ErrInvalid, format, args...) }

// Errorf makes an error of the kind whose text is only what the format says. It wraps what %w names as well.
func Errorf(kind error, format string, args ...any) error {
	return &kindError{kind: kind, err: fmt.Errorf(format, args...)}
}

type kindError struct{ kind, err error }

func (e *kindError) Error() string   { return e.err.Error() }
func (e *kindError) Unwrap() []error { return []error{e.kind, e.err} }
