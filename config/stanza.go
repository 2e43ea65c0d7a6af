package config

import (
	"fmt"
	"slices"
	"strings"
)

// stanza declares what a block may contain. The parser takes names, types, words, limits and defaults from it, and
// docs/stanzas.md is printed from it.
type stanza struct {
	name   string
	doc    string
	fields []field

	// Attributes and blocks of Nomad that are not about CSI. They are passed on as they are written.
	carriedAttrs, carriedBlocks []string
}

// field declares an attribute or a block.
type field struct {
	name     string
	kind     kind
	doc      string
	required bool
	words    []string // the values that a oneOf may have
	low      int64    // of a number; of a duration in nanoseconds
	high     int64
	fallback any     // the value if it is not set; nil: none
	block    *stanza // of a block
}

// kind is the type of a field.
type kind string

const (
	isText     kind = "string"
	isChoice   kind = "one of"
	isBool     kind = "bool"
	isNumber   kind = "number"
	isDuration kind = "duration"
	isSize     kind = "size"
	isStrings  kind = "list of strings"
	isMap      kind = "map"
	isBlock    kind = "block"
	isAny      kind = "expression"
)

// names returns the names of the attributes and of the blocks. A map is written as either.
func (s *stanza) names() (attrs, blocks []string) {
	attrs, blocks = slices.Clone(s.carriedAttrs), slices.Clone(s.carriedBlocks)
	for _, f := range s.fields {
		if f.kind != isBlock {
			attrs = append(attrs, f.name)
		}
		if f.kind == isBlock || f.kind == isMap {
			blocks = append(blocks, f.name)
		}
	}
	return attrs, blocks
}

// carries reports whether the stanza passes on attributes and blocks that are not about CSI.
func (s *stanza) carries() bool { return s.carriedAttrs != nil }

// declared returns the declaration of the field. It panics if the field is not declared as that kind, as the parser
// would read it differently from what docs/stanzas.md says.
func (f *fields) declared(name string, kind kind) field {
	at := slices.IndexFunc(f.stanza.fields, func(d field) bool { return d.name == name })
	if at < 0 || f.stanza.fields[at].kind != kind {
		panic(fmt.Sprintf("%s.%s is not declared as %v", f.stanza.name, name, kind))
	}
	return f.stanza.fields[at]
}

// fallbackOf returns the fallback of the field, or the zero value.
func fallbackOf[T any](d field) T {
	v, _ := d.fallback.(T)
	return v
}

// checkNames reports the names in the block that s does not declare.
func (d *decoder) checkNames(b block, s *stanza) {
	attrs, blocks := s.names()
	if s.carries() {
		attrs, blocks = append(attrs, d.opts.Blocks...), append(blocks, d.opts.Blocks...)
	}
	advice := func(name string) string {
		if s.carries() {
			return adviseName(name, slices.Concat(blocks, attrs))
		}
		return didYouMean(name, slices.Concat(attrs, blocks))
	}
	for _, attr := range b.body.Attributes {
		switch {
		case slices.Contains(attrs, attr.Name):
		case slices.Contains(blocks, attr.Name):
			d.errorf(attr.NameRange, "write "+attr.Name+" { ... }", "%s is a block, not an attribute", attr.Name)
		default:
			d.errorf(attr.NameRange, advice(attr.Name), "%s has no attribute %q", b.kind, attr.Name)
		}
	}
	for _, inner := range b.body.Blocks {
		name, at := inner.Type, inner.TypeRange
		if name == "dynamic" && len(inner.Labels) == 1 {
			name, at = inner.Labels[0], inner.LabelRanges[0]
		}
		switch {
		case slices.Contains(blocks, name):
		case slices.Contains(attrs, name):
			d.errorf(at, "write "+name+" = ...", "%s is an attribute, not a block", name)
		default:
			d.errorf(at, advice(name), "%s has no block %q", b.kind, name)
		}
	}
}

// adviseName returns advice: the level of a job where the name belongs, or a similar known name.
func adviseName(name string, known []string) string {
	for _, level := range []*stanza{jobStanza, groupStanza, taskStanza} {
		if attrs, blocks := level.names(); slices.Contains(attrs, name) || slices.Contains(blocks, name) {
			return "it belongs in a " + level.name
		}
	}
	s := didYouMean(name, known)
	if strings.HasPrefix(s, "known here") {
		return "unsupported attribute; remove it"
	}
	return s
}

// words returns the values as strings.
func words[T ~string](values ...T) (out []string) {
	for _, v := range values {
		out = append(out, string(v))
	}
	return out
}
