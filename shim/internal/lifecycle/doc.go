// Package lifecycle is the life of one shim process: candidate, active, released (a candidate again), gone.
//
//	candidate ──Activate──> active ──Release──> released ──Activate──> active
//	    └────────────────── gone: its host has ended it, or its store has failed ──┘
//
// A candidate answers only the calls that need no state (package rpc). It does not have the store open; its only
// connections to plugins are those of a rehearsal. Activate builds everything that an active shim consists of
// (activeState) and is the only place that wires use cases to adapters: the store, which raises the generation and so
// fences earlier writers, the table of instances, and the use cases. Release closes all of it in reverse order.
//
// Nothing durable depends on a graceful end: after a kill, the next shim starts in the same way. When the store fails,
// the process ends.
package lifecycle
