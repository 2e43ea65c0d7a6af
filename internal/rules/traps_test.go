package rules

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// banned has the names of those parts of go-plugin that break under a swap. No other identifier may have such a name,
// so they are found whatever name the package is imported under.
var banned = []string{"Reattach", "ReattachConfig", "ReattachFunc", "CleanupClients", "Managed", "GRPCBrokerMultiplex",
	"GRPCBroker", "MuxBroker"}

// bannedIn returns the banned names that a file uses. go-plugin's interface has a broker as a parameter; a parameter
// without a name is not a use.
func bannedIn(file *ast.File) (found []string) {
	unused := map[*ast.Ident]bool{}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncType:
			for _, p := range n.Params.List {
				named := func(name *ast.Ident) bool { return name.Name != "_" }
				if broker := pointee(p.Type); broker != nil && !slices.ContainsFunc(p.Names, named) {
					unused[broker] = true
				}
			}
		case *ast.Ident:
			if slices.Contains(banned, n.Name) && !(unused[n] && n.Name == "GRPCBroker") {
				found = append(found, n.Name)
			}
		}
		return true
	})
	return found
}

// pointee returns the name T of a type *pkg.T, or nil for other types.
func pointee(e ast.Expr) *ast.Ident {
	star, _ := e.(*ast.StarExpr)
	if star == nil {
		return nil
	}
	sel, _ := star.X.(*ast.SelectorExpr)
	if sel == nil {
		return nil
	}
	return sel.Sel
}

// The parts of go-plugin that break under a swap are not used: its broker dies with the first host, reattaching checks
// nothing, and its global list of clients grows forever. The test reads every file, whatever its build constraints are.
func TestNoGoPluginBrokerReattachOrGlobalList(t *testing.T) {
	files := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != root && strings.HasPrefix(d.Name(), "."):
			return fs.SkipDir
		case d.IsDir() || filepath.Ext(path) != ".go":
			return nil
		}
		files++
		parsed, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		for _, name := range bannedIn(parsed) {
			t.Errorf("%s uses %s of go-plugin, or something of that name", path, name)
		}
		return err
	})
	if err != nil || files < 500 {
		t.Errorf("%d files were read: %v", files, err)
	}
}

// TestBanCatches checks that the ban holds for files with any build constraint, and for any import name of go-plugin.
func TestBanCatches(t *testing.T) {
	in := func(text string) []string {
		file, err := parser.ParseFile(token.NewFileSet(), "x.go", text, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		return bannedIn(file)
	}
	const head = "//go:build linux\n\npackage p\n\nimport gp \"github.com/hashicorp/go-plugin\"\n\n"
	for _, text := range []string{
		"var c = gp.ClientConfig{Reattach: nil}", "var c gp.ReattachConfig", "func f() { defer gp.CleanupClients() }",
		"var c = gp.ClientConfig{Managed: true}", "func f(c *gp.ClientConfig) { c.Managed = true }",
		"var c = gp.ClientConfig{GRPCBrokerMultiplex: true}", "type b = gp.GRPCBroker",
		"func (p) GRPCServer(b *gp.GRPCBroker, s *grpc.Server) error { return nil }", "var f = gp.CleanupClients",
		"func (p) Server(*gp.MuxBroker) (any, error) { return nil, nil }", "func f() *gp.GRPCBroker { return nil }",
		"func f(_ int, b *gp.GRPCBroker) {}",
	} {
		if len(in(head+text)) == 0 {
			t.Errorf("%q is not caught", text)
		}
	}
	if len(in("package p\n\nimport . \"github.com/hashicorp/go-plugin\"\n\nvar f = CleanupClients")) == 0 {
		t.Error("what is imported without a name is not caught")
	}
	for _, text := range []string{
		"func (p) GRPCServer(_ *gp.GRPCBroker, s *grpc.Server) error { return p.register(s) }",
		"func (p) GRPCServer(*gp.GRPCBroker, *grpc.Server) error { return nil }",
	} {
		if found := in(head + text); len(found) > 0 {
			t.Errorf("%q is caught for %q: the broker has no name there", text, found)
		}
	}
}

// byBan are the traps whose countermeasure is that a part of go-plugin is not used.
var byBan = map[string]bool{"T9": true, "T10": true, "T11": true}

// Every trap has a row in docs/traps.md, and a test with its number or a ban. Every test with a number is in the row of
// that number. TestPromisesNameTestsThatExist checks that the tests exist.
func TestTrapsHaveTheirTests(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "docs", "traps.md"))
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]string{}
	for _, m := range row.FindAllStringSubmatch(string(text), -1) {
		rows[m[1]] = m[2]
	}
	ids := slices.Concat(numbered("T", 16), numbered("D", 13)) // of go-plugin, and of Docker's volume plugin protocol
	if len(rows) != len(ids) {
		t.Errorf("docs/traps.md has %d traps", len(rows))
	}
	for _, id := range ids {
		want := "`TestTrap" + id + "[A-Z]"
		if byBan[id] {
			want = "`TestNoGoPluginBrokerReattachOrGlobalList`"
		}
		if !regexp.MustCompile(want).MatchString(rows[id]) {
			t.Errorf("docs/traps.md names no test of %s: %q", id, rows[id])
		}
	}
	number := regexp.MustCompile(`^TestTrap([TD][0-9]+)`)
	_, tests := declared(t)
	for _, name := range regexp.MustCompile(`\bFuzz[A-Z]\w*`).FindAllString(string(text), -1) {
		if !tests[name] {
			t.Errorf("docs/traps.md names %s, which does not exist", name)
		}
	}
	for name := range tests {
		if m := number.FindStringSubmatch(name); m != nil && !strings.Contains(rows[m[1]], "`"+name+"`") {
			t.Errorf("%s is not in row %s of docs/traps.md", name, m[1])
		}
	}
}

// numbered returns letter1 to letterN.
func numbered(letter string, n int) (ids []string) {
	for i := range n {
		ids = append(ids, fmt.Sprint(letter, i+1))
	}
	return ids
}
