package config

import (
	"bytes"
	"slices"

	"github.com/agext/levenshtein"
	"github.com/hashicorp/hcl/v2"
	"github.com/hashicorp/hcl/v2/hclsyntax"
	"github.com/zclconf/go-cty/cty"

	"holdfast/registry"
)

// decoder parses one file.
type decoder struct {
	src     Source
	opts    Options
	texts   map[string][]byte // by name, for snippets
	secrets []span            // of secrets blocks, never shown
	diags   registry.Diagnostics
	failed  bool // an error is among diags
	dropped int  // diagnostics over maxKept
	budget  budget
	spent   bool             // the exhausted budget is reported
	scope   *hcl.EvalContext // functions, var and local
}

func newDecoder(src Source, opts Options) *decoder {
	d := &decoder{src: src, opts: opts, texts: map[string][]byte{src.Name: src.Text}, budget: budget{maxWork}}
	d.scope = &hcl.EvalContext{Variables: map[string]cty.Value{}, Functions: d.functions()}
	return d
}

var bom = []byte("\ufeff")

// mapNames lists blocks that are read as maps. Volume files use quoted keys and several keys per line in them, which
// HCL 2 allows in objects only.
type mapNames struct {
	names      []string
	quotedOnly bool     // only blocks with quoted keys are read as maps
	inline     []string // names in an ephemeral block, which uses the syntax of volume files
}

var (
	jobMaps    = mapNames{names: []string{"env", "meta"}, quotedOnly: true, inline: []string{"context", "secrets"}}
	volumeMaps = mapNames{names: []string{"parameters", "mutable_parameters", "context", "secrets", "segments"}}
)

// maxSyntax bounds the reported syntax errors. Later ones are mostly consequences of the first.
const maxSyntax = 3

// parse returns the body of a text, or nil if it is not valid HCL. The limits of the text are checked before HCL parses
// it.
func (d *decoder) parse(src Source, maps mapNames) *hclsyntax.Body {
	text, start, out := bytes.Clone(src.Text), hcl.InitialPos, &outline{fault: bytesFault(src)}
	if bytes.HasPrefix(text, bom) { // becomes white space before the first column
		start.Column -= copy(text, "   ")
	}
	if out.fault == nil {
		out = outlineOf(text, src.Name, start)
	}
	d.hideSecrets(src, out)
	if f := out.fault; f != nil {
		d.errorf(f.at, f.detail, "%s", f.summary)
		return nil
	}
	cut := cutMaps(text, out.braces, maps)
	file, found := hclsyntax.ParseConfig(text, src.Name, start)
	if found.HasErrors() {
		d.syntax(found)
		return nil
	}
	body := file.Body.(*hclsyntax.Body)
	for _, m := range cut {
		if !d.restore(body, m) {
			return nil
		}
	}
	found = append(found, prepare(body, src.Text)...)
	d.reportHCL(found)
	return body
}

// syntax reports the first syntax errors, one a line.
func (d *decoder) syntax(found hcl.Diagnostics) {
	var lines []int
	for _, h := range found {
		if h.Severity != hcl.DiagError || h.Subject == nil || slices.Contains(lines, h.Subject.Start.Line) {
			continue
		}
		lines = append(lines, h.Subject.Start.Line)
		if len(lines) <= maxSyntax {
			d.reportHCL(hcl.Diagnostics{h})
		}
	}
}

// hideSecrets records the spans of secrets in the main file, including blocks with a misspelt name. In a malformed text
// everything after the first of them, or after the first password, counts as secret.
func (d *decoder) hideSecrets(src Source, out *outline) {
	if src.Name != d.src.Name {
		return
	}
	d.secrets = append(d.secrets, out.secrets...)
	for _, b := range out.braces {
		if levenshtein.Distance(b.word, secretsName, nil) <= 2 {
			d.secrets = append(d.secrets, span{b.open, b.close})
		}
	}
	for _, word := range []string{"secret", "password"} {
		if at := bytes.Index(src.Text, []byte(word)); at >= 0 && out.fault != nil {
			d.secrets = append(d.secrets, span{at + len(word), len(src.Text) + 1})
		}
	}
}

