package config

import (
	"crypto/md5"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/hashicorp/go-cty-funcs/cidr"
	"github.com/hashicorp/go-cty-funcs/encoding"
	"github.com/hashicorp/go-cty-funcs/uuid"
	"github.com/hashicorp/hcl/v2/ext/tryfunc"
	"github.com/hashicorp/hcl/v2/ext/typeexpr"
	"github.com/zclconf/go-cty/cty"
	"github.com/zclconf/go-cty/cty/convert"
	"github.com/zclconf/go-cty/cty/function"
	"github.com/zclconf/go-cty/cty/function/stdlib"
)

// carriers accept run-time references. They process the text around a reference and leave the reference unchanged.
// JSON is YAML, so yamlencode writes JSON.
var carriers = map[string]function.Function{
	"chunklist": stdlib.ChunklistFunc, "coalesce": stdlib.CoalesceFunc, "coalescelist": stdlib.CoalesceListFunc,
	"compact": stdlib.CompactFunc, "concat": stdlib.ConcatFunc, "element": stdlib.ElementFunc,
	"flatten": stdlib.FlattenFunc, "format": stdlib.FormatFunc, "formatlist": stdlib.FormatListFunc,
	"indent": stdlib.IndentFunc, "join": stdlib.JoinFunc, "jsonencode": stdlib.JSONEncodeFunc,
	"keys": stdlib.KeysFunc, "lookup": stdlib.LookupFunc, "merge": stdlib.MergeFunc, "reverse": reverseFunction,
	"slice": stdlib.SliceFunc, "values": stdlib.ValuesFunc, "zipmap": stdlib.ZipmapFunc, "chomp": stdlib.ChompFunc,
	"trimspace": stdlib.TrimSpaceFunc, "index": stdlib.IndexFunc, "yamlencode": stdlib.JSONEncodeFunc,
	"convert": typeexpr.ConvertFunc, "tostring": conversion(cty.String),
	"tolist": conversion(cty.List(cty.DynamicPseudoType)), "toset": conversion(cty.Set(cty.DynamicPseudoType)),
	"tomap": conversion(cty.Map(cty.DynamicPseudoType)),
}

// computers need the value itself and reject run-time references.
var computers = map[string]function.Function{
	"abs": stdlib.AbsoluteFunc, "ceil": stdlib.CeilFunc, "contains": stdlib.ContainsFunc,
	"csvdecode": stdlib.CSVDecodeFunc, "distinct": stdlib.DistinctFunc, "floor": stdlib.FloorFunc,
	"formatdate": stdlib.FormatDateFunc, "jsondecode": stdlib.JSONDecodeFunc, "log": stdlib.LogFunc,
	"lower": stdlib.LowerFunc, "max": stdlib.MaxFunc, "min": stdlib.MinFunc, "parseint": stdlib.ParseIntFunc,
	"pow": stdlib.PowFunc, "range": stdlib.RangeFunc, "regex": stdlib.RegexFunc, "regexall": stdlib.RegexAllFunc,
	"regex_replace": stdlib.RegexReplaceFunc, "replace": stdlib.ReplaceFunc,
	"setintersection": stdlib.SetIntersectionFunc, "setproduct": stdlib.SetProductFunc,
	"setsubtract": stdlib.SetSubtractFunc, "setunion": stdlib.SetUnionFunc, "signum": stdlib.SignumFunc,
	"sort": stdlib.SortFunc, "split": stdlib.SplitFunc, "strlen": stdlib.StrlenFunc, "strrev": stdlib.ReverseFunc,
	"substr": stdlib.SubstrFunc, "timeadd": stdlib.TimeAddFunc, "title": stdlib.TitleFunc, "trim": stdlib.TrimFunc,
	"trimprefix": stdlib.TrimPrefixFunc, "trimsuffix": stdlib.TrimSuffixFunc, "upper": stdlib.UpperFunc,
	"length": lengthFunction, "tonumber": conversion(cty.Number), "tobool": conversion(cty.Bool),
	"startswith": stringTest(strings.HasPrefix), "endswith": stringTest(strings.HasSuffix),
	"base64encode": encoding.Base64EncodeFunc, "base64decode": encoding.Base64DecodeFunc,
	"urlencode": encoding.URLEncodeFunc,
	"basename":  stringFunction(func(s string) (string, error) { return path.Base(s), nil }),
	"dirname":   stringFunction(func(s string) (string, error) { return path.Dir(s), nil }),
	// The home directory of the reader of the file is not known here.
	"pathexpand": stringFunction(func(s string) (string, error) { return s, nil }),
	"md5":        hexDigest(md5.New), "sha1": hexDigest(sha1.New), "sha256": hexDigest(sha256.New),
	"sha512": hexDigest(sha512.New),
	"uuidv5": uuid.V5Func, "cidrhost": cidr.HostFunc, "cidrnetmask": cidr.NetmaskFunc, "cidrsubnet": cidr.SubnetFunc,
	"cidrsubnets": cidr.SubnetsFunc,
}

