package e2e

import (
	"testing"
	"time"

	"holdfast/host"
	"holdfast/internal/csifake"
)

// TestBlockingListsSurviveSwaps lets lists wait for a claim while shims are swapped and die. The claim answers all of
// them. A further call with the index of the answer waits for the release.
func TestBlockingListsSurviveSwaps(t *testing.T) {
	e := newEnv(t, allCaps...)
	plugin := e.addPlugin("plugin", csifake.Monolith)
	e.must(e.create("vol"))
	_, at, err := e.host.Claims(e.ctx(), host.ClaimQuery{})
	e.must(err)
	type answer struct {
		claims []host.Claim
		at     host.Seq
		err    error
	}
	const many = 100
	answers := make(chan answer, many)
	wait := func(after host.Seq) {
		claims, at, err := e.host.Claims(e.ctx(), host.ClaimQuery{Blocking: host.Blocking{MinIndex: after}})
		answers <- answer{claims, at, err}
	}
	for range many {
		go wait(at)
	}
	e.swap()
	e.killShim()
	e.swap()
	if len(answers) > 0 {
		t.Fatalf("%d of %d calls were answered before a claim: %+v", len(answers), many, <-answers)
	}
	began := time.Now()
	if _, same, err := e.host.Claims(e.ctx(), host.ClaimQuery{Blocking: host.Blocking{MinIndex: at, Wait: 1}}); err != nil ||
		same != at {
		t.Errorf("the wait ended with index %d instead of %d, %v, after %v", same, at, err, time.Since(began))
	}
	e.use("user", request{source: "vol"})
	for range many {
		a := <-answers
		if e.must(a.err); len(a.claims) != 1 || a.claims[0].Alloc != "user" {
			t.Fatalf("the claim is not in %+v", a.claims)
		}
		at = a.at
	}
	go wait(at)
	e.must(e.release("user"))
	if a := <-answers; a.err != nil || len(a.claims) > 0 || a.at <= at {
		t.Errorf("after the release: %+v", a)
	}
	e.stopPlugin(plugin)
}
