package config

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hashicorp/hcl/v2"
	"github.com/hashicorp/hcl/v2/hclsyntax"
	"github.com/zclconf/go-cty/cty"
	"github.com/zclconf/go-cty/cty/convert"

	"holdfast/registry"
)

// block is an HCL block after dynamic expansion, with the evaluation context of its expressions.
type block struct {
	kind   string
	labels []string
	body   *hclsyntax.Body
	ctx    *hcl.EvalContext
	head   hcl.Range        // range of diagnostics about the whole block
	syntax *hclsyntax.Block // nil for a file
}

// attributes returns the attributes of a body in source order. Their evaluation in another order would exhaust the
// budget at another attribute.
func attributes(body *hclsyntax.Body) []*hclsyntax.Attribute {
	return slices.SortedFunc(maps.Values(body.Attributes), func(a, b *hclsyntax.Attribute) int {
		return cmp.Compare(a.NameRange.Start.Byte, b.NameRange.Start.Byte)
	})
}

// unsure reports whether a value in the block depends on a variable without a value. A check that compares several
// values of a block leaves out such a block.
func (d *decoder) unsure(b block) bool {
	depends := false
	_ = hclsyntax.VisitAll(b.body, func(node hclsyntax.Node) hcl.Diagnostics {
		if n, is := node.(*hclsyntax.ScopeTraversalExpr); is && !depends {
			v, found := n.Traversal.TraverseAbs(b.ctx)
			depends = !found.HasErrors() && (d.overBudget(b.head, d.budget.charge(v)) || !v.IsWhollyKnown())
		}
		return nil
	})
	return depends
}

// inner returns the blocks in b in source order, with dynamic blocks expanded. unexpanded lists the types of dynamic
// blocks that cannot be expanded: for_each is invalid, or depends on a variable without a value.
func (d *decoder) inner(b block) (blocks []block, unexpanded []string) {
	for _, s := range b.body.Blocks {
		if s.Type != "dynamic" {
			blocks = append(blocks, block{s.Type, s.Labels, s.Body, b.ctx, s.DefRange(), s})
			continue
		}
		expanded, ok := d.expand(s, b.ctx)
		blocks = append(blocks, expanded...)
		if !ok {
			unexpanded = append(unexpanded, s.Labels...)
		}
	}
	return blocks, unexpanded
}

// blockWork is the budget charged per expanded block.
const blockWork = 1024

var dynamicStanza = &stanza{name: "dynamic", fields: []field{
	{name: "for_each", kind: isAny}, {name: "iterator", kind: isAny}, {name: "labels", kind: isAny},
	{name: "content", kind: isBlock},
}}

// expand expands a dynamic block into one block per element of for_each. ok is false if not all elements are known.
func (d *decoder) expand(s *hclsyntax.Block, ctx *hcl.EvalContext) (out []block, ok bool) {
	if len(s.Labels) != 1 {
		d.errorf(s.DefRange(), `write dynamic "type of block" { ... }`, "a dynamic block has one label")
		return nil, false
	}
	var content *hclsyntax.Block
	for _, b := range s.Body.Blocks {
		if b.Type == "content" {
			content = b
		}
	}
	each := s.Body.Attributes["for_each"]
	if content == nil || each == nil || len(s.Body.Blocks) != 1 {
		d.errorf(s.DefRange(), "write for_each = ... and one content { ... }", "this dynamic block is not complete")
		return nil, false
	}
	d.checkNames(block{kind: "dynamic", body: s.Body, ctx: ctx, head: s.DefRange()}, dynamicStanza)
	all, ok := d.value(each.Expr, ctx)
	all, _ = all.Unmark()
	if !ok || !all.IsKnown() {
		return nil, false
	}
	if all.IsNull() || !all.CanIterateElements() {
		d.errorf(each.Expr.Range(), "give a list, a set or a map", "for_each cannot be %s", kindOf(all))
		return nil, false
	}
	for it := all.ElementIterator(); it.Next(); {
		if d.budget.spend(blockWork) != nil {
			d.overBudget(each.Expr.Range(), errWork)
			return out, false
		}
		key, value := it.Element()
		child := ctx.NewChild()
		child.Variables = map[string]cty.Value{iteratorOf(s): cty.ObjectVal(map[string]cty.Value{"key": key,
			"value": value})}
		labels, known := d.dynamicLabels(s, child)
		if !known {
			return out, false
		}
		out = append(out, block{s.Labels[0], labels, content.Body, child, s.DefRange(), content})
	}
	return out, true
}

