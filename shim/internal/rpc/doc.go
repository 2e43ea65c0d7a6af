// Package serve is the shim's edge towards its host: each gRPC service of holdfast.v1 over the use cases behind it. Words go in and come
// out by package wire; here errors are turned into statuses, once, and calls are logged.
//
// A shim that is not active answers Hello, Status and Parse only. A mutating call carries an operation id (S1. TestReplayJoins): a replay
// while the first is under way joins it, a replay after it gets the answer that was stored with it, and the same id for another request
// is refused. A shim that cannot answer any more, as it hands over or its store has failed, says UNAVAILABLE without a detail: nobody has
// answered, and the host makes the call again at the next shim. Every answer carries the index that it is true for.
package rpc
