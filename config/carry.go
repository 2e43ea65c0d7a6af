package config

import (
	"encoding/json"
	"slices"
)

// carry returns a block as data, without the names in ours. It maps attributes by name and blocks by type as lists of
// objects, with their labels under "labels".
func (d *decoder) carry(b block, ours ...string) map[string]any {
	out := map[string]any{}
	for _, attr := range attributes(b.body) {
		if slices.Contains(ours, attr.Name) {
			continue
		}
		if v, ok := d.value(attr.Expr, b.ctx); ok {
			out[attr.Name] = jsonValue(v)
		}
	}
	blocks, _ := d.inner(b)
	for _, inner := range blocks {
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
				"a block with labels cannot also have an attribute or block named \"labels\"")
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

// rawJSON returns the object as JSON, or nil if it is empty.
func rawJSON(object map[string]any) json.RawMessage {
	if len(object) == 0 {
		return nil
	}
	text, err := json.Marshal(object)
	if err != nil {
		panic(err) // values of jsonValue cannot fail
	}
	return text
}
