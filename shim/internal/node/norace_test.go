//go:build !race

package node

// usual is the number of operations of TestHistories.
const usual = 10_000
