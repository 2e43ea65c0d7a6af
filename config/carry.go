package config

import (
	"encoding/json"
	"slices"
	"strings"

	"github.com/hashicorp/hcl/v2"
)

// carry returns a block as data, without the names in ours. It maps attributes by name and blocks by type as lists of
// objects, with their labels under "labels".
func (d *decoder) carry(b block, ours ...string) map[string]any {
	out := map[string]any{}
	for name, attr := range b.body.Attributes {
		if slices.Contains(ours, name) {
			continue
		}
		if v, ok := d.value(attr.Expr, b.ctx); ok {
			out[name] = plain(v)
		}
	}
	for _, inner := range d.inner(b) {
		if !slices.Contains(ours, inner.kind) {
			d.carryInto(out, inner)
		}
	}
	return out
}

// carryInto adds a block to the list of its type.
func (d *decoder) carryInto(out map[string]any, b block) {
	object := d.carry(b)
	if len(b.labels) > 0 {
		if _, taken := object["labels"]; taken {
			d.errorf(b.head, "remove the labels, or the attribute",
				"a block with labels cannot have an attribute or block of that name as well")
		}
		object["labels"] = b.labels
	}
	list, ok := out[b.kind].([]any)
	if _, taken := out[b.kind]; taken && !ok {
		d.errorf(b.head, "keep one of the two", "%s is given as an attribute and as a block", b.kind)
		return
	}
	out[b.kind] = append(list, object)
}

// asBlock makes an attribute that is written `name = { ... }` look like a block.
func asBlock(out map[string]any, name string) {
	if object, ok := out[name].(map[string]any); ok {
		out[name] = []any{object}
	}
}

// raw returns the object as JSON, or nil if it is empty.
func raw(object map[string]any) json.RawMessage {
	if len(object) == 0 {
		return nil
	}
	text, err := json.Marshal(object)
	if err != nil {
		panic(err) // plain values cannot fail
	}
	return text
}

// checkCarried reports names at a level of a job that neither Nomad nor the host knows.
func (d *decoder) checkCarried(b block, level level) {
	known := slices.Concat(level.blocks, level.attrs, d.opts.Blocks)
	for _, attr := range b.body.Attributes {
		switch name := attr.Name; {
		case slices.Contains(level.attrs, name) || slices.Contains(d.opts.Blocks, name):
		case slices.Contains(level.blocks, name):
			d.errorf(attr.NameRange, "write "+name+" { ... }", "%s is a block, not an attribute", name)
		default:
			d.errorf(attr.NameRange, d.elsewhere(name, known), "%s has no attribute %q", b.kind, name)
		}
	}
	for _, inner := range b.body.Blocks {
		name, at := inner.Type, inner.TypeRange
		if name == "dynamic" && len(inner.Labels) == 1 {
			name, at = inner.Labels[0], inner.LabelRanges[0]
		}
		d.checkBlock(b.kind, name, at, level, known)
	}
}

func (d *decoder) checkBlock(kind, name string, at hcl.Range, level level, known []string) {
	switch {
	case slices.Contains(level.blocks, name) || slices.Contains(d.opts.Blocks, name):
	case slices.Contains(level.attrs, name):
		d.errorf(at, "write "+name+" = ...", "%s is an attribute, not a block", name)
	default:
		d.errorf(at, d.elsewhere(name, known), "%s has no block %q", kind, name)
	}
}

// elsewhere returns advice: the level where the name belongs, or a similar known name.
func (d *decoder) elsewhere(name string, known []string) string {
	for _, l := range []level{jobLevel, groupLevel, taskLevel} {
		if slices.Contains(l.blocks, name) || slices.Contains(l.attrs, name) {
			return "it belongs in a " + l.name
		}
	}
	s := didYouMean(name, known)
	if strings.HasPrefix(s, "known here") {
		return "unsupported attribute; remove it"
	}
	return s
}
