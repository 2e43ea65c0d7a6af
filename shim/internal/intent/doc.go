// Package intent makes CSI calls that change something. A Sender commits an intent before it sends a call, and retries
// the call by a table (Policies). It closes the intent in the commit that stores the outcome. In a series of calls,
// that commit also opens the next intent. Locks serialize all work on a volume.
//
// At most one intent is open per volume. While it is open, only the same call (same RPC, same hash) or its undo may be
// sent for the volume (checkLegal). For other calls, the Sender returns an ErrConflict that names the open call. A call
// is done, failed or uncertain. It is uncertain without an answer, after an answer that does not say whether the call
// took effect, and after its context has ended. The intent of an uncertain call stays open.
//
// Marks that Call.Before sets to sent stay sent if the call fails, so that the call is undone later.
package intent
