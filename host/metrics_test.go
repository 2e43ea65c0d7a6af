package host

import (
	"testing"

	"holdfast/registry"
)

// The counts of several shims add up, however often each of them is read.
func TestCountsOfShimsAddUp(t *testing.T) {
	metric := func(calls uint64, seconds float64) CallMetric {
		m := CallMetric{Plugin: "disk", Buckets: make([]uint64, len(registry.CallBuckets)+1), Seconds: seconds}
		m.Buckets[2] = calls
		return m
	}
	var sum CallMetric
	first, next := []CallMetric{{}, metric(2, 1), metric(2, 1), metric(5, 4)},
		[]CallMetric{{}, metric(1, .5), metric(9, 7)}
	for _, shim := range [][]CallMetric{first, next} {
		for i, now := range shim[1:] {
			sum = addMetric(sum, now, shim[i])
		}
	}
	if sum.Buckets[2] != 14 || sum.Seconds != 11 || sum.Plugin != "disk" || first[3].Buckets[2] != 5 {
		t.Errorf("the sum is %+v", sum)
	}
}
