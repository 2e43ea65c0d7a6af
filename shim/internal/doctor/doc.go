// Package reconcile answers what is not as it is recorded, and puts it right.
//
// Four witnesses are compared: the records, the kernel's mount table, the directories below the mount root, and what plugins say of their
// volumes. Three steps, apart from each other: gather looks (Facts), Examine judges (a pure function of facts: an ordered list of findings,
// each with what repair would do about it), Repair carries out exactly that list. `holdfast doctor` is the first two, `--repair` all three;
// a Digest says that the list which is carried out is the one that was shown.
//
// At start (Doctor.Start) only what needs no judgement is done: what is recorded as done and is not true any more is marked as sent, so
// that whoever holds the claim redoes or undoes it, and empty directories are removed. All else is told. Nothing is unmounted.
//
// Repair also has plugins take down what nobody claims, and unmounts what no record can explain, if nobody uses it: users are looked for
// when the list is made and again right before each unmount, which is neither lazy nor by force. What is used is never touched. No path
// that may hold a volume is opened by this process: the mount table is read, and who has to look at a mount is a helper process
// (Lookout).
//
// Watch inspects the mounts of published volumes while the shim runs.
//
// The package works with or without a running shim beside it (Options.Live). It keeps nothing that outlives the process.
package doctor
