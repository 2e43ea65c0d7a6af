// Package registry holds the words of Holdfast and the live table of CSI plugin instances.
//
// The words are plain data that every other package shares: ids, Instance, Fingerprint, Health, Volume, Usage, Claim,
// Attachment, Staging, Ref, Intent, Event and the closed set of error kinds. They are parsed once, at the edge, and never carry
// behaviour that touches a disk, a socket or a mount.
//
// The live table (Registry) answers which instance of a plugin is the active one. It is a copy of what the Log made
// durable: a change is persisted first, then published in memory, then told to watchers (Feed). Reads take no lock and
// wait neither for a write nor for a disk.
//
// What survives the process is what the Log keeps: the table is loaded from it, and the Feed reads there what was before its
// time. This package imports the standard library only, and every other package may import it.
package registry
