// Package node prepares and releases volumes on this node. Allocs prepares the volumes of an alloc before its tasks
// start: claim, attach, stage, publish. After the tasks have ended, Allocs releases the volumes in the opposite order:
// unpublish, unstage, detach, release the claim. Stager makes the calls to node plugins.
//
// One operation at a time runs for a volume (intent.Locks; TestHistories). After a failed step no later step is sent,
// and a claim is released last (TestNothingLaterAfterAFailure). Prepare and Release are an idempotent pair. Release is
// legal in any state, cancels a waiting Prepare, and continues over restarts until everything is released
// (TestReleaseResumes).
//
// Every call that changes something has an intent before it. Each step has a durable mark: sent before the call, done
// or deleted after its response. A release undoes every sent step, whatever its outcome. The marks tell a new process
// which user of a volume is the last. The capabilities of the plugin when it mounted a volume decide how the volume is
// unmounted.
//
// A volume has one staging path, and one target path per request of an alloc (hooks.Layout). Stager makes the staging
// directory and the target's parent, and removes them with rmdir(2) only. The plugin makes and removes the target. If
// a second user of a staged volume needs a different staging mount, that is a conflict.
//
// The mount table decides. A publish is done when something is mounted at the target, an unpublish when nothing is.
// NOT_FOUND is success only if the table agrees. This process touches no path that may hold a volume; helper processes
// do that (package mount). After a reboot, a mark of this node that says done counts as sent.
//
// The parts of a volume that tasks use are mounted after the publish, and unmounted before the unpublish. A pending
// expansion is sent to the node plugin while the volume is mounted for writing, at once or at the next mount.
package node