// dynamicLabels returns the labels of one block that a dynamic block makes. known is false if they depend on a variable
// without a value.
func (d *decoder) dynamicLabels(s *hclsyntax.Block, ctx *hcl.EvalContext) (labels []string, known bool) {
	attr := s.Body.Attributes["labels"]
	if attr == nil {
		return nil, true
	}
	v, ok := d.value(attr.Expr, ctx)
	if !ok {
		return nil, true
	}
	if !v.IsWhollyKnown() {
		return nil, false
	}
	labels, ok = stringsOf(v)
	if !ok {
		d.errorf(attr.Expr.Range(), "give a list of strings", "labels cannot be %s", kindOf(v))
	}
	return labels, true
}

// stringsOf converts the value to a list of strings. It returns false if that is impossible, or if the value has a null
// or unknown part.
func stringsOf(v cty.Value) ([]string, bool) {
	v, _ = v.UnmarkDeep()
	list, err := convert.Convert(v, cty.List(cty.String))
	if err != nil || list.IsNull() || !list.IsWhollyKnown() {
		return nil, false
	}
	var out []string
	for _, s := range list.AsValueSlice() {
		if s.IsNull() {
			return nil, false
		}
		out = append(out, s.AsString())
	}
	return out, true
}

// fields reads the fields of a block and reports invalid values as diagnostics.
type fields struct {
	*decoder
	block
	stanza     *stanza
	blocks     []block
	unexpanded []string // types of dynamic blocks that are not among blocks
	constant   bool     // maps too must not contain run-time references
}

// open returns the fields of the block. It checks the names in the block against s, and that required fields are set.
func (d *decoder) open(b block, s *stanza) *fields {
	d.checkNames(b, s)
	f := d.fields(b, s)
	for _, field := range s.fields {
		if field.required {
			f.need(field.name)
		}
	}
	return f
}

// fields returns the fields of the block without checking names.
func (d *decoder) fields(b block, s *stanza) *fields {
	blocks, unexpanded := d.inner(b)
	return &fields{decoder: d, block: b, stanza: s, blocks: blocks, unexpanded: unexpanded}
}

// all returns the inner blocks of the type.
func (f *fields) all(kind string) []block {
	return slices.DeleteFunc(slices.Clone(f.blocks), func(b block) bool { return b.kind != kind })
}

// lacks reports whether there is no inner block of the type, nor a dynamic block that may make one.
func (f *fields) lacks(kind string) bool {
	return len(f.all(kind)) == 0 && !slices.Contains(f.unexpanded, kind)
}

// one returns the inner block of the type, if present. It reports a second such block as an error.
func (f *fields) one(kind string) (block, bool) {
	found := f.all(kind)
	if len(found) == 0 {
		return block{}, false
	}
	if len(found) > 1 {
		f.errorf(found[1].head, "keep one of them", "%s has more than one %s block", f.kind, kind)
	}
	if len(found[0].labels) > 0 {
		f.errorf(found[0].head, "write "+kind+" { ... }", "%s has no name", kind)
	}
	return found[0], true
}

// misspelt reports whether the type of an inner block is a likely misspelling of kind.
func (f *fields) misspelt(kind string) bool {
	return slices.ContainsFunc(f.blocks, func(b block) bool {
		return b.kind != kind && nearest(b.kind, []string{kind}) != ""
	})
}