// cutMaps blanks the blocks that are maps and returns them with their text.
func cutMaps(text []byte, braces []brace, maps mapNames) []cutMap {
	var inline []brace
	for _, b := range braces {
		if len(maps.inline) > 0 && levenshtein.Distance(b.word, "ephemeral", nil) <= 2 {
			inline = append(inline, b)
		}
	}
	var cut []cutMap
	for _, b := range braces {
		isBlock := !bytes.Contains(text[b.at:b.open], []byte("="))
		if isBlock && (maps.has(b, text) || slices.Contains(maps.inline, b.word) &&
			slices.ContainsFunc(inline, b.within)) {
			cut = append(cut, cutMap{b, bytes.Clone(text[b.open:b.close])})
		}
	}
	// A map inside another map was cut with the outer one, so it is not cut by itself.
	cut = slices.DeleteFunc(cut, func(m cutMap) bool {
		return slices.ContainsFunc(cut, func(o cutMap) bool { return m.within(o.brace) })
	})
	for _, m := range cut {
		blank(text[m.at:m.close])
	}
	return cut
}

// has reports whether the block is read as a map, at whatever level of the file it is.
func (m mapNames) has(b brace, text []byte) bool {
	quoted := bytes.HasPrefix(bytes.TrimLeft(text[b.open+1:b.close-1], " \t\r\n"), []byte(`"`))
	return slices.Contains(m.names, b.word) && (quoted || !m.quotedOnly)
}

func (b brace) within(o brace) bool { return o.open < b.at && b.close < o.close }

type cutMap struct {
	brace
	text []byte // { ... }
}

func blank(text []byte) {
	for i, c := range text {
		if c != '\n' && c != '\r' {
			text[i] = ' '
		}
	}
}

// restore puts a cut map back into its body as an attribute with an object value.
func (d *decoder) restore(body *hclsyntax.Body, m cutMap) bool {
	at := d.src.rangeOf(m.open, m.close)
	expr, found := hclsyntax.ParseExpression(m.text, d.src.Name, at.Start)
	if found.HasErrors() {
		d.syntax(found)
		return false
	}
	object, ok := expr.(*hclsyntax.ObjectConsExpr)
	if !ok {
		d.errorf(at, "write it as name = value lines", "not a map")
		return false
	}
	name := d.src.rangeOf(m.at, m.at+len(m.word))
	in := innermost(body, m.at)
	if _, exists := in.Attributes[m.word]; exists && m.word == "segments" {
		d.restoreBlock(in, object, name)
		return true
	} else if exists {
		d.errorf(name, "join the two", "%s is given twice", m.word)
		return false
	}
	in.Attributes[m.word] = &hclsyntax.Attribute{
		Name: m.word, Expr: object, SrcRange: hcl.RangeBetween(name, at), NameRange: name, EqualsRange: name,
	}
	return true
}

// restoreBlock puts a cut map back as a block, because segments may occur several times.
func (d *decoder) restoreBlock(in *hclsyntax.Body, object *hclsyntax.ObjectConsExpr, name hcl.Range) {
	b := &hclsyntax.Block{
		Type: "segments", TypeRange: name, OpenBraceRange: object.OpenRange, CloseBraceRange: object.SrcRange,
		Body: &hclsyntax.Body{Attributes: hclsyntax.Attributes{}, SrcRange: object.SrcRange, EndRange: object.SrcRange},
	}
	for _, item := range object.Items {
		at := item.KeyExpr.Range()
		key, ok := constantKey(item.KeyExpr)
		if _, exists := b.Body.Attributes[key]; exists {
			d.errorf(at, "give each value a segments block of its own", "the key %q is given twice", key)
		} else if !ok {
			d.errorf(at, "write it out", "the key of a segment must be a plain text")
		}
		b.Body.Attributes[key] = &hclsyntax.Attribute{Name: key, Expr: item.ValueExpr, SrcRange: at, NameRange: at,
			EqualsRange: at}
	}
	in.Blocks = append(in.Blocks, b)
}

// innermost returns the innermost body that contains the byte at.
func innermost(body *hclsyntax.Body, at int) *hclsyntax.Body {
	for _, b := range body.Blocks {
		if b.OpenBraceRange.Start.Byte < at && at < b.CloseBraceRange.End.Byte {
			return innermost(b.Body, at)
		}
	}
	return body
}
