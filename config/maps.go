package config

import (
	"maps"
	"slices"

	"github.com/hashicorp/hcl/v2"
	"github.com/hashicorp/hcl/v2/hclsyntax"
	"github.com/zclconf/go-cty/cty"
)

// stringMap reads a map written as a block or as an attribute. Run-time references remain in it unless f is constant.
func (f *fields) stringMap(name string) map[string]string {
	out := map[string]string{}
	for _, part := range f.stringMaps(name) {
		maps.Copy(out, part)
	}
	if len(out) == 0 {
		return nil
	}
	return out
}

// stringMaps reads a map given in several parts: the attribute, then each block. It omits empty parts.
func (f *fields) stringMaps(name string) []map[string]string {
	f.declared(name, isMap)
	var parts []map[string]string
	if v, ok := f.valueAtRunTime(name); ok {
		out := map[string]string{}
		f.addAll(out, name, v)
		parts = append(parts, out)
	}
	for _, b := range f.all(name) {
		out := map[string]string{}
		for _, attr := range attributes(b.body) {
			if v, ok := f.decoder.value(attr.Expr, b.ctx); ok {
				f.add(out, attr.Name, v, attr.Expr.Range())
			}
		}
		for _, inner := range b.body.Blocks {
			f.errorf(inner.DefRange(), "write name = value lines", "%s holds no blocks", name)
		}
		parts = append(parts, out)
	}
	return slices.DeleteFunc(parts, func(part map[string]string) bool { return len(part) == 0 })
}

func (f *fields) addAll(out map[string]string, name string, v cty.Value) {
	plain, marks := v.Unmark()
	if !plain.Type().IsMapType() && !plain.Type().IsObjectType() {
		f.wrongType(name, "a map: "+name+" = { key = \"value\" }", v)
		return
	}
	for key, value := range plain.Elements() {
		key, _ = key.Unmark()
		f.add(out, key.AsString(), value.WithMarks(marks), f.keyRange(name, key.AsString()))
	}
}

// mapRange returns the range of the map, which is an attribute or a block.
func (f *fields) mapRange(name string) hcl.Range {
	if blocks := f.all(name); f.body.Attributes[name] == nil && len(blocks) > 0 {
		return blocks[0].head
	}
	return f.rangeOf(name)
}

// keyRange returns the range of the key's value if the map is a literal.
func (f *fields) keyRange(name, key string) hcl.Range {
	if object, ok := f.body.Attributes[name].Expr.(*hclsyntax.ObjectConsExpr); ok {
		for _, item := range object.Items {
			if k, ok := constantKey(item.KeyExpr); ok && k == key {
				return item.ValueExpr.Range()
			}
		}
	}
	return f.rangeOf(name)
}

func (f *fields) add(out map[string]string, key string, v cty.Value, at hcl.Range) {
	raw, _ := v.Unmark()
	if raw.IsNull() || !raw.IsKnown() {
		return
	}
	s, ok := stringOf(v)
	switch {
	case !ok:
		f.errorf(at, "give a string; jsonencode() makes a string of any value", "%s cannot be %s here", key, kindOf(v))
	case f.constant && atRunTime(v):
		f.errorf(at, "use a variable, or write it out; with $${ instead of ${ the plugin reads the reference as it "+
			"is written", "%s cannot depend on the run time: references are not resolved here", key)
	default:
		out[key] = s
	}
}
