//go:build race

package e2e

import "os"

// raceFlag builds the binaries as this test is built.
var raceFlag = []string{"-race"}

// A program with the race detector sleeps for a second at its end, lest a race of that moment be missed. A script runs dozens.
func init() {
	if os.Getenv("GORACE") == "" {
		os.Setenv("GORACE", "atexit_sleep_ms=0")
	}
}
