package agent

import (
	"context"
	"slices"

	"holdfast/hooks"
	"holdfast/host"
)

// Placement says whether this node can take one alloc of a job now.
type Placement struct {
	Group   string            `json:"group"`
	Index   uint64            `json:"index"`
	Alloc   host.AllocID      `json:"alloc,omitempty"` // the alloc that has the place now; empty: none
	Reasons []host.Infeasible `json:"reasons"`         // empty: the node can take it
}

// Planner says whether this node can take an alloc.
type Planner interface {
	Feasible(ctx context.Context, g host.AllocGroup) ([]host.Infeasible, host.Seq, error)
}

// Plan says for each alloc of a job whether this node could mount its volumes now, as if it were the only alloc to
// place. It changes nothing.
func (a *Agent) Plan(ctx context.Context, j *hooks.Job, p Planner) (places []Placement, err error) {
	if _, err := a.Check(j); err != nil {
		return nil, err
	}
	for _, g := range j.Groups {
		for index := range uint64(g.Count) {
			place := Placement{Group: g.Name, Index: index, Reasons: []host.Infeasible{}}
			rec := AllocRecord{ID: "planned", Job: j.ID, Namespace: j.Namespace, Index: index, Group: g}
			for _, old := range a.Allocs() {
				if old.Job == j.ID && old.Group.Name == g.Name && old.Index == index && !old.State.Ended() {
					rec.ID, place.Alloc = old.ID, old.ID
				}
			}
			if len(g.Volumes) > 0 {
				reasons, _, err := p.Feasible(ctx, rec.allocGroup(a.isolated))
				if err != nil {
					return nil, err
				}
				place.Reasons = slices.Concat(place.Reasons, reasons)
			}
			places = append(places, place)
		}
	}
	return places, nil
}
