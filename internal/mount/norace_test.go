//go:build !race

package mount

// slower is what the race detector costs.
const slower = 1
