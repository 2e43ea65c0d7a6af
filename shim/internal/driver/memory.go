package driver

import (
	"holdfast/registry"
)

// Limits of what is remembered of one plugin.
const (
	maxRemembered = 512       // values of a kind
	maxValue      = 128 << 10 // bytes of one value; larger ones are hidden in their own call only
)

// veil is what must not appear in a text of a plugin.
type veil struct {
	secrets []string
	other   []string // mount flags, and the values of both contexts
	// more is asked for what the call itself does not carry, once the plugin has said something; nil: there is nothing. all: nothing that the
	// plugin says may be told.
	more func() (v veil, all bool)
}

func (v veil) words() []string { return append(v.secrets[:len(v.secrets):len(v.secrets)], v.other...) }

// hidden collects what must not appear in texts: the values of secrets, mount flags, and the values of both contexts. Values of fewer than
// shortest bytes stay, but for secrets.
func hidden(secrets map[string]registry.SecretValue, flags registry.Flags, contexts ...map[string]string) (v veil) {
	for _, s := range secrets {
		v.secrets = append(v.secrets, s.Reveal())
	}
	open := flags.List()
	for _, c := range contexts {
		for _, value := range c {
			open = append(open, value)
		}
	}
	for _, value := range open {
		if len(value) >= shortest {
			v.other = append(v.other, value)
		}
	}
	return v
}

// shortest is what a mount flag or a context's value must be long, in bytes, to be hidden: "ro" or "1" would blot out everything else.
const shortest = 4

// memory is what was sent to one plugin and must not come back in a text: a plugin may tell in one call, or in a probe, what it got in
// another one. It ends with the process. Whoever uses it holds the fleet's lock.
type memory struct{ secrets, other values }

// values are the newest that were sent, each once.
type values struct {
	order []string // oldest first
	known map[string]bool
}

func (m *memory) learn(v veil) {
	m.secrets.add(v.secrets)
	m.other.add(v.other)
}

func (vs *values) add(list []string) {
	if vs.known == nil {
		vs.known = map[string]bool{}
	}
	for _, value := range list {
		if value == "" || len(value) > maxValue || vs.known[value] {
			continue
		}
		if len(vs.order) == maxRemembered {
			delete(vs.known, vs.order[0])
			vs.order = vs.order[1:]
		}
		vs.order, vs.known[value] = append(vs.order, value), true
	}
}

func (m *memory) words() []string {
	return append(m.secrets.order[:len(m.secrets.order):len(m.secrets.order)], m.other.order...)
}

// learn remembers what is about to be sent to the plugin.
func (f *Fleet) learn(id registry.PluginID, v veil) {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := f.memories[id]
	if m == nil {
		m = &memory{}
		f.memories[id] = m
	}
	m.learn(v)
}

// remembered is what was sent to the plugin.
func (f *Fleet) remembered(id registry.PluginID) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if m := f.memories[id]; m != nil {
		return m.words()
	}
	return nil
}

// everything is what was sent to any plugin: for texts of a task whose plugin is not known yet.
func (f *Fleet) everything() (words []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.memories {
		words = append(words, m.words()...)
	}
	return words
}
