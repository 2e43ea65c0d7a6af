package control

import (
	"context"
	"testing"

	"holdfast/host"
)

func (s *shim) SwapAs(ctx context.Context, b host.Binary, operator string) (host.SwapReport, error) {
	s.swapped = append(s.swapped, host.SwapReport{By: operator, Path: b.Path, To: b.SHA256, Outcome: host.SwapBaking})
	return s.swapped[len(s.swapped)-1], s.refuse
}

func (s *shim) Swaps() []host.SwapReport { return s.swapped }

func TestSwapIsPassedOn(t *testing.T) {
	s := &shim{}
	_, c := serve(t, s)
	got, err := c.Swap(t.Context(), Replacement{Path: "/next", SHA256: "ab", By: "operator"})
	if err != nil || got.Path != "/next" || got.To != "ab" || got.By != "operator" || got.Outcome != host.SwapBaking {
		t.Errorf("%+v, %v", got, err)
	}
	if list, err := c.Swaps(t.Context()); err != nil || len(list) != 1 || list[0].Path != "/next" {
		t.Errorf("%+v, %v", list, err)
	}
}
