package cluster

import (
	"cmp"
	"maps"
	"math"
	"regexp"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"
)

// input is an operation in the model.
type input struct {
	Kind string // see below
	use
	Held []string // the allocs that a refusal names as holders
}

// Kinds of operations in the model.
const (
	opClaim   = "claim"
	opRelease = "release"
	opRefusal = "refusal" // a claim that was refused
)

// life bounds the moments at which an alloc makes its claim and releases it, as the history shows them.
type life struct {
	input
	claim, claimed    int64 // claim is -1: no known call made it; claimed is never: it may not be made
	release, released int64 // never if the claim may not have been released
	try               int64 // when the last prepare began
}

const never = math.MaxInt64

// history is the part of the lines that is about one volume.
type history struct {
	lives    map[string]*life // by alloc
	refusals []porcupine.Operation
}

// holderNamed matches an alloc that a refusal names as a holder of the volume.
var holderNamed = regexp.MustCompile(`alloc (\S+) \(as `)

func holdersIn(text string) (allocs []string) {
	for _, match := range holderNamed.FindAllStringSubmatch(text, -1) {
		allocs = append(allocs, match[1])
	}
	return allocs
}

// histories returns the history of each volume.
func histories(lines []line) map[string]*history {
	all := map[string]*history{}
	for i, l := range lines {
		now := int64(i)
		if l.Kind == lost {
			for _, h := range all {
				h.lose(l.Node, now)
			}
		}
		if l.Alloc == "" {
			continue
		}
		h := all[l.Volume]
		if h == nil {
			h = &history{lives: map[string]*life{}}
			all[l.Volume] = h
		}
		a := h.lives[l.Alloc]
		if a == nil {
			a = &life{input{use: l.use()}, -1, never, never, never, 0}
			h.lives[l.Alloc] = a
		}
		switch {
		case l.Kind == prepareBegins:
			if a.try = now; a.claim < 0 {
				a.claim = now
			}
		case l.Kind == prepareEnded && l.Error == "":
			a.claimed = min(a.claimed, now)
		case l.Kind == prepareEnded && l.Refused:
			in := input{opRefusal, a.use, holdersIn(l.Error)}
			h.refusals = append(h.refusals, porcupine.Operation{Call: a.try, Return: now, Input: in})
			if a.claim == a.try { // all its calls so far were refused
				a.claim = -1
			}
		case l.Kind == releaseBegins:
			a.release = min(a.release, now)
		case l.Kind == releaseEnded && l.Error == "":
			a.released = now
		}
	}
	return all
}

// lose records that from now on other nodes may release the claims of a lost node.
func (h *history) lose(node string, now int64) {
	for _, a := range h.lives {
		if a.Node == node {
			a.release = min(a.release, now)
		}
	}
}

// settle decides which claims without a certain outcome were made, and leaves out the others:
//   - If a refusal names the alloc, its claim was made before the end of that refusal: it stays until the alloc is
//     released.
//   - No other claim has to be judged. If an order explains the history with it and its release, the same order without
//     them does: it is no reason for a refusal, and could only exclude other claims.
//
// A release without a certain outcome may come last, which is the same as never.
func (h *history) settle() {
	for _, r := range h.refusals {
		for _, alloc := range r.Input.(input).Held {
			if a := h.lives[alloc]; a != nil && a.claim >= 0 {
				a.claimed = min(a.claimed, r.Return)
			}
		}
	}
	maps.DeleteFunc(h.lives, func(_ string, a *life) bool { return a.claimed == never })
}

// operations returns the operations of the model. It leaves out refusals that need no further explanation, because the
// allocs that they name certainly held the volume meanwhile.
func (h *history) operations() (all []porcupine.Operation) {
	for _, a := range h.lives {
		all = append(all, porcupine.Operation{Call: a.claim, Return: a.claimed, Input: input{opClaim, a.use, nil}})
		if a.release < never {
			all = append(all, porcupine.Operation{Call: a.release, Return: a.released,
				Input: input{opRelease, a.use, nil}})
		}
	}
	for _, r := range h.refusals {
		if !h.explained(r) {
			all = append(all, r)
		}
	}
	slices.SortFunc(all, func(a, b porcupine.Operation) int { return cmp.Compare(a.Call, b.Call) })
	return all
}

