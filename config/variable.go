package config

import (
	"maps"
	"slices"
	"strings"

	"github.com/hashicorp/hcl/v2"
	"github.com/hashicorp/hcl/v2/ext/typeexpr"
	"github.com/hashicorp/hcl/v2/hclsyntax"
	"github.com/zclconf/go-cty/cty"
	"github.com/zclconf/go-cty/cty/convert"
)

// file is a parsed file with its variables and locals evaluated.
type file struct {
	*decoder
	block
}

// topLevel lists the block types that any file may contain.
var topLevel = []string{"variable", "variables", "locals"}

// file evaluates the variables and locals of a file.
func (d *decoder) file(root *hclsyntax.Body) *file {
	f := &file{d, block{kind: "file", body: root, ctx: d.scope,
		head: hcl.Range{Filename: d.src.Name, Start: hcl.InitialPos, End: hcl.InitialPos}}}
	declared := d.declared(root)
	d.assign(declared)
	d.scope.Variables["var"] = d.variables(declared)
	d.scope.Variables["local"] = d.locals(root)
	return f
}

// variable is a declared variable.
type variable struct {
	name     string
	at       hcl.Range
	typ      cty.Type
	defaults *typeexpr.Defaults // of optional attributes of an object; nil: none
	value    cty.Value          // NilVal if unset
	bad      bool               // an error is already reported
	checks   []*hclsyntax.Block
}

// declared returns the variables that a file declares, by name.
func (d *decoder) declared(root *hclsyntax.Body) map[string]*variable {
	declared := map[string]*variable{}
	for _, b := range root.Blocks {
		var vs []*variable
		switch b.Type {
		case "variable":
			vs = append(vs, d.variableBlock(b))
		case "variables":
			vs = d.variablesBlock(b)
		}
		for _, v := range vs {
			if v != nil && declared[v.name] != nil {
				d.errorf(v.at, "remove one of the two", "the variable %q is declared twice", v.name)
			} else if v != nil {
				declared[v.name] = v
			}
		}
	}
	return declared
}

var (
	variableStanza = &stanza{
		name: "variable",
		doc: "Declares an input of the file, which expressions read as `var.NAME`. `variables` declares several by " +
			"`name = default` lines.",
		fields: []field{
			{name: "type", kind: isAny, doc: "A type, such as string or list(string). Without it, any value is taken."},
			{name: "default", kind: isAny, doc: "The value if none is given."},
			{name: "description", kind: isAny, doc: "For readers."},
			{name: "sensitive", kind: isAny, doc: "Accepted, without effect."},
			{name: "nullable", kind: isAny, doc: "Accepted, without effect."},
			{name: "validation", kind: isBlock, block: validationStanza,
				doc: "A condition that the value has to meet."},
		},
	}
	validationStanza = &stanza{
		name: "validation",
		fields: []field{
			{name: "condition", kind: isBool, fallback: true, doc: "Must be true."},
			{name: "error_message", kind: isText, doc: "What is reported otherwise."},
		},
	}
)

func (d *decoder) variableBlock(b *hclsyntax.Block) *variable {
	if len(b.Labels) != 1 {
		d.errorf(b.DefRange(), `write variable "name" { ... }`, "a variable has one name")
		return nil
	}
	v := &variable{name: b.Labels[0], at: b.DefRange(), typ: cty.DynamicPseudoType}
	f := d.open(block{kind: "variable", body: b.Body, ctx: d.scope, head: b.DefRange()}, variableStanza)
	if attr := b.Body.Attributes["type"]; attr != nil {
		typ, defaults, found := typeexpr.TypeConstraintWithDefaults(attr.Expr)
		d.reportHCL(found)
		v.typ, v.defaults, v.bad = typ, defaults, found.HasErrors()
	}
	if attr := b.Body.Attributes["default"]; attr != nil && !v.bad {
		value, ok := d.value(attr.Expr, d.scope)
		v.bad = !ok || !d.set(v, value, attr.Expr.Range())
	}
	for _, inner := range f.blocks {
		v.checks = append(v.checks, inner.syntax)
	}
	return v
}

// variablesBlock reads the short form: lines of the form `name = default`.
func (d *decoder) variablesBlock(b *hclsyntax.Block) []*variable {
	var vs []*variable
	for _, attr := range attributes(b.Body) {
		value, ok := d.value(attr.Expr, d.scope)
		vs = append(vs, &variable{name: attr.Name, at: attr.NameRange, typ: value.Type(), value: value, bad: !ok})
	}
	return vs
}

// set converts the value to the variable's type and assigns it.
func (d *decoder) set(v *variable, value cty.Value, at hcl.Range) bool {
	if v.defaults != nil && !value.IsNull() {
		value = v.defaults.Apply(value)
	}
	converted, err := convert.Convert(value, v.typ)
	if err == nil {
		err = d.budget.charge(converted)
	}
	if err != nil {
		d.errorf(at, "", "the variable %q cannot have this value: %v", v.name, err)
		return false
	}
	v.value = converted
	return true
}

