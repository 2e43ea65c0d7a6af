//go:build !race

package alloc_test

// usual is how many operations TestHistories has.
const usual = 10_000
