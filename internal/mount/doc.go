// Package mnt reads the kernel's mount table, says who uses a mount, looks at mounts that may hang, keeps directories below which
// volumes are mounted, and starts programs in a mount namespace of their own.
//
// Reading (Table, At, Below, Holding, Visible) goes through mountinfo only and never through stat: a path may hold a dead network
// mount, and a stat of it would hang for ever.
//
// Users says who uses a mount, in all namespaces, from the texts that /proc has, so it touches no volume either. Unmount takes one
// mount off below a root that we own, never lazily and never by force.
//
// MountPart mounts a directory or a file of a volume once more, at a place of ours, whatever links there are in the volume; UnmountPart
// takes that off.
//
// A Lookout does what may hang all the same: it looks at paths, finds users, unmounts, and mounts parts, in a helper process with a deadline,
// which runs LookMain. Whatever becomes of the helper, its caller goes on.
//
// Directories: MakeShared makes a directory the root of mounts that travel between namespaces, whatever / is;
// ProbePropagation proves that they do. MkdirAll, Rmdir, RemoveTree and Unmount work below a root that we own; they follow no symbolic
// link and enter no mount, so a volume is never written to, walked or emptied by them. StaleSocket removes a socket that nobody
// serves.
//
// Space is what one program sees of the file system: the host's directories as slaves (what the host mounts or unmounts is
// followed, nothing goes back), with binds, devices, directories and tmpfs of its own on top. Nothing of it appears on the host, but
// what the program mounts below a bidirectional bind. A Space lives as long as its processes and leaves nothing behind.
//
// Linux 5.12 or later. Everything works as root and, but for what the kernel denies, in a user namespace (unshare -Urm). The
// package keeps no state but what a Lookout has not reaped yet. The shim, the exec driver and loopfs may call it; it imports the
// standard library, x/sys/unix and moby/sys/mountinfo.
package mount
