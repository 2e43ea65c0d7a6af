package host

import (
	"testing"
	"time"
)

// The first start is made at once; then the waits double, and stay at their ceiling.
func TestBackoffSaturates(t *testing.T) {
	var b backoff
	if first := b.take(); first != 0 {
		t.Errorf("the first wait is %s", first)
	}
	want := backoffFirst
	for range 1000 {
		if got := b.take(); got != want {
			t.Fatalf("wait %d is %s, not %s", b.taken, got, want)
		}
		want = min(2*want, backoffCeiling)
	}
	if want != backoffCeiling || want > 10*time.Second {
		t.Errorf("the waits stay at %s", want)
	}
}
