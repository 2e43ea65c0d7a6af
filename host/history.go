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
	pen  pen
	mu   sync.Mutex // guards all; held for no longer than a look
	all  []SwapReport  // oldest first
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
func (h *history) add(s SwapReport) {
	h.note(s)
	_ = h.pen.write(h.save)
}

func (h *history) note(s SwapReport) {
	h.mu.Lock()
	defer h.mu.Unlock()
	i := slices.IndexFunc(h.all, func(o SwapReport) bool { return o.Began.Equal(s.Began) })
	if i >= 0 {
		h.all[i] = s
	} else {
		h.all = append(h.all, s)
	}
	h.all = h.all[max(0, len(h.all)-remembered):]
}

// save writes the file as it should be now.
func (h *history) save() error {
	h.mu.Lock()
	text, err := json.MarshalIndent(h.all, "", "\t")
	h.mu.Unlock()
	if err != nil {
		return err
	}
	temp := h.path + ".new"
	if err := os.WriteFile(temp, text, 0o600); err != nil {
		return err
	}
	return os.Rename(temp, h.path)
}

func (h *history) list() []SwapReport {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := slices.Clone(h.all)
	slices.Reverse(list)
	return list
}
