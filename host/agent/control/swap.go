package control

import (
	"context"
	"net/http"

	"holdfast/host"
)

// Replacement asks for another shim.
type Replacement struct {
	Path   string `json:"path"`
	SHA256 string `json:"sha256,omitempty"`
	By     string `json:"by,omitempty"` // who wants it, for the history
}

// postSwap replaces the shim. What it has come to is in the history as well, where it failed.
func (s *Server) postSwap(r *http.Request) (any, error) {
	var ask Replacement
	if err := readBody(r, &ask); err != nil {
		return nil, err
	}
	return s.host.SwapAs(r.Context(), host.Binary{Path: ask.Path, SHA256: ask.SHA256}, ask.By)
}

func (s *Server) getSwaps(*http.Request) (any, error) {
	list := s.host.Swaps()
	if list == nil {
		list = []host.SwapReport{}
	}
	return list, nil
}

// Swap replaces the shim, and returns when the new one serves.
func (c *Client) Swap(ctx context.Context, ask Replacement) (out host.SwapReport, err error) {
	err = c.do(ctx, http.MethodPost, "/shim/swap", ask, &out)
	return out, err
}

// Swaps is what earlier swaps came to, the newest first.
func (c *Client) Swaps(ctx context.Context) ([]host.SwapReport, error) {
	return get[[]host.SwapReport](ctx, c, "/shim/history")
}
