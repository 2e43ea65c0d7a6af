// Package wire converts between the generated messages of the host-shim API and the types of packages registry and
// hooks. Host and shim both import it, so they read and write every field in the same way.
//
// A function named after a type reads it from its message (Plan). The same name with Proto writes it (PlanProto).
// Status and Error convert errors. On both sides errors.Is finds the same kind and errors.As the same
// *registry.CallError.
package wire
