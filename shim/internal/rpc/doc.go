// Package rpc serves the gRPC services of holdfast.v1 to the host. It converts errors to statuses, once, and logs
// calls. Package wire converts messages.
//
// A shim that is not active serves only Parse, Callbacks and the calls of Control other than Doctor. A mutating call
// carries an operation ID. A replay joins the call in flight or gets the stored answer (TestReplayJoins). An ID that is
// used for another request is refused. If a shim cannot answer any more, because it hands over or its store has failed,
// it returns UNAVAILABLE without details. The host then repeats the call at the next shim. Every answer carries the
// index that it is true for.
package rpc
