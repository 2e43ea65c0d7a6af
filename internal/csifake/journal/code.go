package journal

import (
	"fmt"
	"strconv"
	"strings"
)

// codeNames are the gRPC codes by number, as the CSI spec writes them.
var codeNames = [...]string{"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
	"ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
	"UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"}

// CodeName returns the name of a gRPC code.
func CodeName(code uint32) string {
	if int(code) < len(codeNames) {
		return codeNames[code]
	}
	return fmt.Sprintf("CODE_%d", code)
}

// CodeNumber returns the gRPC code of a name; CODE_99 is an unknown code.
func CodeNumber(name string) (uint32, bool) {
	for n, s := range codeNames {
		if s == name {
			return uint32(n), true
		}
	}
	if digits, ok := strings.CutPrefix(name, "CODE_"); ok {
		n, err := strconv.ParseUint(digits, 10, 32)
		return uint32(n), err == nil
	}
	return 0, false
}

// Outcome is the result of a call, as far as its answer shows.
type Outcome string

const (
	Done      Outcome = "done"      // the call took effect
	Failed    Outcome = "failed"    // the call does not run any more; part of the effect may exist
	Uncertain Outcome = "uncertain" // the call may still run, or may have taken effect
)

// OutcomeOf returns the outcome of a code, for calls that change something.
func OutcomeOf(code string) Outcome {
	switch code {
	case "OK":
		return Done
	case "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "FAILED_PRECONDITION", "OUT_OF_RANGE",
		"UNIMPLEMENTED", "UNAUTHENTICATED":
		return Failed
	}
	return Uncertain
}
