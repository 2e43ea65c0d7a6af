package e2e

import "testing"

// slow is for suites of minutes: make long and make compat run them, each case of each, and make test, which is to end soon, does not.
func slow(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("a suite of minutes: make long or make compat runs it")
	}
}