// absent maps functions of other tools that are unsupported here to the reason.
var absent = map[string]string{
	"timestamp": pure, "uuidv4": pure, "bcrypt": pure, "yamldecode": noYAML,
	"rsadecrypt": "it is not offered; use a secret", "abspath": noFiles, "fileset": noFiles, "fileexists": noFiles,
	"templatefile": "it is not offered; use file() and a template block",
}

const (
	pure   = "it is not offered: the same text must always give the same answer; use a variable"
	noYAML = "it is not offered; use JSON, which is YAML too, and jsondecode()"
	// The host is asked only for files that the text names.
	noFiles = "it is not offered: the directory of the text is not known here; write the names out"
)

// functions returns the function table of one file. All but try and can charge the file's budget.
func (d *decoder) functions() map[string]function.Function {
	table := map[string]function.Function{"try": tryfunc.TryFunc, "can": tryfunc.CanFunc}
	table[meterName] = d.meterFunction(func(cty.Value) error { return nil })
	table[operandName] = d.meterFunction(checkNumericText)
	for name, f := range carriers {
		table[name] = d.bounded(name, f, true)
	}
	computing := maps.Clone(computers)
	computing["file"] = stringFunction(d.readFile)
	computing["filebase64"] = stringFunction(func(name string) (string, error) {
		b, err := d.readBytes(name)
		return base64.StdEncoding.EncodeToString(b), err
	})
	for name, f := range computing {
		table[name] = d.bounded(name, f, false)
	}
	for name, why := range absent {
		table[name] = failing(why)
	}
	return table
}

// bounded wraps f to charge the budget. Unless carries is set, it rejects run-time references.
func (d *decoder) bounded(name string, f function.Function, carries bool) function.Function {
	check := func(args []cty.Value) error {
		for i, arg := range args {
			if !carries && atRunTime(arg) {
				return function.NewArgErrorf(i, "cannot compute with a reference that is known at run time only")
			}
		}
		return d.budget.spend(elementWork + predictedWork(name, args))
	}
	spec := &function.Spec{
		Params: slices.Clone(f.Params()), VarParam: f.VarParam(),
		Type: func(args []cty.Value) (cty.Type, error) {
			if err := errors.Join(check(args), checkNumbers(name, args)); err != nil {
				return cty.DynamicPseudoType, err
			}
			return f.ReturnTypeForValues(args)
		},
		Impl: func(args []cty.Value, _ cty.Type) (cty.Value, error) {
			v, err := f.Call(args)
			if err == nil {
				err = d.budget.charge(v)
			}
			return v, err
		},
	}
	for i := range spec.Params {
		spec.Params[i].AllowMarked = true
	}
	if spec.VarParam != nil {
		last := *spec.VarParam
		last.AllowMarked = true
		spec.VarParam = &last
	}
	return function.New(spec)
}

// checkNumbers rejects too large numbers, including those in a string that the function converts to a number.
func checkNumbers(name string, args []cty.Value) error {
	reads := name == "tonumber" || name == "format" || name == "formatlist"
	for _, arg := range args {
		if _, err := sizeOf(arg, maxWork); err != nil {
			return err
		}
		if err := checkNumericText(arg); reads && err != nil {
			return err
		}
	}
	return nil
}

// wideVerb matches a verb of a format whose width has four or more digits, or is taken from an argument.
var wideVerb = regexp.MustCompile(`(^|[^%])(%%)*%[^%a-zA-Z]*([0-9]{4}|\*)`)

// predictedWork estimates the work of a call whose result can be about as large as a product of its arguments' sizes.
// It is 0 for other functions.
func predictedWork(name string, args []cty.Value) int {
	size := func(i int) int {
		if i >= len(args) {
			return 0
		}
		n, _ := sizeOf(args[i], maxWork)
		return min(n, 1<<30)
	}
	all := func() int {
		n := 0
		for i := range args {
			n += size(i)
		}
		return min(n, 1<<30)
	}
	switch name {
	case "replace", "regex_replace": // an empty pattern puts the replacement before each character
		return size(0) * (size(2) + 1 - elementWork)
	case "join":
		return size(0) * (all() / elementWork)
	case "indent":
		n, _ := args[0].Unmark()
		if n.IsNull() || !n.IsKnown() {
			return 0
		}
		width, _ := n.AsBigFloat().Int64()
		return int(min(max(width, 0), 1<<30)) * size(1)
	case "setproduct":
		n := 1
		for i := range args {
			n = min(n*max(size(i)/elementWork, 1), 1<<40)
		}
		return n * elementWork
	case "format", "formatlist":
		f, _ := stringOf(args[0])
		if wideVerb.MatchString(f) {
			return maxWork + 1
		}
		return strings.Count(f, "%") * all()
	}
	return 0
}

