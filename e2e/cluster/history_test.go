package cluster

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"
)

// line is one line of the history, which all nodes append to. The order of lines is an order in time: a call's begin
// is written before the call, its end after it.
type line struct {
	Kind   string // see below
	Node   string
	Alloc  string `json:",omitempty"`
	Volume string `json:",omitempty"`
	Mode   string `json:",omitempty"`
	Write  bool   `json:",omitempty"`
	Sealed []byte `json:",omitempty"` // of the alloc, with its first prepare
	Error  string `json:",omitempty"` // of an end; empty: success
	// Refused: the error of a prepare is that another alloc holds the volume.
	Refused bool `json:",omitempty"`
}

// The kinds of lines. The first four are about an alloc.
const (
	prepareBegins = "prepare"
	prepareEnded  = "prepared"
	releaseBegins = "release"
	releaseEnded  = "released"
	ready         = "ready"    // the node has opened its host
	swapped       = "swapped"  // its shim
	stopped       = "stopped"  // all its allocs are released
	verified      = "verified" // Error says what is left after all were released
	lost          = "lost"     // the harness has killed all that runs on the node, for good
	declared      = "declared" // another node is out of service or fenced, as this one was asked to see to
	created       = "created"  // all volumes
	deleted       = "deleted"  // all volumes
	broken        = "broken"   // Error is a failure that no fault of the harness explains
)

// use is the use of a volume by an alloc, as its access mode sees it.
type use struct {
	Alloc, Node, Mode string
	Write             bool
}

// excludes returns whether two uses of a volume must not be at the same time, by the words of the CSI specification.
func excludes(a, b use) bool {
	if a.Mode != b.Mode {
		return true
	}
	switch a.Mode {
	case "single-node-multi-writer":
		return a.Node != b.Node
	case "multi-node-reader-only":
		return a.Write || b.Write
	case "multi-node-single-writer":
		return a.Write && b.Write
	case "multi-node-multi-writer":
		return false
	}
	return true // single-node-writer, single-node-reader-only, single-node-single-writer: one at a time
}

// The outcomes of operations of the model.
const (
	outcomeDone    = "done"
	outcomeRefused = "refused" // by a claim that excludes it
	outcomeUnknown = "unknown" // it is done at one moment after its call, or never
)

type input struct {
	Volume  string
	Release bool
	use
}

// operations returns what the lines say of claims, but for refusals during which another alloc certainly held the volume:
// they need no further explanation.
func operations(lines []line) []porcupine.Operation {
	var all []porcupine.Operation
	type state struct {
		input
		prepare  int // index in all
		released int // index in all of the release, -1: none yet
	}
	allocs := map[string]*state{}
	begin := func(i int, s *state, release bool) {
		in, until := s.input, int64(i) // a claim may hold the volume from its call on
		if in.Release = release; release {
			until = math.MaxInt64
		}
		all = append(all, porcupine.Operation{Call: int64(i), Return: until, Output: outcomeUnknown, Input: in})
	}
	for i, l := range lines {
		if l.Kind == lost {
			for _, s := range allocs {
				if s.Node == l.Node && s.released < 0 { // other nodes release what it has
					s.released = len(all)
					begin(i, s, true)
				}
			}
		}
		if l.Alloc == "" {
			continue
		}
		s := allocs[l.Alloc]
		if s == nil {
			s = &state{input: input{Volume: l.Volume, use: use{l.Alloc, l.Node, l.Mode, l.Write}}, released: -1}
			allocs[l.Alloc] = s
		}
		switch l.Kind {
		case prepareBegins:
			s.prepare = len(all)
			begin(i, s, false)
		case prepareEnded:
			if l.Error == "" || l.Refused {
				all[s.prepare].Return, all[s.prepare].Output = int64(i), outcomeDone
				if l.Refused {
					all[s.prepare].Output = outcomeRefused
				}
			}
		case releaseBegins:
			if s.released < 0 {
				s.released = len(all)
				begin(i, s, true)
			}
		case releaseEnded:
			if l.Error == "" {
				all[s.released].Return, all[s.released].Output = int64(i), outcomeDone
			}
		}
	}
	return slices.DeleteFunc(slices.Clone(all), func(op porcupine.Operation) bool {
		return op.Output == outcomeRefused && slices.ContainsFunc(all, func(claim porcupine.Operation) bool {
			until := int64(math.MaxInt64)
			if released := allocs[claim.Input.(input).Alloc].released; released >= 0 {
				until = all[released].Call
			}
			return explains(claim, until, op)
		})
	})
}

