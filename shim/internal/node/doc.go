// Package node uses volumes on this node. Allocs prepares the volumes of an alloc before its tasks start: claim,
// attach, stage, publish. After the tasks have ended it takes them back in the opposite order: unpublish, unstage,
// detach, release the claim. Stager makes the calls to node plugins.
//
// One operation at a time is under way for a volume (intent.Locks; TestHistories). After a failed step no later step is
// sent, and a claim is released last (TestNothingLaterAfterAFailure). Prepare and Release are an idempotent pair. Release
// is legal in any state, cancels a waiting Prepare, and continues over restarts until everything is released
// (TestReleaseResumes).
//
// Every call that changes something has an intent before it. Each step has a durable mark: sent before the call leaves,
// done or gone after its answer. Whatever was sent gets undone, however it ended, so a new process knows the last user
// of a volume. What the plugin declared when a volume was mounted decides how it is unmounted.
//
// A volume has one staging path, and one target path per request of an alloc (hooks.Layout). Stager makes the staging
// directory and the target's parent, and removes them with rmdir(2) only. The plugin makes and removes the target. A
// second user of a staged volume whose usage needs another staging mount is a conflict.
//
// The mount table decides. A publish is done when something is mounted at the target, an unpublish when nothing is, and
// NOT_FOUND is success only where the table agrees. No path that may hold a volume is ever touched. After a reboot the
// node's marks count as sent only.
//
// Where tasks want parts of a volume, these are mounted once more after the publish, and taken off before its undo. An
// expansion that is pending for the node is made where the volume is mounted for writing, at once or at its next mount.
package node
