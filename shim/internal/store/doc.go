// Package store keeps the shim's durable state in one bbolt file. It is the registry.Log of a running shim; the only caller
// that opens it is the tenure of one generation, and use cases see no more of it than registry.Log.
//
// What it promises:
//
//   - A Commit that returned nil is on disk: it survives SIGKILL, and a power cut on a disk that keeps what it synced.
//   - Changes are whole or not there. Concurrent commits share one transaction, in the order in which they came.
//   - What is told (registry.Applied, View) is on disk already. Views wait for no commit and no disk.
//   - One writer. The file's lock keeps other processes out, and every transaction compares the generation in the file.
//   - Whatever is found wrong with the disk or the file stops the store for good: Run returns the reason, and the process
//     starts over. The outcome of a commit whose sync failed is not known, so no later commit may build on it. The one
//     exception is a full or read-only disk, where it can be shown that nothing was written.
//   - A full disk refuses what takes on something new (ErrExhausted); what winds down still commits, out of a reserve.
//   - A generation that goes on with its own file can do so on a read-only file system: it reads, and refuses whatever is to be written
//     (ErrExhausted), until the file could be written to; then it stops, and the process starts over.
//   - A damaged file is found before it is opened for writing, is never replaced and never changed.
//   - Records keep the fields, and the file keeps the buckets, that this build does not know.
//
// It does not promise to notice a disk that gives back an older copy of the whole file.
//
// # The file
//
// A value is the CRC-32C of its bucket's name, its key and its text, then the text: JSON. The key is part of the sum so that a
// record that has moved to another key does not pass. Each bucket has a tally in the meta bucket: how many records it
// has, and the sum of their checksums, so that a record which is gone without a trace is missed. bbolt has neither:
// it finds few damaged bytes, and dies of some of them.
//
// docs/state.txt draws the file. It is printed from a real one by TestDrawing.
//
// # How a schema changes
//
// Two releases that follow each other read and write one file in turn: a new shim may be taken back. So what a release stores otherwise than the
// one before it does, it stores at both places (it expands), and says by its window that the older one can read it. A form is that: it writes
// the new place beside the old one, and reads the new one. The older release keeps the new place, which it does not know (see merge), and may
// change the old one; opening the file it takes the window's number down, so that the newer one migrates again, and there what
// the old place says counts. A field of no meaning to the older release needs no form: to it the field is unknown, and stays.
//
// What is stored at both places is given up at the old one (it is contracted) by the release after, whose window then says that the one which
// knows only the old place cannot read it. No migration contracts when a swap is committed: the binary before, which the host keeps, could not be
// swapped back to.
//
// TestForm, TestNextReleaseIsRead, TestEndpointMoves and TestGoldens hold this, the latter two in the next release (package nextrelease).
//
// # How the file is verified
//
// Verification reads the file with pread through the descriptor that bbolt is given afterwards, with the lock held, and
// follows the pages itself, with every offset checked. bbolt maps the file instead: truncation is then a SIGBUS, a page
// number out of range a SIGSEGV, and a page that lists itself a stack overflow, which cannot be recovered from. Guarding
// bbolt's own Check would thus need a process of its own at each start, in the very gap in which a swap holds calls.
// What the walk accepts bbolt may open, and Check runs bbolt's own check as well.
//
// After a handover (Options.Left) the walk is left out. The length of the file, its meta pages, its list of free pages and
// the meta bucket are still checked in this way before the file is mapped. If any of them is wrong, the whole file is verified.
//
// What cannot be decoded within a transaction panics inside this package with the type damage; Commit and View turn that into
// ErrDamaged at their edge, so that no decision is taken on half of the truth.
package store