// explains reports whether a claim, which held the volume until its release began, certainly refused another one.
func explains(claim porcupine.Operation, until int64, refusal porcupine.Operation) bool {
	by, refused := claim.Input.(input), refusal.Input.(input)
	return !by.Release && claim.Output == outcomeDone && by.Volume == refused.Volume && by.Alloc != refused.Alloc &&
		excludes(by.use, refused.use) && max(refusal.Call, claim.Return) < min(refusal.Return, until)
}

// holders is a state of the model: the uses that hold a volume, by alloc.
type holders map[string]holder

// holder is a use that holds a volume. maybe: it does, or will, or neither, as nothing depends on it so far.
type holder struct {
	use
	maybe bool
}

// excludes reports whether a use of another alloc certainly holds the volume and excludes this one.
func (h holders) excludes(u use) bool {
	for _, other := range h {
		if !other.maybe && other.Alloc != u.Alloc && excludes(other.use, u) {
			return true
		}
	}
	return false
}

// with returns the state in which a use holds the volume.
func (h holders) with(u use, maybe bool) holders {
	h = maps.Clone(h)
	h[u.Alloc] = holder{u, maybe}
	return h
}

// refusing returns the states in which a use is refused. An earlier claim without a certain outcome may be the reason.
func (h holders) refusing(u use) (next []any) {
	if h.excludes(u) {
		return []any{h}
	}
	for _, other := range h {
		if other.maybe && other.Alloc != u.Alloc && excludes(other.use, u) && !h.excludes(other.use) {
			next = append(next, h.with(other.use, false))
		}
	}
	return next
}

// claims is the model of the claims of volumes.
var claims = (&porcupine.NondeterministicModel{
	Partition: func(all []porcupine.Operation) (parts [][]porcupine.Operation) {
		by := map[string][]porcupine.Operation{}
		for _, op := range all {
			volume := op.Input.(input).Volume
			by[volume] = append(by[volume], op)
		}
		return slices.Collect(maps.Values(by))
	},
	Init: func() []any { return []any{holders{}} },
	Step: func(state, in, output any) (next []any) {
		now, op := state.(holders), in.(input)
		held, known := now[op.Alloc]
		sure := known && !held.maybe
		switch {
		case op.Release:
			after := maps.Clone(now)
			delete(after, op.Alloc)
			if output == outcomeUnknown && known {
				next = append(next, now)
			}
			return append(next, after)
		case output == outcomeRefused && !sure:
			return now.refusing(op.use)
		case output == outcomeDone && (sure || !now.excludes(op.use)):
			return []any{now.with(op.use, false)}
		case output == outcomeUnknown && sure:
			return []any{now}
		case output == outcomeUnknown:
			return []any{now.with(op.use, true)}
		}
		return nil
	},
	Equal: func(a, b any) bool { return maps.Equal(a.(holders), b.(holders)) },
	DescribeOperation: func(in, output any) string {
		op := in.(input)
		if op.Release {
			return fmt.Sprintf("release %s %s: %s", op.Alloc, op.Volume, output)
		}
		return fmt.Sprintf("claim %s %s %s write=%v at %s: %s", op.Alloc, op.Volume, op.Mode, op.Write, op.Node, output)
	},
}).ToModel()

// linearizable returns an error for each volume whose history no order of single operations explains.
func linearizable(lines []line) (errs []string) {
	for _, part := range claims.Partition(operations(lines)) {
		volume := part[0].Input.(input).Volume
		switch porcupine.CheckOperationsTimeout(claims, part, 5*time.Minute) {
		case porcupine.Illegal:
			errs = append(errs, "the claims of volume "+volume+" are not linearizable")
		case porcupine.Unknown:
			errs = append(errs, "the claims of volume "+volume+" could not be judged in time")
		}
	}
	slices.Sort(errs)
	return errs
}

// readHistory returns the complete lines of a history from an offset on, and the offset after them.
func readHistory(path string, from int64) (lines []line, next int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, from, err
	}
	defer f.Close()
	if _, err := f.Seek(from, 0); err != nil {
		return nil, from, err
	}
	for r := bufio.NewReader(f); ; {
		text, err := r.ReadBytes('\n')
		if err != nil || !bytes.HasSuffix(text, []byte("\n")) {
			return lines, from, nil
		}
		from += int64(len(text))
		var l line
		if err := json.Unmarshal(text, &l); err != nil {
			return nil, from, fmt.Errorf("history at %d: %w", from, err)
		}
		lines = append(lines, l)
	}
}

func appendLine(path string, l line) error {
	text, err := json.Marshal(l)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.Write(append(text, '\n'))
	return err
}
