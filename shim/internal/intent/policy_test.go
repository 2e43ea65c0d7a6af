package intent

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"holdfast/registry"
)

// The delay never overflows, never exceeds its maximum and never falls below half of what it was: to try 10^6 and beyond.
func TestBackoffSaturates(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		first := time.Duration(rapid.Int64Range(1, int64(time.Minute)).Draw(t, "first"))
		b := Backoff{First: first, Max: first + time.Duration(rapid.Int64Range(0, int64(24*time.Hour)).Draw(t, "more"))}
		try := rapid.Uint64Range(0, 1_000_000).Draw(t, "try")
		random := rapid.Float64Range(0, 0.999999).Draw(t, "random")
		d := b.Delay(try, random)
		if d < first/2 || d > b.Max {
			t.Fatalf("try %d waits %s, outside of %s..%s", try, d, first/2, b.Max)
		}
		if b.Delay(try+1, random) < d {
			t.Fatalf("try %d waits less than %s", try+1, d)
		}
	})
	for _, b := range []Backoff{quick, slow} {
		for try := uint64(1); try <= 1_000_000; try++ {
			if d := b.Delay(try, 0); d <= 0 || d > b.Max || try > 20 && d != b.Max {
				t.Fatalf("try %d waits %s", try, d)
			}
		}
	}
}

func TestHashKnowsNoSecrets(t *testing.T) {
	type request struct {
		ID      string
		Secrets map[string]registry.SecretValue `json:"-"`
	}
	one := Hash(registry.NodeStageRPC, request{"v", map[string]registry.SecretValue{"k": "a"}}, "/at")
	if two := Hash(registry.NodeStageRPC, request{"v", map[string]registry.SecretValue{"k": "b"}}, "/at"); one != two {
		t.Error("another secret is another request")
	}
	for _, other := range []string{
		Hash(registry.NodePublishRPC, request{ID: "v"}, "/at"), Hash(registry.NodeStageRPC, request{ID: "w"}, "/at"), Hash(registry.NodeStageRPC, request{ID: "v"}, "/to"),
	} {
		if one == other {
			t.Error("different requests have one hash")
		}
	}
}
