package config

import (
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/hashicorp/hcl/v2"
	"github.com/hashicorp/hcl/v2/hclsyntax"
	"github.com/zclconf/go-cty/cty"

	"holdfast/registry"
)

// secretForm is the advice for a literal secret.
const secretForm = `say where it is to be had: name = { env = "VARIABLE" }, { file = "/path" } or { callback = "name" }`

var secretsField = field{name: "secrets", kind: isMap,
	doc: "Secrets for the plugin, each as a reference: `{ env = \"VARIABLE\" }`, " +
		"`{ file = \"/path\" }` or `{ callback = \"name\" }`, which the orchestrator answers."}

// secretReferences reads secrets. Diagnostics quote only their keys.
func (f *fields) secretReferences() map[string]registry.Secret {
	out := map[string]registry.Secret{}
	if attr := f.body.Attributes["secrets"]; attr != nil {
		f.secretObject(out, attr.Expr)
	}
	for _, b := range f.all("secrets") {
		for name, attr := range b.body.Attributes {
			f.secretItem(out, name, attr.Expr, b.ctx)
		}
		for _, inner := range b.body.Blocks {
			f.errorf(inner.TypeRange, secretForm, "secrets holds no blocks")
		}
	}
	if len(out) == 0 {
		return nil
	}
	return out
}

func (f *fields) secretObject(out map[string]registry.Secret, expr hclsyntax.Expression) {
	object, ok := expr.(*hclsyntax.ObjectConsExpr)
	if !ok {
		f.errorf(expr.Range(), secretForm, "secrets must be written out")
		return
	}
	for _, item := range object.Items {
		name, ok := constantKey(item.KeyExpr)
		if !ok {
			f.errorf(item.KeyExpr.Range(), secretForm, "the key of a secret must be a plain text")
			continue
		}
		f.secretItem(out, name, item.ValueExpr, f.ctx)
	}
}

// secretItem reads one reference. A literal secret is an error, although Nomad's volume files allow it.
func (f *fields) secretItem(
	out map[string]registry.Secret, name string, expr hclsyntax.Expression, ctx *hcl.EvalContext,
) {
	object, ok := expr.(*hclsyntax.ObjectConsExpr)
	if !ok {
		f.errorf(expr.Range(), secretForm, "the secret %q is not a reference: values do not belong into files", name)
		return
	}
	v, ok := f.decoder.value(object, ctx)
	if !ok {
		return
	}
	v, _ = v.Unmark() // of a reference in a key, which is a field that there is not
	s, wrong := secretOf(v)
	if wrong != "" {
		f.errorf(object.SrcRange, secretForm, "the secret %q %s", name, wrong)
		return
	}
	out[name] = s
}

// secretOf converts the object to a reference, or returns its error text.
func secretOf(v cty.Value) (s registry.Secret, wrong string) {
	fields := map[string]*string{"env": &s.Env, "file": &s.File, "callback": &s.Callback}
	elements := v.AsValueMap()
	for _, name := range slices.Sorted(maps.Keys(elements)) {
		field, known := fields[name]
		text, ok := stringOf(elements[name])
		switch {
		case !known:
			return s, "has a field that is none of env, file and callback"
		case !ok && !elements[name].IsKnown():
			text = "unknown"
		case !ok || text == "" || strings.Contains(text, "${"):
			return s, "has an empty " + name
		}
		*field = text
	}
	switch {
	case len(elements) != 1:
		return s, "must have exactly one of env, file and callback"
	case s.Env != "" && !envName.MatchString(s.Env):
		return s, "names no environment variable"
	case s.File != "" && !strings.HasPrefix(s.File, "/"):
		return s, "must give the file as an absolute path"
	}
	return s, ""
}

var envName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)
