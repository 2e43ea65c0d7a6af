//go:build race

package node

// usual is the number of operations of TestHistories. It is lower here, because an operation takes ten times as long.
// `make long` runs the test without -race.
const usual = 1_250
