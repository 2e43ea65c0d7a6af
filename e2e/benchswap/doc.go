// Package benchswap measures swaps under load: `make bench-swap`. It has tests only.
//
// One host with real shim processes, plugins on real sockets and volumes on real mounts gets a load of reads and
// mutating calls. Meanwhile two builds of the shim replace each other. A failed call, a changed mount table, an illegal
// journal or anything left behind fails the run. Durations are reported beside their target, and beside the same figure
// of the same run without swaps, because machines differ.
//
// docs/benchmarks.md says what each figure means.
package benchswap
