// Package mount shows a directory or a device at a place, takes it away again, and says what the kernel shows where.
//
// What it promises: the mount table (/proc/self/mountinfo) is the only witness of what is mounted. A path that may hold a
// mount is never opened for reading, never resolved through, and removed with rmdir only. A bind mount appears at its place
// in one step with its final flags, so that a read-only publish is never writable for a moment. Nothing is ever unmounted
// lazily. Symbolic links may be among the parents of a place; the place itself must be a directory.
//
// Linux only, kernel 5.12 or newer. Nothing is kept in memory: every question is answered by the kernel.
package mount
