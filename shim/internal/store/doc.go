// Package store keeps the durable state of a shim in one bbolt file. It implements registry.State. Package lifecycle
// opens it for one generation; everything else sees registry.State.
//
// What it promises:
//
//   - A change whose Commit returned nil is on disk. It survives SIGKILL, and a power cut if the disk keeps what it
//     synced.
//   - A change is stored as a whole or not at all. Concurrent commits share a transaction, in the order of their
//     arrival.
//   - View and Options.Applied show only what is on disk. A View waits for no commit and no disk.
//   - There is one writer. The lock of the file keeps other processes out, and each transaction compares the
//     generation.
//   - An error of the disk or the file stops the store for good. Run returns the reason, and the process has to start
//     over: after a failed sync the outcome of the commit is unknown, and no later commit may build on it. The
//     exception is a disk that is full or read-only, if nothing was written.
//   - On a full disk a commit that adds something fails with ErrExhausted. Commits that wind something down still
//     succeed, from a reserve.
//   - On a read-only file system a store that continues its own generation serves views. Commits fail with
//     ErrExhausted. Once the file system is writable the store stops, and the process starts over.
//   - A damaged file is found before it is opened for writing. It is neither changed nor replaced.
//   - Fields and buckets that this build does not know are kept.
//
// It does not notice a disk that returns an older copy of the whole file.
//
// # The file
//
// A value is the CRC-32C of its bucket's name, its key and its text, followed by the text, which is JSON. The sum
// covers the key so that a record at a wrong key is detected. The meta bucket has a tally of each bucket: the number of
// its records and the sum of their checksums. A tally reveals a missing record. bbolt itself checksums its two meta
// pages only.
//
// docs/state.txt draws the file. TestStateFormatIsDocumented prints it from a real one.
//
// # How a schema changes
//
// Two releases that follow each other read and write one file in turn, because a swap can be rolled back. If a
// release moves a field, it writes both the old and the new place, and reads the new one. A form does that. The older
// release keeps the new place, which it does not know (see merge), and may change the old one. It sets the schema
// number to its own when it opens the file. The newer release then migrates again: it copies the old place to the new
// one. A field that the older release does not need has no form: that release keeps it as an unknown field.
//
// The release after the newer one may drop the old place. It declares that a release which knows only the old place
// cannot read the file. No migration drops a place at the commit of a swap, because the host keeps the previous binary
// and must be able to swap back to it.
//
// TestForm holds this, and so do TestEndpointMoves and TestGoldens in the next release (package nextrelease).
//
// # How the file is verified
//
// Damage can kill a process that maps the file: a file that is cut off causes a SIGBUS, and a page that contains itself
// causes a stack overflow. So a child process verifies a copy of the file in memory, and its death means damage. The
// child runs bbolt's own check, checks that bbolt leaves out, and ours of checksums and tallies (verify).
//
// The file is not verified again after a clean handover (Options.ReleasedAt): the previous shim has verified it, and
// has made every change since. A child process would take 10 ms or more, while calls are held. Only the length of the
// file and its meta pages are checked; bbolt reads the free list, and Open reads the meta bucket. If anything is
// wrong, the file is verified.
//
// A record that cannot be decoded within a transaction panics inside this package with the type damage. Commit and
// View return it as ErrDamaged, so that no decision rests on part of the state.
package store
