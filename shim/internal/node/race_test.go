//go:build race

package node

// usual is how many operations TestHistories has: fewer where each takes ten times as long. `make test` runs it without
// -race as well.
const usual = 2_500
