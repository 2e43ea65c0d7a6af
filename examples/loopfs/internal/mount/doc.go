// Package mount shows a directory, a device or a device node at a place, and takes it away again. What the kernel shows
// where, it reads with internal/mount.
//
// What it promises: a path that may hold a mount is never opened for reading, never resolved through, and removed only
// if it is an empty directory or an empty file. A bind mount appears at its place in one step with its final flags, so
// that a read-only publish is never writable for a moment. Nothing is ever unmounted lazily. Symbolic links may be
// among the parents of a place; the place itself must be a directory or a file.
//
// Linux only, kernel 5.12 or newer. Nothing is kept in memory: every question is answered by the kernel.
package mount
