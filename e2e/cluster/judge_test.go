package cluster

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// TestJudgeFindsViolations judges histories written by hand. Each line is KIND ALLOC; that of a refusal also has the
// allocs that the refusal names. Allocs a and b claim the same volume as single writers.
func TestJudgeFindsViolations(t *testing.T) {
	for name, c := range map[string]struct {
		history string
		legal   bool
	}{
		"one after the other":        {"prepare a, prepared a, release a, released a, prepare b, prepared b", true},
		"both":                       {"prepare a, prepared a, prepare b, prepared b", false},
		"before the release":         {"prepare a, prepared a, prepare b, prepared b, release a, released a", false},
		"during the release":         {"prepare a, prepared a, release a, prepare b, prepared b, released a", true},
		"after an unknown release":   {"prepare a, prepared a, release a, prepare b, prepared b", true},
		"refused by the holder":      {"prepare a, prepared a, prepare b, refused b a", true},
		"refused by nobody":          {"prepare b, refused b", false},
		"refused after the release":  {"prepare a, prepared a, release a, released a, prepare b, refused b a", false},
		"refused before the claim":   {"prepare b, refused b a, prepare a, prepared a", false},
		"refused by another alloc":   {"prepare c, unknown c, prepare a, prepared a, prepare b, refused b c", false},
		"refused while it holds":     {"prepare a, prepared a, prepare a, refused a b", false},
		"unknown, never seen":        {"prepare a, unknown a, prepare b, prepared b", true},
		"unknown, seen, and granted": {"prepare a, unknown a, prepare b, refused b a, prepare b, prepared b", false},
		"unknown, seen, released": {"prepare a, unknown a, prepare b, refused b a, release a, prepare b, prepared b, " +
			"release b, released b, released a", true},
		"refused by one lost":  {"prepare a, prepared a, lost, prepare b, refused b a, prepare b, prepared b", true},
		"granted after a loss": {"prepare a, prepared a, lost, prepare b, prepared b, prepare a, refused a b", true},
		"seen after a loss":    {"prepare a, prepared a, lost, prepare b, prepared b, prepare c, refused c a", false},
	} {
		if errs := linearizable(parse(c.history)); (len(errs) == 0) != c.legal {
			t.Errorf("%s: %q: legal %v, found %q", name, c.history, c.legal, errs)
		}
	}
}

func parse(history string) (lines []line) {
	for text := range strings.SplitSeq(history, ", ") {
		words := strings.Fields(text)
		l := line{Kind: words[0], Node: "n"}
		if l.Kind != lost {
			l.Alloc, l.Volume, l.Mode, l.Write = words[1], "v", modes[0], true
		}
		switch l.Kind {
		case "refused":
			l = refusal(l, words[2:])
		case "unknown":
			l.Kind, l.Error = prepareEnded, "deadline"
		}
		lines = append(lines, l)
	}
	return lines
}

// refusal returns the line with the error of a shim that names the holders.
func refusal(l line, holders []string) line {
	l.Kind, l.Refused, l.Error = prepareEnded, true, "while it is held by "
	for _, alloc := range holders {
		l.Error += fmt.Sprintf("alloc %s (as \"data\" on node n): why; ", alloc)
	}
	return l
}

// TestJudgeIsQuick judges a history of 50 volumes and 10 000 allocs, of which 1 000 fight for volumes at any time. One
// call in four has no certain outcome.
func TestJudgeIsQuick(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	var lines []line
	for volume := range 50 {
		lines = append(lines, fought(random, volume, 200, false)...)
	}
	if errs := linearizable(lines); len(errs) > 0 {
		t.Errorf("%d lines: %q", len(lines), errs)
	}
	if errs := linearizable(fought(random, 7, 200, true)); len(errs) != 1 ||
		!strings.Contains(errs[0], "not linearizable") {
		t.Errorf("a claim that was granted while another alloc certainly held the volume: %q", errs)
	}
}

// fought returns a history of a volume for which 20 allocs fight at a time. early means that one claim is granted
// although another alloc holds the volume.
func fought(random *rand.Rand, volume, allocs int, early bool) (lines []line) {
	type user struct {
		line
		next      int // the step in the switch below
		by        []string
		forgotten bool // the call has no certain outcome
	}
	var users []*user
	held := holders{}
	for made := 0; made < allocs || len(users) > 0; {
		if made < allocs && len(users) < 20 {
			l := line{Node: fmt.Sprint("n", random.IntN(3)), Alloc: fmt.Sprintf("a-%d-%d", volume, made),
				Volume: volumeID(volume),
				Mode:   modesOf(volume)[random.IntN(5)/4], Write: random.IntN(3) > 0}
			users = append(users, &user{line: l})
			made++
		}
		u := users[random.IntN(len(users))]
		l := u.line
		switch u.next++; u.next {
		case 1:
			l.Kind = prepareBegins
		case 2:
			u.forgotten = random.IntN(4) == 0
			u.by = held.excluding(l.use())
			if early && made > allocs/2 && slices.ContainsFunc(users, func(other *user) bool {
				return other.next == 3 && !other.forgotten && slices.Contains(u.by, other.Alloc)
			}) {
				held[l.Alloc], early = l.use(), false
				l.Kind, u.next = prepareEnded, 3
				break
			}
			if len(u.by) == 0 && !(u.forgotten && random.IntN(2) == 0) {
				held[l.Alloc] = l.use()
			}
			continue
		case 3:
			l.Kind = prepareEnded
			switch {
			case u.forgotten:
				l.Error = "deadline"
			case len(u.by) > 0:
				l = refusal(l, u.by)
			}
			if l.Error != "" && random.IntN(3) > 0 {
				u.next = 0
			}
		case 4:
			l.Kind = releaseBegins
		case 5:
			delete(held, l.Alloc)
			continue
		case 6:
			l.Kind = releaseEnded
			if u.forgotten = random.IntN(4) == 0; u.forgotten {
				l.Error, u.next = "deadline", 3
			}
		case 7:
			users = slices.DeleteFunc(users, func(other *user) bool { return other == u })
			continue
		}
		lines = append(lines, l)
	}
	return lines
}
