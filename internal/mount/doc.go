// Package mount reads the kernel's mount table, finds the users of a mount, and makes, inspects and removes what is
// below directories that Holdfast owns.
//
//   - Table, At and Below read mountinfo and never call stat, which would hang at a dead network mount.
//   - Users finds who uses a mount, in all namespaces, from texts in /proc. It touches no volume.
//   - MakeShared makes a directory a shared mount, whatever / is. ProbePropagation proves that mounts below it
//     appear in this namespace.
//   - MkdirAll, Rmdir, RemoveTree, Dirs and Unmount work below a root of ours. They follow no symbolic link and
//     enter no mount, so they never write to, walk or empty a volume.
//   - MountPart mounts a directory or file of a volume at a second place, safe against any links in the volume.
//   - Helper does what may hang in a helper process with a deadline. Its caller never hangs.
//   - Manager offers all of this for the paths of a hooks.Layout, with the error kinds of package registry.
//   - Space starts a program in a mount namespace of its own: the host's directories as slaves, with binds, devices,
//     directories and tmpfs on top. Nothing of it appears on the host, except mounts below a bidirectional bind.
//
// It needs Linux 5.12. Everything works as root and, except for what the kernel denies, in a user namespace.
package mount