// stringFunction wraps f as an HCL function of one string.
func stringFunction(f func(string) (string, error)) function.Function {
	return function.New(&function.Spec{
		Params: []function.Parameter{{Name: "text", Type: cty.String}},
		Type:   function.StaticReturnType(cty.String),
		Impl: func(args []cty.Value, _ cty.Type) (cty.Value, error) {
			s, err := f(args[0].AsString())
			return cty.StringVal(s), err
		},
	})
}

// hexDigest returns an HCL function that returns the digest of a string in hex.
func hexDigest(of func() hash.Hash) function.Function {
	return stringFunction(func(s string) (string, error) {
		h := of()
		_, _ = io.WriteString(h, s) // never fails
		return hex.EncodeToString(h.Sum(nil)), nil
	})
}

func stringTest(f func(s, part string) bool) function.Function {
	return function.New(&function.Spec{
		Params: []function.Parameter{{Name: "text", Type: cty.String}, {Name: "part", Type: cty.String}},
		Type:   function.StaticReturnType(cty.Bool),
		Impl: func(args []cty.Value, _ cty.Type) (cty.Value, error) {
			return cty.BoolVal(f(args[0].AsString(), args[1].AsString())), nil
		},
	})
}

// conversion returns a function that converts its argument to the type.
func conversion(to cty.Type) function.Function {
	return function.New(&function.Spec{
		Params: []function.Parameter{{Name: "value", Type: cty.DynamicPseudoType, AllowNull: true}},
		Type: func(args []cty.Value) (cty.Type, error) {
			v, err := convert.Convert(args[0], to)
			if err != nil {
				return cty.DynamicPseudoType, function.NewArgError(0, err)
			}
			return v.Type(), nil
		},
		Impl: func(args []cty.Value, _ cty.Type) (cty.Value, error) { return convert.Convert(args[0], to) },
	})
}

// lengthFunction counts the elements of a collection, or the characters of a text.
var lengthFunction = function.New(&function.Spec{
	Params: []function.Parameter{{Name: "value", Type: cty.DynamicPseudoType, AllowDynamicType: true}},
	Type:   function.StaticReturnType(cty.Number),
	Impl: func(args []cty.Value, _ cty.Type) (cty.Value, error) {
		if v := args[0]; v.Type() == cty.String {
			return stdlib.Strlen(v)
		} else if v.CanIterateElements() {
			return cty.NumberIntVal(int64(v.LengthInt())), nil
		}
		return cty.DynamicVal, function.NewArgErrorf(0, "a list, a map or a text is wanted")
	},
})

// reverseFunction reverses a list or the characters of a string.
var reverseFunction = function.New(&function.Spec{
	Params: []function.Parameter{{Name: "value", Type: cty.DynamicPseudoType, AllowMarked: true}},
	Type: func(args []cty.Value) (cty.Type, error) {
		if args[0].Type() == cty.String {
			return cty.String, nil
		}
		return stdlib.ReverseListFunc.ReturnTypeForValues(args)
	},
	Impl: func(args []cty.Value, _ cty.Type) (cty.Value, error) {
		if args[0].Type() != cty.String {
			return stdlib.ReverseList(args[0])
		} else if args[0].IsMarked() {
			return cty.DynamicVal, function.NewArgErrorf(0,
				"a reference that is known at run time only cannot be reversed")
		}
		return stdlib.Reverse(args[0])
	},
})

// failing returns a function that always fails with the reason why.
func failing(why string) function.Function {
	return function.New(&function.Spec{
		VarParam: &function.Parameter{Name: "any", Type: cty.DynamicPseudoType, AllowNull: true, AllowUnknown: true,
			AllowDynamicType: true},
		Type: func([]cty.Value) (cty.Type, error) {
			return cty.String, errors.New(why)
		},
	})
}

// readFile implements file().
func (d *decoder) readFile(name string) (string, error) {
	b, err := d.readBytes(name)
	if err == nil && !utf8.Valid(b) {
		return "", fmt.Errorf("%s is not UTF-8 text", name)
	}
	return string(b), err
}

func (d *decoder) readBytes(name string) ([]byte, error) {
	if d.opts.ReadFile == nil {
		return nil, errors.New("files cannot be read here; give the text as a variable")
	}
	if strings.HasPrefix(name, "~") {
		return nil, fmt.Errorf("%s: ~ is not expanded here, as the agent that reads the file has another home "+
			"directory; write the whole path, such as /root%s", name, strings.TrimLeft(name, "~"))
	}
	b, err := d.opts.ReadFile(name)
	if err == nil && len(b) > maxBytes {
		return nil, fmt.Errorf("%s has %d bytes; at most %d are allowed", name, len(b), maxBytes)
	}
	return b, err
}
