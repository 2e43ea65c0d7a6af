package config

import (
	"errors"

	"github.com/hashicorp/hcl/v2/hclsyntax"
	"github.com/zclconf/go-cty/cty"
	"github.com/zclconf/go-cty/cty/function"
)

// These limits bound the data that one file may create. Nested for expressions and chained locals grow exponentially.
const (
	maxWork     = 4 << 20 // bytes of text plus elementWork per element, of everything evaluated together
	elementWork = 128
	maxExponent = 4096 // of two, for numbers: a larger one takes long to print
)

var (
	errWork = errors.New("the expressions of this file make too much data; use smaller lists, fewer nested for " +
		"expressions or shorter locals")
	errNumber = errors.New("a number here is too large")
)

// budget is the remaining evaluation work of a file.
type budget struct{ left int }

// charge subtracts the size of the value from the budget.
func (b *budget) charge(v cty.Value) error {
	n, err := sizeOf(v, b.left)
	if err != nil {
		return err
	}
	return b.spend(n)
}

func (b *budget) spend(n int) error {
	if n > b.left || n < 0 {
		b.left = 0
		return errWork
	}
	b.left -= n
	return nil
}

// sizeOf returns the bytes of text in a value plus elementWork for each value in it. It stops soon after limit.
func sizeOf(v cty.Value, limit int) (int, error) {
	v, _ = v.Unmark()
	n := elementWork
	switch ty := v.Type(); {
	case v.IsNull() || !v.IsKnown():
	case ty == cty.String:
		n += len(v.AsString())
	case ty == cty.Number:
		f := v.AsBigFloat()
		if exp := f.MantExp(nil); f.IsInf() || exp > maxExponent || exp < -maxExponent {
			return 0, errNumber
		}
	case v.CanIterateElements():
		for it := v.ElementIterator(); n <= limit && it.Next(); {
			key, element := it.Element()
			for _, part := range []cty.Value{key, element} {
				m, err := sizeOf(part, limit-n)
				if err != nil {
					return 0, err
				}
				n += m
			}
		}
	}
	return n, nil
}

// These functions charge their argument to the budget and return it. Their names are not valid identifiers, so a file
// cannot call them. The operand function also rejects a string that arithmetic would convert to a too large number.
const (
	meterName   = "(meter)"
	operandName = "(operand)"
)

// meterFunction returns a function of HCL that charges its argument to the budget, checks it and returns it.
func (d *decoder) meterFunction(check func(cty.Value) error) function.Function {
	anything := function.Parameter{
		Name: "value", Type: cty.DynamicPseudoType, AllowNull: true, AllowUnknown: true, AllowDynamicType: true,
		AllowMarked: true,
	}
	return function.New(&function.Spec{
		Params: []function.Parameter{anything},
		Type:   func(args []cty.Value) (cty.Type, error) { return args[0].Type(), nil },
		Impl: func(args []cty.Value, _ cty.Type) (cty.Value, error) {
			return args[0], errors.Join(d.budget.charge(args[0]), check(args[0]))
		},
	})
}

// checkNumericText rejects a string that arithmetic would convert to a too large number.
func checkNumericText(v cty.Value) error {
	v, _ = v.Unmark()
	if v.Type() != cty.String || v.IsNull() || !v.IsKnown() {
		return nil
	}
	if n, err := cty.ParseNumberVal(v.AsString()); err == nil {
		_, err = sizeOf(n, 0)
		return err
	}
	return nil
}

// meter wraps the parts of an expression that can multiply work or create large numbers in calls of the functions
// above, so that their evaluation is charged to the budget.
func meter(node hclsyntax.Node) {
	switch n := node.(type) {
	case *hclsyntax.ForExpr:
		n.CollExpr, n.ValExpr = metered(n.CollExpr), metered(n.ValExpr)
		if n.KeyExpr != nil {
			n.KeyExpr = metered(n.KeyExpr)
		}
	case *hclsyntax.TemplateExpr:
		for i, part := range n.Parts {
			if _, constant := part.(*hclsyntax.LiteralValueExpr); !constant {
				n.Parts[i] = metered(part)
			}
		}
	case *hclsyntax.SplatExpr:
		n.Source = metered(n.Source)
	case *hclsyntax.UnaryOpExpr:
		n.Val = wrapped(operandName, n.Val)
	case *hclsyntax.BinaryOpExpr:
		n.LHS, n.RHS = wrapped(operandName, n.LHS), wrapped(operandName, n.RHS)
	}
}

func metered(e hclsyntax.Expression) hclsyntax.Expression { return wrapped(meterName, e) }

func wrapped(name string, e hclsyntax.Expression) hclsyntax.Expression {
	at := e.Range()
	return &hclsyntax.FunctionCallExpr{
		Name: name, Args: []hclsyntax.Expression{e}, NameRange: at, OpenParenRange: at, CloseParenRange: at,
	}
}