// explained reports whether at some moment during the refusal all allocs that it names certainly held the volume.
func (h *history) explained(refusal porcupine.Operation) bool {
	in, from, to := refusal.Input.(input), refusal.Call, refusal.Return
	for _, alloc := range in.Held {
		a := h.lives[alloc]
		if a == nil || !excludes(a.use, in.use) {
			return false
		}
		from, to = max(from, a.claimed), min(to, a.release)
	}
	return len(in.Held) > 0 && from < to
}

// holders is a state of the model: the uses that hold a volume, by alloc. A holders map is never changed.
type holders map[string]use

// excluding returns the holders that exclude a use by another alloc.
func (h holders) excluding(u use) (allocs []string) {
	for _, other := range h {
		if other.Alloc != u.Alloc && excludes(other, u) {
			allocs = append(allocs, other.Alloc)
		}
	}
	return allocs
}

func contains(all, some []string) bool {
	return !slices.ContainsFunc(some, func(one string) bool { return !slices.Contains(all, one) })
}

// claims is the model of the claims of a volume. held are the holders at the start.
func claims(held holders) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return held },
		Step: func(state, in, _ any) (legal bool, next any) {
			now, op := state.(holders), in.(input)
			_, holds := now[op.Alloc]
			switch op.Kind {
			case opClaim:
				after := maps.Clone(now)
				after[op.Alloc] = op.use
				return len(now.excluding(op.use)) == 0, after
			case opRelease:
				after := maps.Clone(now)
				delete(after, op.Alloc)
				return holds, after
			}
			// The allocs named must hold the volume, but others may hold it too. Otherwise the order of compatible
			// claims would matter, and there are too many orders to try.
			return !holds && len(op.Held) > 0 && contains(now.excluding(op.use), op.Held), now
		},
		Equal: func(a, b any) bool { return maps.Equal(a.(holders), b.(holders)) },
	}
}

// judgeLimit bounds the search for an order of one segment.
const judgeLimit = time.Minute

// segments cuts the operations of a volume, sorted by call, at moments when no operation is under way. All claims are
// certain, so the state between two segments is known, and each segment is judged by itself.
func segments(all []porcupine.Operation) (cut [][]porcupine.Operation) {
	until := int64(-1)
	for i, op := range all {
		if i == 0 || op.Call > until {
			cut = append(cut, nil)
		}
		last := &cut[len(cut)-1]
		*last, until = append(*last, op), max(until, op.Return)
	}
	return cut
}

// linearizable returns an error for each volume whose history cannot be explained by any order of single operations.
func linearizable(lines []line) (errs []string) {
	for volume, h := range histories(lines) {
		h.settle()
		switch result := judge(h.operations()); result {
		case porcupine.Illegal:
			errs = append(errs, "the claims of volume "+volume+" are not linearizable")
		case porcupine.Unknown:
			errs = append(errs, "the claims of volume "+volume+" could not be judged in time")
		}
	}
	slices.Sort(errs)
	return errs
}

// judge checks whether an order of the operations of a volume explains them.
func judge(all []porcupine.Operation) porcupine.CheckResult {
	held := holders{}
	for _, segment := range segments(all) {
		if slices.ContainsFunc(segment, func(op porcupine.Operation) bool { return op.Call > op.Return }) {
			return porcupine.Illegal // a refusal named an alloc before the alloc's first call
		}
		if result := porcupine.CheckOperationsTimeout(claims(held), segment, judgeLimit); result != porcupine.Ok {
			return result
		}
		held = maps.Clone(held)
		for _, op := range segment {
			switch in := op.Input.(input); in.Kind {
			case opClaim:
				held[in.Alloc] = in.use
			case opRelease:
				delete(held, in.Alloc)
			}
		}
	}
	return porcupine.Ok
}
