package node_test

import (
	"context"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"holdfast/registry"
)

// parts is what a machine has of parts of volumes.
type parts struct {
	at      map[string]mountedPart
	epoch   map[string]int // by target: how often it was mounted
	journal []string
	fault   func(what string) partFault
	before  func(what, at string) // each of them
}

// mountedPart is of a mount of a target, which may have been replaced since.
type mountedPart struct {
	target, path string
	epoch        int
}

// partFault is how a mount or an unmount of a part ends instead of well. The zero value: it ends well.
type partFault struct {
	err    error
	effect bool   // it took effect all the same
	then   func() // what happens after it
}

func fineParts(string) partFault { return partFault{} }

func newParts() parts {
	return parts{at: map[string]mountedPart{}, epoch: map[string]int{}, fault: fineParts,
		before: func(string, string) {}}
}

// published notes that a target is mounted anew, unless it was.
func (p *parts) published(target string, mounted bool) {
	if !mounted {
		p.epoch[target]++
	}
}

// standing says which part of what is mounted at a target stands; empty: none.
func (p *parts) standing(target string) string {
	for at, part := range p.at {
		if part.target == target {
			return fmt.Sprintf("%q of it is mounted at %s", part.path, at)
		}
	}
	return ""
}

func (m *machine) partsOf(target, path string) bool {
	for at, part := range m.parts.at {
		if part == (mountedPart{target, path, m.parts.epoch[target]}) && m.mounts[at] {
			return true
		}
	}
	return false
}

func (m *machine) HasPart(target, at string) (has, mounted bool, err error) {
	part := m.parts.at[at]
	return m.mounts[at] && m.mounts[target] && part.target == target && part.epoch == m.parts.epoch[target],
		m.mounts[at], nil
}

func (m *machine) MountPart(_ context.Context, target, path, at string, create bool) error {
	return m.part("mount", at, fmt.Sprintf("mount %s %v", path, create), func() {
		switch {
		case !m.mounts[target]:
			m.errorf("a part of %s is mounted, where nothing is", target)
		case m.mounts[at] || m.covered(at):
			m.errorf("a part is mounted at %s, where something is", at)
		case !strings.HasPrefix(at, layout.MountRoot()+"/parts/"):
			m.errorf("a part is mounted at %s", at)
		}
		m.mounts[at], m.parts.at[at] = true, mountedPart{target, path, m.parts.epoch[target]}
	})
}

func (m *machine) UnmountPart(_ context.Context, at string) error {
	return m.part("unmount", at, "unmount "+m.parts.at[at].path, func() {
		delete(m.mounts, at)
		delete(m.parts.at, at)
	})
}

func (m *machine) part(what, at, entry string, effect func()) error {
	m.parts.before(what, at)
	m.parts.journal = append(m.parts.journal, entry)
	f := m.parts.fault(what)
	if f.err == nil || f.effect {
		effect()
	}
	if f.then != nil {
		f.then()
	}
	return f.err
}

// takeParts is the journal of parts since the last time.
func (w *world) takeParts() []string {
	defer func() { w.parts.journal = nil }()
	return w.parts.journal
}

func anyPartFault(t *rapid.T, w *world) partFault {
	effect := rapid.Bool().Draw(t, "the part takes effect")
	hung := registry.Errorf(registry.ErrUncertain, "it hangs")
	switch rapid.IntRange(0, 9).Draw(t, "fault of a part") {
	case 0:
		return partFault{err: hung, effect: effect}
	case 1:
		return partFault{err: hung, effect: effect, then: w.crash}
	case 2:
		return partFault{then: w.crash}
	case 3:
		return partFault{err: registry.Errorf(registry.ErrConflict, "it is used: %w", unix.EBUSY)}
	case 4:
		return partFault{then: func() { w.log.Lose(effect) }}
	}
	return partFault{}
}
