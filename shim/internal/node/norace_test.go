//go:build !race

package node

// usual is how many operations TestHistories has.
const usual = 10_000
