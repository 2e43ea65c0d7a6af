// Package rpc serves the gRPC services of holdfast.v1 to the host. Package wire converts messages; this package
// converts errors to statuses, once, and logs calls.
//
// A shim that is not active answers Hello, Status and Parse only. A mutating call carries an operation ID: a replay
// joins the call in flight or gets the stored answer (TestReplayJoins), and an ID that is used for another request is
// refused. A shim that cannot answer any more, because it hands over or its store has failed, returns UNAVAILABLE
// without details, and the host repeats the call at the next shim. Every answer carries the index that it is true for.
package rpc
