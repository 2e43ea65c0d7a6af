// Package intent drives one CSI call that changes something: a record of the call is durable before it is sent, and closed in the
// same commit that says what became of it. So nobody ever has to guess whether a call left.
//
// At most one intent is open per volume. While one is open, only the same call (same RPC, same hash) or its undo may be sent for
// that volume; everything else is ErrConflict and says which call is uncertain. An answered call is done or failed; anything else
// (no answer, a code that does not say, an ended context) is uncertain, and its intent stays.
//
// What a caller marks as sent in Before stays sent when the call fails: whatever was ever sent gets undone (rule U).
//
// Which code is tried again, how often, how soon and with which deadline is a table (Policies): CSI spec, "Error Scheme".
package intent
