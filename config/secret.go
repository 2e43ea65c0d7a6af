package config

import (
	"regexp"
	"strings"

	"github.com/hashicorp/hcl/v2"
	"github.com/hashicorp/hcl/v2/hclsyntax"
	"github.com/zclconf/go-cty/cty"

	"holdfast/registry"
)

// maxSecret bounds a secret's value, in bytes.
const maxSecret = 64 << 10

// secretForm is the advice for a literal secret.
const secretForm = "write a reference: " + secretForms

const secretForms = `name = { env = "VARIABLE" }, { file = "/path" } or { callback = "name" }`

var secretsField = field{name: "secrets", kind: isMap,
	doc: "Secrets for the plugin, each as a reference: `{ env = \"VARIABLE\" }`, " +
		"`{ file = \"/path\" }` or `{ callback = \"name\" }`, which the orchestrator answers. A volume file may also " +
		"have the value itself: it is moved into a file in the state directory, with a warning."}

// secretReferences reads secrets. Diagnostics quote only their keys.
func (f *fields) secretReferences() map[string]registry.Secret {
	out := map[string]registry.Secret{}
	if attr := f.body.Attributes["secrets"]; attr != nil {
		object, ok := attr.Expr.(*hclsyntax.ObjectConsExpr)
		if !ok {
			f.errorf(attr.Expr.Range(), secretForm, "secrets must be an object, { ... }, not another expression")
			return nil
		}
		for _, item := range object.Items {
			if name, ok := constantKey(item.KeyExpr); ok {
				f.secretItem(out, name, item.ValueExpr, f.ctx)
			} else {
				f.errorf(item.KeyExpr.Range(), secretForm, "the key of a secret must be a plain text")
			}
		}
	}
	for _, b := range f.all("secrets") {
		for _, attr := range attributes(b.body) {
			f.secretItem(out, attr.Name, attr.Expr, b.ctx)
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

// secretItem reads one reference, or a literal.
func (f *fields) secretItem(
	out map[string]registry.Secret, name string, expr hclsyntax.Expression, ctx *hcl.EvalContext,
) {
	object, ok := expr.(*hclsyntax.ObjectConsExpr)
	if !ok {
		out[name] = f.literalSecret(name, expr, ctx)
		return
	}
	v, ok := f.decoder.value(object, ctx)
	if !ok {
		return
	}
	v, _ = v.Unmark() // a mark comes from a reference in a key, which secretOf reports as an unknown field
	s, wrong := secretOf(v)
	if wrong != "" {
		f.errorf(object.SrcRange, secretForm, "the secret %q %s", name, wrong)
		return
	}
	out[name] = s
}

// literalSecret reads a literal secret. Only a volume file may have one, as in Nomad: a job is stored with all that it
// contains.
func (f *fields) literalSecret(name string, expr hclsyntax.Expression, ctx *hcl.EvalContext) (s registry.Secret) {
	if f.stanza != specStanza {
		f.errorf(expr.Range(), secretForm,
			"the secret %q is not a reference: a job is stored with all that it contains", name)
		return s
	}
	v, ok := f.decoder.value(expr, ctx)
	raw, _ := v.UnmarkDeep()
	if !ok || !raw.IsKnown() {
		return s
	}
	text, ok := stringOf(v)
	switch {
	case atRunTime(v):
		f.errorf(expr.Range(), "write $${ for a ${ in the value, or a reference: "+secretForms,
			"the secret %q holds a reference that is known at run time only", name)
	case !ok:
		f.errorf(expr.Range(), secretForm, "the secret %q must be a string, not %s", name, kindOf(v))
	case text == "":
		f.errorf(expr.Range(), secretForm, "the secret %q is empty", name)
	case len(text) > maxSecret:
		f.errorf(expr.Range(), "", "the secret %q has %d bytes; at most %d are allowed", name, len(text), maxSecret)
	default:
		s.Literal = registry.SecretValue(text)
		f.warnf(expr.Range(), "a reference keeps it out of files: "+secretForms,
			"the secret %q is a literal; Holdfast keeps it in a file that only its user can read", name)
	}
	return s
}

// secretOf converts the object to a reference, or returns its error text. The reference is empty if it depends on a
// variable without a value.
func secretOf(v cty.Value) (s registry.Secret, wrong string) {
	fields := map[string]*string{"env": &s.Env, "file": &s.File, "callback": &s.Callback}
	if !v.IsKnown() { // a key depends on such a variable
		return s, ""
	}
	elements := v.AsValueMap()
	for name := range elements {
		if fields[name] == nil {
			return s, "has a field that is none of env, file and callback"
		}
	}
	if len(elements) != 1 {
		return s, "must have exactly one of env, file and callback"
	}
	for name, element := range elements {
		text, ok := stringOf(element)
		switch {
		case !element.IsKnown():
			return s, ""
		case atRunTime(element):
			return s, "depends on the run time: references are not resolved in " + name
		case !ok || text == "":
			return s, "has an empty " + name
		case name == "env" && !envName.MatchString(text):
			return s, "names no environment variable"
		case name == "file" && !strings.HasPrefix(text, "/"):
			return s, "must give the file as an absolute path"
		}
		*fields[name] = text
	}
	return s, ""
}

var envName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)
