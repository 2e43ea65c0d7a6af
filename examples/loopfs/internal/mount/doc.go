// Package mount mounts and unmounts directories, devices and device nodes.
//
// It never opens or resolves a path that may be a mount point, and removes only empty directories and files. A bind
// mount appears in one step with its final flags, so a read-only publish is never writable. No unmount is lazy. The
// parents of a place may be symbolic links; the place itself must be a directory or a file.
//
// It needs Linux 5.12, and keeps no state: the kernel answers every question.
package mount
