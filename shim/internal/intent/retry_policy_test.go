package intent

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"strconv"
	"testing"
	"time"

	"pgregory.net/rapid"

	"holdfast/registry"
)

// Even after 10^6 tries, the delay never overflows, never shrinks, and stays between half of the first delay and the
// maximum.
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
		Hash(registry.NodePublishRPC, request{ID: "v"}, "/at"), Hash(registry.NodeStageRPC, request{ID: "w"}, "/at"),
		Hash(registry.NodeStageRPC, request{ID: "v"}, "/to"),
	} {
		if one == other {
			t.Error("different requests have one hash")
		}
	}
}

// A call that only a newer build knows is not sent again. Whatever its answer is, the call may have taken effect. By
// NodePublishVolume's policy, an INVALID_ARGUMENT would be a certain failure.
func TestUnknownRPCIsNeverCertainToHaveFailed(t *testing.T) {
	const unknown registry.RPC = "ControllerFutureVolume"
	for code := range common {
		row := PolicyOf(unknown).Row(code)
		if row.Outcome != registry.OutcomeUncertain || row.Tries != 1 || row.Advice == "" {
			t.Errorf("%q: %+v", code, row)
		}
	}
	if PolicyOf(unknown).Deadline <= 0 {
		t.Error("there is no deadline")
	}
}

// Each RPC that the registry names has a policy of its own.
func TestEveryRPCHasAPolicy(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "../../../registry/use.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	ast.Inspect(file, func(n ast.Node) bool {
		spec, is := n.(*ast.ValueSpec)
		if !is || fmt.Sprint(spec.Type) != "RPC" {
			return true
		}
		for _, value := range spec.Values {
			found++
			name, err := strconv.Unquote(value.(*ast.BasicLit).Value)
			if _, has := Policies[registry.RPC(name)]; err != nil || !has {
				t.Errorf("%s has no policy (%v)", name, err)
			}
		}
		return true
	})
	if found != len(Policies) {
		t.Errorf("the registry names %d calls, and there are %d policies", found, len(Policies))
	}
}
