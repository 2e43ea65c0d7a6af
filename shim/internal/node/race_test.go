//go:build race

package node

// usual is how many operations TestHistories has: fewer where each takes ten times as long. `make long` runs it
// without -race.
const usual = 1_250
