package journal

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// climber is a client that takes volumes up and down through every kind of answer. A careless one does one thing wrong.
type climber struct {
	*story
	rnd      *rand.Rand
	careless string
}

// outcome of the next call: mostly OK, else any other code, or none at all.
func (c *climber) outcome() string {
	if c.rnd.IntN(3) > 0 {
		return "OK"
	}
	codes := append(slices.Clone(codeNames[1:]), "")
	return codes[c.rnd.IntN(len(codes))]
}

// send makes one call and says what came of it. A call without an answer is a plugin that died and came back, or a
// caller that gave up while the plugin went on.
func (c *climber) send(l Line) string {
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

// try sends a call until it is OK or the climber loses heart.
func (c *climber) try(l Line) bool {
	for {
		code := c.send(l)
		if code == "OK" || c.careless == "goes on from uncertainty" && OutcomeOf(code) == Uncertain {
			return true
		}
		if l.RPC != "CreateVolume" && c.rnd.IntN(2) == 0 {
			return false
		}
		if c.careless == "changes the request" {
			l.Hash += "x"
		}
	}
}

func (c *climber) round() {
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
	if c.careless == "goes down in any order" {
		c.rnd.Shuffle(len(sent), func(i, j int) { sent[i], sent[j] = sent[j], sent[i] })
	}
	for _, l := range sent {
		for c.send(l) != "OK" && c.careless != "undoes once" {
		}
	}
}

func climb(seed uint64, careless string) []Violation {
	c := &climber{story: tell().knows(), rnd: rand.New(rand.NewPCG(seed, 1)), careless: careless}
	for range 3 {
		c.round()
	}
	return Check(c.lines, Options{Settled: true})
}

// Whatever the answers, a careful client is never blamed, and each careless one is,
// soon.
func TestLegalRandomCallsBreakNoRule(t *testing.T) {
	for seed := range uint64(2000) {
		if found := climb(seed, ""); len(found) > 0 {
			t.Fatalf("seed %d: the careful client is blamed: %v", seed, found)
		}
	}
	for _, careless := range []string{"goes on from uncertainty", "changes the request", "goes down in any order",
		"undoes once"} {
		blamed := 0
		for seed := range uint64(100) {
			if len(climb(seed, careless)) > 0 {
				blamed++
			}
		}
		if blamed < 50 {
			t.Errorf("a client that %s is blamed in %d of 100 journals", careless, blamed)
		}
	}
}
