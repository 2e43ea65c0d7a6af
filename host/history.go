package host

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"sync"
)

// remembered is how many swaps are kept.
const remembered = 50

// history is what swaps came to: a file of the state directory, for people. It is no part of the state: what cannot be read is forgotten.
type history struct {
	path string
	mu   sync.Mutex // guards all; held while the file is written
	all  []Swapped  // oldest first
}

func openHistory(dir string) *history {
	h := &history{path: filepath.Join(dir, "swaps.json")}
	text, err := os.ReadFile(h.path)
	if err == nil {
		_ = json.NewDecoder(bytes.NewReader(text)).Decode(&h.all)
	}
	return h
}

// settle ends what is told of swaps that baked when their host died: they are committed if their binary is run now.
func (h *history) settle(running string) {
	for _, s := range h.list() {
		if s.Outcome != SwapBaking {
			continue
		}
		if s.Outcome = SwapCommitted; s.To != running {
			s.Outcome, s.Failed, s.Reason = SwapRolledBack, SwapBake, "the host ended while it baked, and the next one runs another binary"
		}
		h.add(s)
	}
}

// add adds a swap, or replaces what is known of it.
func (h *history) add(s Swapped) {
	h.mu.Lock()
	defer h.mu.Unlock()
	i := slices.IndexFunc(h.all, func(o Swapped) bool { return o.Began.Equal(s.Began) })
	if i >= 0 {
		h.all[i] = s
	} else {
		h.all = append(h.all, s)
	}
	h.all = h.all[max(0, len(h.all)-remembered):]
	text, err := json.MarshalIndent(h.all, "", "\t")
	if err != nil {
		return
	}
	temp := h.path + ".new"
	if os.WriteFile(temp, text, 0o600) == nil {
		_ = os.Rename(temp, h.path)
	}
}

func (h *history) list() []Swapped {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := slices.Clone(h.all)
	slices.Reverse(list)
	return list
}