// rangeOf returns the range of the attribute's value, or the block's head if the attribute is absent.
func (f *fields) rangeOf(name string) hcl.Range {
	if attr := f.body.Attributes[name]; attr != nil {
		return attr.Expr.Range()
	}
	return f.head
}

// has reports whether the attribute is set. As usual in HCL, null counts as unset.
func (f *fields) has(name string) bool {
	attr := f.body.Attributes[name]
	if attr == nil {
		return false
	}
	v, ok := f.decoder.value(attr.Expr, f.ctx)
	v, _ = v.Unmark()
	return !ok || !v.IsNull()
}

// given reports whether the attribute has a value. An attribute that depends on a variable without a value is not
// given, as that value may be null.
func (f *fields) given(name string) bool {
	_, ok := f.valueAtRunTime(name)
	return ok
}

// need reports each missing attribute as an error.
func (f *fields) need(names ...string) {
	for _, name := range names {
		if !f.has(name) {
			f.errorf(f.head, "add "+name+" = ...", "%s has no %s", f.kind, name)
		}
	}
}

// value returns the attribute's value. It returns false if the value is unset, null, unknown or invalid. A run-time
// reference is an error.
func (f *fields) value(name string) (cty.Value, bool) {
	v, ok := f.valueAtRunTime(name)
	if ok && atRunTime(v) {
		f.errorf(f.rangeOf(name), insteadOf(name, v),
			"%s is needed before a task runs; it cannot depend on the run time", name)
		return v, false
	}
	v, _ = v.UnmarkDeep()
	return v, ok
}

// insteadOf returns what to write instead of a value with run-time references.
func insteadOf(name string, v cty.Value) string {
	text, _ := stringOf(v)
	if name == "source" && strings.Contains(text, "NOMAD_ALLOC_INDEX") {
		return "write per_alloc = true, which appends the index of the alloc, and source without it"
	}
	if found := templateName.FindStringSubmatch(text); found != nil {
		return fmt.Sprintf("write the value itself, or add variable %q { type = string } to the file and write %s = %q",
			found[1], name, templateName.ReplaceAllString(text, "${var.$1}"))
	}
	// A reference whose root a job cannot have is probably from another tool.
	if root, _, _ := strings.Cut(strings.TrimPrefix(text, "${"), "."); !slices.Contains(runtimeRoots, root) &&
		strings.HasPrefix(text, "${") && !allCaps.MatchString(strings.TrimSuffix(root, "}")) {
		return renderFirst + ", or write the value itself"
	}
	return "use a variable, or write the value itself: only blocks that Holdfast passes on may have such references"
}

// templateName matches a reference to a name that no scope of a job has, often meant for a template of Terraform.
var templateName = regexp.MustCompile(`\$\{([a-z][a-z0-9_]*)\}`)

const renderFirst = "this looks like a template of another tool: render it first"

// valueAtRunTime is value for an attribute that may have run-time references. The value keeps its marks.
func (f *fields) valueAtRunTime(name string) (cty.Value, bool) {
	attr := f.body.Attributes[name]
	if attr == nil {
		return cty.DynamicVal, false
	}
	v, ok := f.decoder.value(attr.Expr, f.ctx)
	if !ok {
		return v, false
	}
	raw, _ := v.Unmark()
	return v, raw.IsWhollyKnown() && !raw.IsNull()
}

func (f *fields) wrongType(name, wanted string, v cty.Value) {
	f.errorf(f.rangeOf(name), "give "+wanted, "%s cannot be %s", name, kindOf(v))
}

// text reads a string attribute. It returns the fallback if the attribute is unset or invalid.
func (f *fields) text(name string) string {
	declared := f.declared(name, isText)
	if s, ok := f.primitive(name); ok {
		return s
	}
	return fallbackOf[string](declared)
}

// primitive reads a string, or a value that HCL converts to one.
func (f *fields) primitive(name string) (string, bool) {
	v, ok := f.value(name)
	if !ok {
		return "", false
	}
	if !v.Type().IsPrimitiveType() {
		f.wrongType(name, "a string", v)
		return "", false
	}
	return stringOf(v)
}

