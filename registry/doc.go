// Package registry holds the records of Holdfast and the live table of CSI plugin instances.
//
// Records are plain data that all other packages share: IDs, Instance, Fingerprint, Health, Volume, Usage, Claim,
// Attachment, Staging, Ref, Intent, Event and the closed set of error kinds. They are parsed once, where they enter,
// and never touch a disk, a socket or a mount.
//
// The live table (Registry) knows which instance of a plugin is active. It is a copy of what State made durable: a
// change is stored first, then published in memory, then passed to watchers (Feed). Reads take no lock and wait
// neither for a write nor for a disk.
//
// After a restart the table is loaded from State, and Feed reads older events there. This package imports the
// standard library only, and every other package may import it.
package registry
