package benchswap

import (
	"os"
	"strconv"
	"testing"
	"time"
)

// sizes are how large a run is.
type sizes struct {
	swaps, plugins, volumes int
	slow                    int           // callers whose driver calls are slow
	slowFor                 time.Duration // such a call
	every                   time.Duration // from one call of a caller to its next
	kills, failures         int           // rounds of each
	bake, budget            time.Duration
	rest                    time.Duration // without a swap, after every restEvery
}

// restEvery is how many swaps are between two rests: what is measured in a rest is the control.
const restEvery = 20

// sizesOf are those of make bench-swap with HOLDFAST_SWAPS swaps; without it of a small run that only shows that all of
// it works.
func sizesOf(t *testing.T) sizes {
	s := sizes{
		plugins: 100, volumes: 1000, slow: 24, slowFor: 5 * time.Second, every: 180 * time.Millisecond, kills: 100,
		failures: 20,
		bake:     100 * time.Millisecond, rest: time.Second,
	}
	text, full := os.LookupEnv("HOLDFAST_SWAPS")
	if !full {
		return sizes{
			swaps: 8, plugins: 4, volumes: 12, slow: 2, slowFor: 500 * time.Millisecond, every: 50 * time.Millisecond,
			kills: 2, failures: 2,
			bake: 50 * time.Millisecond, budget: patience, rest: 200 * time.Millisecond,
		}
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("HOLDFAST_SWAPS=%q is not a number of swaps", text)
	}
	s.swaps = n
	// for machines that are too small for a hundred
	if n, err := strconv.Atoi(os.Getenv("HOLDFAST_PLUGINS")); err == nil {
		s.plugins, s.volumes, s.slow = n, 10*n, max(2, n/4)
	}
	// and for those that cannot make 500 calls a second
	if d, err := time.ParseDuration(os.Getenv("HOLDFAST_EVERY")); err == nil {
		s.every = d
	}
	if n < 1000 {
		s.kills, s.failures = 20, 5
	}
	return s
}
