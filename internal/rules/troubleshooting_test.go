package rules

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// verb matches a formatting verb, or the … of the documents.
var verb = regexp.MustCompile(`%[+#]?[0-9.]*[a-zA-Z]|…`)

// fragments returns the fixed parts of a message.
func fragments(text string) []string {
	return strings.FieldsFunc(verb.ReplaceAllString(text, "\x00"), func(r rune) bool { return r == '\x00' })
}

// For each message in docs/troubleshooting.md, the program has a literal that contains the message's fixed parts, in
// order.
func TestMessagesOfTroubleshootingExist(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "docs", "troubleshooting.md"))
	if err != nil {
		t.Fatal(err)
	}
	messages := regexp.MustCompile("(?m)^### `(.*)`$").FindAllStringSubmatch(string(text), -1)
	if len(messages) < 25 {
		t.Errorf("only %d messages", len(messages))
	}
	literals := literalsOf(t)
	for _, m := range messages {
		parts := fragments(m[1])
		if !slices.ContainsFunc(literals, func(l string) bool { return hasInOrder(l, parts) }) {
			t.Errorf("no message of the program has the parts %q", parts)
		}
	}
}

func hasInOrder(text string, parts []string) bool {
	for _, p := range parts {
		_, rest, has := strings.Cut(text, p)
		if !has {
			return false
		}
		text = rest
	}
	return true
}

// literalsOf returns the string literals of the program, with + evaluated.
func literalsOf(t *testing.T) (list []string) {
	t.Helper()
	for _, p := range all(t) {
		for _, file := range p.GoFiles {
			parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, file), nil,
				parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(parsed, func(n ast.Node) bool {
				text, is := literal(n)
				if is {
					list = append(list, text)
				}
				return !is
			})
		}
	}
	return list
}

// literal returns the text of an expression of literals and +. It leaves out other operands.
func literal(n ast.Node) (text string, is bool) {
	switch e := n.(type) {
	case *ast.BasicLit:
		if e.Kind != token.STRING {
			return "", false
		}
		text, err := strconv.Unquote(e.Value)
		return text, err == nil
	case *ast.BinaryExpr:
		if e.Op != token.ADD {
			return "", false
		}
		left, first := literal(e.X)
		right, second := literal(e.Y)
		return left + right, first || second
	}
	return "", false
}
