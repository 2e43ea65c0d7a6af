package config

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/hashicorp/hcl/v2"
	"github.com/hashicorp/hcl/v2/hclsyntax"
	"github.com/zclconf/go-cty/cty"
	"github.com/zclconf/go-cty/cty/convert"
)

// value evaluates the expression and keeps its marks. It reports errors and returns false after one.
func (d *decoder) value(expr hclsyntax.Expression, ctx *hcl.EvalContext) (cty.Value, bool) {
	err := d.chargeReferences(expr, ctx)
	if d.overBudget(expr.Range(), err) {
		return cty.DynamicVal, false
	}
	v, found := expr.Value(constants(expr, ctx))
	if d.overBudget(expr.Range(), nil) {
		return cty.DynamicVal, false
	}
	d.reportHCL(found)
	if found.HasErrors() {
		return cty.DynamicVal, false
	}
	if _, err := sizeOf(v, maxWork); d.overBudget(expr.Range(), err) {
		return cty.DynamicVal, false
	}
	return v, true
}

// overBudget adds a diagnostic for err, or once for an exhausted budget. It returns true if no value may be used.
func (d *decoder) overBudget(at hcl.Range, err error) bool {
	switch {
	case d.budget.left > 0 && err != nil:
		d.errorf(at, "", "%v", err)
	case d.budget.left <= 0 && !d.spent:
		d.errorf(at, "", "%v", errWork)
		d.spent = true
	}
	return err != nil || d.spent
}

// chargeReferences charges the referenced values, once per reference.
func (d *decoder) chargeReferences(expr hclsyntax.Expression, ctx *hcl.EvalContext) error {
	for _, t := range hclsyntax.Variables(expr) {
		if v, found := t.TraverseAbs(ctx); !found.HasErrors() {
			if err := d.budget.charge(v); err != nil {
				return err
			}
		}
	}
	return nil
}

// atRunTime reports whether the value contains a run-time reference.
func atRunTime(v cty.Value) bool {
	_, marks := v.UnmarkDeep()
	_, found := marks[runtimeMark]
	return found
}

// jsonValue converts the value to its JSON form. Unknown values become null.
func jsonValue(v cty.Value) any {
	v, _ = v.Unmark()
	switch ty := v.Type(); {
	case v.IsNull() || !v.IsKnown():
		return nil
	case ty == cty.String:
		return v.AsString()
	case ty == cty.Bool:
		return v.True()
	case ty == cty.Number:
		if f := v.AsBigFloat(); !f.IsInf() {
			return json.Number(f.Text('f', -1))
		}
	case ty.IsMapType() || ty.IsObjectType():
		object := map[string]any{}
		for key, element := range v.Elements() {
			key, _ = key.Unmark()
			object[key.AsString()] = jsonValue(element)
		}
		return object
	case v.CanIterateElements():
		list := []any{}
		for _, element := range v.Elements() {
			list = append(list, jsonValue(element))
		}
		return list
	}
	return nil
}

// stringOf converts the value to a string by HCL's rules.
func stringOf(v cty.Value) (string, bool) {
	v, _ = v.Unmark()
	s, err := convert.Convert(v, cty.String)
	if err != nil || s.IsNull() || !s.IsKnown() {
		return "", false
	}
	return s.AsString(), true
}

// kindOf returns a readable name of the value's type.
func kindOf(v cty.Value) string {
	v, _ = v.Unmark()
	if v.IsNull() {
		return "null"
	}
	name := v.Type().FriendlyName()
	if strings.ContainsAny(name[:1], "aeiou") {
		return fmt.Sprintf("an %s", name)
	}
	return fmt.Sprintf("a %s", name)
}
