// Package wire stands between the generated messages of the host-shim API and the words of packages registry and hooks:
// the one place where either is turned into the other. Both sides import it, so a field cannot be read differently from
// how it was written.
//
// A function named for a word reads it from its message (Plan); the same name with Proto writes it (PlanProto). Errors
// cross by Status and Error: errors.Is holds for the same kind, and errors.As finds the same *registry.CallError, on
// both sides. Nothing behind the host's and the shim's edges sees a generated type.
package wire
