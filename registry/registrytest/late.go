package registrytest

import (
	"context"

	"holdfast/registry"
)

// Late is the state of a node that has not yet read a change by another node. Its first commit reads the change.
type Late struct {
	registry.State
	Change registry.Change
}

// Commit implements registry.State.
func (s *Late) Commit(ctx context.Context, decisions ...registry.Decision) (registry.Seq, error) {
	change := s.Change
	s.Change = registry.Change{}
	read := func(registry.View) (registry.Change, error) { return change, nil }
	return s.State.Commit(ctx, append([]registry.Decision{read}, decisions...)...)
}
