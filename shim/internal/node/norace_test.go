//go:build !race

package node_test

// usual is how many operations TestHistories has.
const usual = 10_000