// isTrue reads a bool attribute.
func (f *fields) isTrue(name string) bool {
	declared := f.declared(name, isBool)
	v, ok := f.value(name)
	if !ok {
		return fallbackOf[bool](declared)
	}
	b, err := convert.Convert(v, cty.Bool)
	if err != nil {
		f.wrongType(name, "true or false", v)
		return fallbackOf[bool](declared)
	}
	return b.True()
}

// integer reads a whole number within the declared limits.
func (f *fields) integer(name string) int64 {
	declared := f.declared(name, isNumber)
	v, ok := f.value(name)
	if !ok {
		return fallbackOf[int64](declared)
	}
	n, err := convert.Convert(v, cty.Number)
	if err != nil {
		f.wrongType(name, "a whole number", v)
		return fallbackOf[int64](declared)
	}
	i, exact := n.AsBigFloat().Int64()
	if !n.AsBigFloat().IsInt() || exact != 0 || i < declared.low || i > declared.high {
		f.errorf(f.rangeOf(name), "", "%s must be a whole number from %d to %d", name, declared.low, declared.high)
		return fallbackOf[int64](declared)
	}
	return i
}

// duration reads a duration within the declared limits.
func (f *fields) duration(name string) time.Duration {
	declared := f.declared(name, isDuration)
	s, ok := f.primitive(name)
	if !ok {
		return fallbackOf[time.Duration](declared)
	}
	low, high := time.Duration(declared.low), time.Duration(declared.high)
	got, err := time.ParseDuration(strings.TrimSpace(s))
	switch _, number := strconv.ParseFloat(s, 64); {
	case err != nil && number == nil:
		f.errorf(f.rangeOf(name), `add a unit: "30s", "5m"`, "%s has no unit", name)
	case err != nil:
		f.errorf(f.rangeOf(name), `write it as "30s", "5m" or "1h30m"`, "%s is not a duration", name)
	case got < low || got > high:
		f.errorf(f.rangeOf(name), "", "%s must be from %s to %s", name, low, high)
	default:
		return got
	}
	return fallbackOf[time.Duration](declared)
}

// oneOf reads an attribute that must be one of the declared words.
func oneOf[T ~string](f *fields, name string) T {
	declared := f.declared(name, isChoice)
	s, ok := f.primitive(name)
	if !ok {
		if f.has(name) {
			return "" // it is invalid or unknown, so the default does not apply
		}
		return T(fallbackOf[string](declared))
	}
	if slices.Contains(declared.words, s) {
		return T(s)
	}
	detail := "give one of: " + strings.Join(declared.words, ", ")
	if near := nearest(s, declared.words); near != "" {
		detail = fmt.Sprintf("did you mean %q? The words are: %s", near, strings.Join(declared.words, ", "))
	}
	f.errorf(f.rangeOf(name), detail, "%s cannot be %q", name, s)
	return ""
}

// parsed reads an attribute with a Parse function of package registry.
func parsed[T ~string](f *fields, name string, parse func(string) (T, error)) T {
	declared := f.declared(name, isText)
	s, ok := f.primitive(name)
	if !ok {
		return T(fallbackOf[string](declared))
	}
	t, err := parse(s)
	if err != nil {
		f.errorf(f.rangeOf(name), "", "%v", err)
	}
	return t
}

// flags reads a list of mount flags.
func (f *fields) flags(name string) registry.Flags {
	f.declared(name, isStrings)
	v, ok := f.value(name)
	if !ok {
		return ""
	}
	list, ok := stringsOf(v)
	if !ok || v.Type() == cty.String {
		f.wrongType(name, `a list of strings, as in ["noatime"]`, v)
		return ""
	}
	for _, flag := range list {
		if flag == "" || strings.ContainsAny(flag, "\r\n\x00") {
			f.errorf(f.rangeOf(name), "give each flag as a string of its own",
				"a mount flag is empty or contains a line break")
			return ""
		}
	}
	return registry.FlagsOf(list)
}
