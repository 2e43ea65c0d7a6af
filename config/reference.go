package config

import (
	"bytes"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/hashicorp/hcl/v2"
	"github.com/hashicorp/hcl/v2/hclsyntax"
	"github.com/zclconf/go-cty/cty"
)

// runtimeMark marks every value that contains a run-time reference.
const runtimeMark = markName("known at run time only")

type markName string

// prepare rewrites a parsed text in place for evaluation. Run-time references become constants of their own text.
// Expressions that repeat work are metered. Heredoc lines end in "\n". Repeated keys are reported.
func prepare(root hclsyntax.Node, text []byte) hcl.Diagnostics {
	return hclsyntax.Walk(root, &preparation{text: text})
}

type preparation struct {
	text  []byte
	bound []string         // names that enclosing for expressions and dynamic blocks define
	path  []hclsyntax.Node // the enclosing nodes, innermost last
}

func (p *preparation) Enter(node hclsyntax.Node) hcl.Diagnostics {
	p.bound = append(p.bound, binds(node)...)
	var found hcl.Diagnostics
	switch n := node.(type) {
	case *hclsyntax.ScopeTraversalExpr:
		p.renameReference(n)
	case *hclsyntax.LiteralValueExpr:
		p.lineEnds(n)
	case *hclsyntax.ObjectConsExpr:
		found = repeatedKeys(n)
	}
	p.path = append(p.path, node)
	return found
}

func (p *preparation) Exit(node hclsyntax.Node) hcl.Diagnostics {
	p.path = p.path[:len(p.path)-1]
	p.bound = p.bound[:len(p.bound)-len(binds(node))]
	meter(node)
	return nil
}

// binds returns the names that the node defines for its children.
func binds(node hclsyntax.Node) []string {
	switch n := node.(type) {
	case *hclsyntax.ForExpr:
		if n.KeyVar != "" {
			return []string{n.KeyVar, n.ValVar}
		}
		return []string{n.ValVar}
	case *hclsyntax.Block:
		if n.Type == "dynamic" && len(n.Labels) > 0 {
			return []string{iteratorOf(n)}
		}
	}
	return nil
}

// iteratorOf returns the iterator name of a dynamic block.
func iteratorOf(b *hclsyntax.Block) string {
	if attr := b.Body.Attributes["iterator"]; attr != nil {
		if t, found := hcl.AbsTraversalForExpr(attr.Expr); !found.HasErrors() && len(t) == 1 {
			return t.RootName()
		}
	}
	return b.Labels[0]
}

var (
	runtimeRoots = []string{"node", "attr", "meta", "env", "device", "unique", "driver"}
	scopeRoots   = []string{"var", "local", "vars", "locals", "variable", "variables", "each"}
	allCaps      = regexp.MustCompile(`^[A-Z][A-Z0-9]*(_[A-Za-z0-9_-]*)?$`)
)

// renameReference renames a run-time reference to its whole text, which evaluates to that text (see constants). An
// unknown name counts as a run-time reference only in a template, where "${name}" may be resolved at run time.
func (p *preparation) renameReference(n *hclsyntax.ScopeTraversalExpr) {
	root := n.Traversal.RootName()
	if slices.Contains(p.bound, root) {
		return
	}
	known := slices.Contains(runtimeRoots, root) || allCaps.MatchString(root)
	if !known && (slices.Contains(scopeRoots, root) || !p.inTemplate()) {
		return
	}
	written := string(n.SrcRange.SliceBytes(p.text))
	n.Traversal = hcl.Traversal{hcl.TraverseRoot{Name: "${" + written + "}", SrcRange: n.SrcRange}}
}

func (p *preparation) inTemplate() bool {
	if len(p.path) == 0 {
		return false
	}
	switch p.path[len(p.path)-1].(type) {
	case *hclsyntax.TemplateExpr, *hclsyntax.TemplateWrapExpr:
		return true
	}
	return false
}

// constants adds the expression's run-time references to the context, under their names from renameReference. The value
// of each is its own text.
func constants(expr hclsyntax.Expression, ctx *hcl.EvalContext) *hcl.EvalContext {
	var values map[string]cty.Value
	for _, t := range hclsyntax.Variables(expr) {
		if name := t.RootName(); strings.HasPrefix(name, "${") {
			if values == nil {
				values = map[string]cty.Value{}
			}
			values[name] = cty.StringVal(name).Mark(runtimeMark)
		}
	}
	if values == nil {
		return ctx
	}
	child := ctx.NewChild()
	child.Variables = values
	return child
}

// lineEnds normalizes the line ends of a heredoc to "\n".
func (p *preparation) lineEnds(n *hclsyntax.LiteralValueExpr) {
	if !n.Val.Type().Equals(cty.String) || n.Val.IsNull() || n.SrcRange.End.Byte > len(p.text) {
		return
	}
	if bytes.Contains(n.SrcRange.SliceBytes(p.text), []byte("\r\n")) {
		n.Val = cty.StringVal(strings.ReplaceAll(n.Val.AsString(), "\r\n", "\n"))
	}
}

// repeatedKeys reports duplicate constant keys of an object. HCL would silently use the last.
func repeatedKeys(n *hclsyntax.ObjectConsExpr) hcl.Diagnostics {
	var found hcl.Diagnostics
	seen := map[string]bool{}
	for _, item := range n.Items {
		name, ok := constantKey(item.KeyExpr)
		switch {
		case ok && !seen[name]:
			seen[name] = true
		case ok:
			found = append(found, &hcl.Diagnostic{
				Severity: hcl.DiagError, Subject: item.KeyExpr.Range().Ptr(),
				Summary: fmt.Sprintf("the key %q is given twice", name), Detail: "remove one of the two",
			})
		}
	}
	return found
}

// constantKey returns the key of an object element, if it is a literal.
func constantKey(e hclsyntax.Expression) (string, bool) {
	if word := hcl.ExprAsKeyword(e); word != "" {
		return word, true
	}
	if key, ok := e.(*hclsyntax.ObjectConsKeyExpr); ok {
		e = key.Wrapped
	}
	if t, ok := e.(*hclsyntax.TemplateExpr); ok && t.IsStringLiteral() {
		v, found := t.Value(nil)
		return v.AsString(), !found.HasErrors()
	}
	return "", false
}
