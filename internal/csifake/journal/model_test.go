package journal

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// randomClient creates, uses and deletes volumes, and gets every kind of answer. It may make one kind of mistake.
type randomClient struct {
	*history
	rnd     *rand.Rand
	mistake string
}

// outcome returns the code of the next call: mostly OK, else any other code, or none at all.
func (c *randomClient) outcome() string {
	if c.rnd.IntN(3) > 0 {
		return "OK"
	}
	codes := append(slices.Clone(codeNames[1:]), "")
	return codes[c.rnd.IntN(len(codes))]
}

// send makes one call and returns its code. If there is no answer, either the plugin has died and was started again, or
// the caller has given up while the plugin continues.
func (c *randomClient) send(l Line) string {
	code := c.outcome()
	switch {
	case code == "" && c.rnd.IntN(2) == 0:
		c.call(l, "", nil)
		c.run += "'"
		c.add(Line{Kind: Start, Run: c.run})
	case code == "":
		n := c.begin(l)
		c.abandoned(n).end(n, "OK", nil)
	case l.RPC == "CreateVolume" && code == "OK":
		c.call(l, code, &Answer{Volume: "v1", VolumeContext: "vc"})
	case l.RPC == "ControllerPublishVolume" && code == "OK":
		c.call(l, code, &Answer{PublishContext: "pc"})
	default:
		c.call(l, code, nil)
	}
	return code
}

// try sends a call until it succeeds or the client gives up.
func (c *randomClient) try(l Line) bool {
	for {
		code := c.send(l)
		if code == "OK" || c.mistake == "goes on from uncertainty" && OutcomeOf(code) == Uncertain {
			return true
		}
		if l.RPC != "CreateVolume" && c.rnd.IntN(2) == 0 {
			return false
		}
		if c.mistake == "changes the request" {
			l.Hash += "x"
		}
	}
}

func (c *randomClient) round() {
	undo := map[string]Line{"ControllerPublishVolume": detach, "NodeStageVolume": unstage,
		"NodePublishVolume": unpublish,
		"CreateVolume":      remove}
	var sent []Line
	for _, l := range []Line{create, attach, stage, publish} {
		sent = append(sent, undo[l.RPC])
		if !c.try(l) {
			break
		}
	}
	slices.Reverse(sent)
	if c.mistake == "goes down in any order" {
		c.rnd.Shuffle(len(sent), func(i, j int) { sent[i], sent[j] = sent[j], sent[i] })
	}
	for _, l := range sent {
		for c.send(l) != "OK" && c.mistake != "undoes once" {
		}
	}
}

func checkRandomClient(seed uint64, mistake string) []Violation {
	c := &randomClient{history: newHistory().learn(), rnd: rand.New(rand.NewPCG(seed, 1)), mistake: mistake}
	for range 3 {
		c.round()
	}
	return Check(c.lines, Options{Settled: true})
}

// Whatever the answers are, a correct client breaks no rule. A client that makes a mistake soon breaks one.
func TestLegalRandomCallsBreakNoRule(t *testing.T) {
	for seed := range uint64(2000) {
		if found := checkRandomClient(seed, ""); len(found) > 0 {
			t.Fatalf("seed %d: the correct client breaks rules: %v", seed, found)
		}
	}
	for _, mistake := range []string{"goes on from uncertainty", "changes the request", "goes down in any order",
		"undoes once"} {
		blamed := 0
		for seed := range uint64(100) {
			if len(checkRandomClient(seed, mistake)) > 0 {
				blamed++
			}
		}
		if blamed < 50 {
			t.Errorf("a client that %s breaks rules in %d of 100 journals", mistake, blamed)
		}
	}
}
