//go:build race

package e2e

// raceFlag builds the binaries as this test is built.
var raceFlag = []string{"-race"}
