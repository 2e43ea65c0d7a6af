// Package mount reads the kernel's mount table, finds the users of a mount, and makes, inspects and removes files and
// mounts below directories that Holdfast owns.
//
//   - Table, At and Below read mountinfo. They never call stat, which would hang at a dead network mount.
//   - Users finds the users of a mount in all namespaces from texts in /proc. It does not touch a volume.
//   - MakeShared makes a directory a shared mount, whatever / is. ProbePropagation checks that mounts below it appear
//     in this namespace.
//   - MkdirAll, Rmdir, RemoveTree, Dirs and Unmount work below a root directory. They follow no symbolic link and enter
//     no mount, so they never write to, list or empty a volume.
//   - MountPart mounts a directory or file of a volume at a second place. Links in the volume cannot misdirect it.
//   - Helper runs calls that may hang, in a helper process with a deadline. Its caller never hangs.
//   - Manager does all of this for the paths of a hooks.Layout, and returns errors of the kinds in package registry.
//   - Space starts a program in a mount namespace of its own: the host's directories as slaves, with binds, devices,
//     directories and tmpfs on top. Nothing of it appears on the host, except mounts below a bidirectional bind.
//
// It needs Linux 5.12. Everything works as root and, except for what the kernel denies, in a user namespace.
package mount
