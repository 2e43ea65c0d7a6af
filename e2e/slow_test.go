package e2e

import "testing"

// slow skips tests that take minutes in total. make long and make compat run them.
func slow(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("a suite of minutes: make long or make compat runs it")
	}
}
