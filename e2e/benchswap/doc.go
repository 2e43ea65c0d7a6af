// Package benchswap measures swaps under load: `make bench-swap`. It has tests only.
//
// One host with real shim processes, plugins on real sockets and volumes on real mounts is put under a load of reads
// and mutating calls. Meanwhile two builds of the shim replace each other over and over. What has to hold always (no
// call failed, no event lost or told twice, the mount table as it was, nothing left behind) fails the run. How long
// things take is reported beside what is aimed at, and beside the same figure of the same run outside of swaps:
// machines are noisy, and a figure alone says little.
//
// docs/benchmarks.md says what each figure means.
package benchswap