// assign sets variables from the variable files and the command line in the options.
func (d *decoder) assign(declared map[string]*variable) {
	names := slices.Collect(maps.Keys(declared))
	for _, src := range d.opts.VariableFiles {
		d.texts[src.Name] = src.Text
		body := d.parse(src, mapNames{})
		if body == nil {
			continue
		}
		for _, b := range body.Blocks {
			d.errorf(b.DefRange(), "write name = value lines", "a variable file holds no blocks")
		}
		for _, attr := range attributes(body) {
			if v := declared[attr.Name]; v == nil {
				d.errorf(attr.NameRange, didYouMean(attr.Name, names), "unknown variable %q", attr.Name)
			} else if value, ok := d.value(attr.Expr, d.scope); !ok || !d.set(v, value, attr.Expr.Range()) {
				v.bad = true
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(d.opts.Variables)) {
		s, at := d.opts.Variables[name], hcl.Range{Filename: "--var " + name}
		if v := declared[name]; v == nil {
			d.errorf(at, didYouMean(name, names), "unknown variable %q", name)
		} else if value, ok := d.commandLine(v, s, at); !ok || !d.set(v, value, at) {
			v.bad = true
		}
	}
}

// commandLine reads a value from the command line. A primitive or unknown type takes the text as is. Other types
// parse it as an expression. A variable without a type takes the type of its default.
func (d *decoder) commandLine(v *variable, s string, at hcl.Range) (cty.Value, bool) {
	typ := v.typ
	if typ == cty.DynamicPseudoType && v.value != cty.NilVal && !v.value.IsNull() {
		typ = v.value.Type()
	}
	if typ == cty.DynamicPseudoType || typ.IsPrimitiveType() {
		v.typ = typ
		return cty.StringVal(s), true
	}
	src := Source{Name: at.Filename, Text: []byte("value = " + s)}
	d.texts[src.Name] = src.Text
	body := d.parse(src, mapNames{})
	if body == nil || body.Attributes["value"] == nil {
		return cty.NilVal, false
	}
	return d.value(body.Attributes["value"].Expr, d.scope)
}

// variables returns the object var. An unset variable is an error, or unknown if UnsetUnknown is set.
func (d *decoder) variables(declared map[string]*variable) cty.Value {
	object := map[string]cty.Value{}
	for name, v := range declared {
		switch {
		case v.value != cty.NilVal && !v.bad:
			object[name] = v.value
			continue
		case !v.bad && !d.opts.UnsetUnknown:
			d.errorf(v.at, "give it a default, or --var "+name+"=...", "the variable %q has no value", name)
		}
		object[name] = cty.UnknownVal(v.typ.WithoutOptionalAttributesDeep())
	}
	all := cty.ObjectVal(object)
	ctx := d.scope.NewChild()
	ctx.Variables = map[string]cty.Value{"var": all}
	for _, name := range slices.Sorted(maps.Keys(declared)) {
		for _, b := range declared[name].checks {
			d.validate(declared[name], b, ctx)
		}
	}
	return all
}

// validate runs a validation block of a variable.
func (d *decoder) validate(v *variable, b *hclsyntax.Block, ctx *hcl.EvalContext) {
	f := d.open(block{kind: "validation", body: b.Body, ctx: ctx, head: b.DefRange()}, validationStanza)
	message := strings.TrimSpace(f.text("error_message"))
	if !f.isTrue("condition") {
		d.errorf(v.at, message, "the value of variable %q is not allowed", v.name)
	}
}

// locals returns the object local.
func (d *decoder) locals(root *hclsyntax.Body) cty.Value {
	attrs := map[string]*hclsyntax.Attribute{}
	for _, b := range root.Blocks {
		if b.Type != "locals" {
			continue
		}
		for name, attr := range b.Body.Attributes {
			if attrs[name] != nil {
				d.errorf(attr.NameRange, "remove one of the two", "the local %q is given twice", name)
			}
			attrs[name] = attr
		}
	}
	l := locals{decoder: d, attrs: attrs, values: map[string]cty.Value{}}
	for _, name := range slices.Sorted(maps.Keys(attrs)) {
		l.evaluate(name)
	}
	return cty.ObjectVal(l.values)
}

// locals evaluates each local after those that it refers to.
type locals struct {
	*decoder
	attrs  map[string]*hclsyntax.Attribute
	values map[string]cty.Value
	path   []string // being evaluated
}

// evaluate sets the value of a local, after those of the locals that it refers to. A cycle is an error.
func (l *locals) evaluate(name string) {
	attr := l.attrs[name]
	if _, done := l.values[name]; done || attr == nil {
		return
	}
	if slices.Contains(l.path, name) {
		l.errorf(attr.NameRange, "it is: "+strings.Join(append(l.path, name), " -> "), "the local %q depends on itself",
			name)
		l.values[name] = cty.DynamicVal
		return
	}
	l.path = append(l.path, name)
	needed := map[string]cty.Value{}
	for _, t := range hclsyntax.Variables(attr.Expr) {
		if other, ok := localName(t); ok {
			if l.evaluate(other); l.attrs[other] != nil {
				needed[other] = l.values[other]
			}
		}
	}
	l.path = l.path[:len(l.path)-1]
	if _, cyclic := l.values[name]; cyclic {
		return
	}
	ctx := l.scope.NewChild()
	ctx.Variables = map[string]cty.Value{"local": cty.ObjectVal(needed)}
	l.values[name], _ = l.value(attr.Expr, ctx)
}

// localName returns NAME of a reference local.NAME.
func localName(t hcl.Traversal) (string, bool) {
	if t.RootName() != "local" || len(t) < 2 {
		return "", false
	}
	step, ok := t[1].(hcl.TraverseAttr)
	return step.Name, ok
}
