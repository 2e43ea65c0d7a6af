// Package volume stages and publishes volumes on this node, and takes that down again.
//
// A Stager keeps the order of the CSI life cycle: a volume is attached, then staged once, then published once for each request of
// an alloc; down, everything is unpublished, then unstaged, then detached. Nothing later is sent while something earlier failed.
// Every call has a durable intent before it, and what is known of each edge is a durable mark: sent before the call leaves, done
// or gone after its answer. Whatever was ever sent gets undone, however it ended (rule U). So a new process knows the last user
// of a volume as well as the one before.
//
// There is one staging path per volume and one target path per request of an alloc (hooks.Layout). The Stager makes the staging
// directory and the target's parent, and removes them with rmdir(2) only; the plugin makes and removes the target. What the plugin
// announced when a volume was put up decides how it is taken down. A second user of a staged volume whose usage would need
// another staging mount is a conflict that says why; usages are compared by value.
//
// An expansion that is pending for the node (registry.Expansion) is seen to where the volume is mounted for writing, at once or at its next
// mount (Grow). It has no undo; a call of which nobody knows the end is sent again, at the same place, before anything else.
//
// Where tasks want parts of what is published, these are mounted once more after the publish and taken off before its undo, each at a
// place of its own that is recorded before it is used (Parts). A part that is used keeps its volume published.
//
// The mount table is the witness: a publish of a file system is done when something is mounted at the target, an unpublish when
// nothing is, and "not found" is success only where the table agrees. No path that may hold a volume is ever touched. After a boot
// (another boot id) the node's marks are worth no more than "sent".
//
// Calls for one volume are never concurrent: whoever calls holds the volume's lane. Stats alone holds none, as it changes nothing; it is
// not sent while another call is open. What is recorded is compared with what is there by package reconcile, before all others.
package node
