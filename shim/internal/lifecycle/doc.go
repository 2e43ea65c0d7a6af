// Package tenure is one shim process's life: a candidate, then active, then released (a candidate again), then gone.
//
//	candidate ──Activate──> active ──Release──> released ──Activate──> active
//	    └────────────────── gone: its host has ended it, or its store has failed ──┘
//
// A candidate has parsed nothing but flags: it answers Hello, Status and Parse, and holds neither the store nor a connection. Activate builds
// a reign: the store, which raises the generation and so fences whoever wrote before, the live table, the use cases and the adapters between
// them. It is the only place where those are wired. Release takes the reign down again, in the opposite order, and closes what it opened.
//
// Nothing durable depends on a graceful end: a shim that is killed is started again by the ordinary way. A store that fails ends the process.
package lifecycle
