// Package doctor finds differences between the records, the kernel's mount table, the directories below the mount root
// and what plugins say about their volumes, and repairs them.
//
// Doctor.Examine collects Facts and passes them to Examine, a pure function that returns findings in order, each with
// the action that repair would take. Doctor.Repair carries out exactly that list: a Digest names the list that was
// shown. `holdfast doctor` calls Doctor.Examine, and with --repair then Doctor.Repair.
//
// Doctor.Start runs when a shim starts. If a record says done and that is no longer true, Start marks it as sent, so
// that the owner of the claim repeats or undoes the step. Start also removes empty directories. It only reports
// everything else.
//
// Repair also makes plugins take down volumes without a claim. It unmounts mounts that have no record and no user. It
// looks for users when the list is made, and again right before each unmount, which is neither lazy nor forced. This
// process opens no path that may hold a volume (package mount).
//
// Watch inspects the mounts of published volumes while the shim runs. The package works with or without a running shim
// (Options.Live), and keeps no state of its own.
package doctor
