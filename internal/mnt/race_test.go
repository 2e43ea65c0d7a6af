//go:build race

package mnt

// slower is what the race detector costs.
const slower = 3
