package csi

import (
	"strings"
	"sync"

	"holdfast/registry"
)

// Limits of what is remembered of one plugin.
const (
	maxRemembered = 512     // secrets
	maxBytes      = 1 << 20 // of their values
)

// veil is what must not appear in a text of a plugin.
type veil struct {
	words []word
	// more returns what the call itself does not carry. It is called only if the plugin has said something. all means that
	// nothing of the plugin's text may be shown. nil: the call carries everything.
	more func() (v veil, all bool)
}

// word is a secret's value as it is masked: wherever it stands, or only behind its name if it is short.
type word struct{ name, value string } // name is empty if the value is masked wherever it stands

// hidden collects what must not appear in texts: secrets, and values in mount flags, parameters and contexts that are
// named like secrets.
func hidden(secrets map[string]registry.SecretValue, flags registry.Flags, contexts ...map[string]string) (v veil) {
	for name, s := range secrets {
		v.add(name, s.Reveal())
	}
	flags.Secrets(v.add)
	for _, c := range contexts {
		for name, value := range c {
			if registry.SecretName(name) {
				v.add(name, value)
			}
		}
	}
	return v
}

// shortest is the length, in bytes, from which a secret is masked wherever it stands. Masking "true" or "1234" everywhere
// would hide words that are no secrets.
const shortest = 6

func (v *veil) add(name, value string) {
	switch {
	case value == "":
	case len(value) >= shortest:
		v.words = append(v.words, word{"", value})
	case name != "":
		v.words = append(v.words, word{name, value})
	}
}

// memory holds the secrets that were sent to one plugin. The plugin may repeat in one call, or in a probe, what it was sent
// in another, so all its texts are masked by them. It is not stored.
type memory struct {
	mu    sync.Mutex      // guards all below; held while masks are built, by calls of this plugin only
	sent  map[word]uint64 // when each was sent last, in turns
	turns uint64
	bytes int               // of the values
	masks *strings.Replacer // of sent; nil: sent has changed since they were built
}

// learn remembers what is about to be sent to the plugin.
func (m *memory) learn(words []word) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.add(words)
}

// redactor masks what was ever sent to the plugin, and words for certain.
func (m *memory) redactor(words []word) *strings.Replacer {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.add(words)
	if m.masks == nil {
		m.masks = masksOf(m.sent)
	}
	return m.masks
}

// add keeps the newest words within the limits. Words of one call are kept together.
func (m *memory) add(words []word) {
	if m.sent == nil {
		m.sent = map[word]uint64{}
	}
	before := m.turns
	for _, w := range words {
		if _, known := m.sent[w]; !known {
			m.masks = nil
			m.bytes += len(w.value)
		}
		m.turns++
		m.sent[w] = m.turns
	}
	for len(m.sent) > maxRemembered || m.bytes > maxBytes {
		oldest, at := word{}, before+1
		for w, turn := range m.sent {
			if turn < at {
				oldest, at = w, turn
			}
		}
		if at > before {
			return
		}
		delete(m.sent, oldest)
		m.bytes -= len(oldest.value)
		m.masks = nil
	}
}

// memory returns what was sent to the plugin.
func (f *Fleet) memory(id registry.PluginID) *memory {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.memoryOf(id)
}

// memoryOf is memory for a caller that holds the fleet's lock.
func (f *Fleet) memoryOf(id registry.PluginID) *memory {
	m := f.memories[id]
	if m == nil {
		m = &memory{}
		f.memories[id] = m
	}
	return m
}
