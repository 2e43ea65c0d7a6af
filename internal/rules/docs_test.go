package rules

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// named finds `pkg.Func`, `pkg.(*Type).Method`, `pkg.(Type).Method` and `pkg.Type`.
var named = regexp.MustCompile("`([a-z]+)\\.(?:\\((\\*?[A-Za-z]+)\\)\\.)?([A-Za-z]+)`")

// declared returns every function, method and type of the tree, in the form that the walk uses, and every test.
func declared(t *testing.T) (names, tests map[string]bool) {
	t.Helper()
	if declaredNames == nil {
		declaredNames, declaredTests = readDeclared(t)
	}
	return declaredNames, declaredTests
}

var declaredNames, declaredTests map[string]bool

func readDeclared(t *testing.T) (names, tests map[string]bool) {
	t.Helper()
	names, tests = map[string]bool{}, map[string]bool{}
	for _, p := range all(t) {
		for _, file := range p.GoFiles {
			parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, file), nil,
				parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range parsed.Decls {
				for _, name := range namesOf(d) {
					names[filepath.Base(p.Dir)+"."+name] = true
				}
			}
		}
		files, err := filepath.Glob(filepath.Join(p.Dir, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range testFunc.FindAllSubmatch(text, -1) {
				tests[string(m[1])] = true
			}
		}
	}
	next := filepath.Join(root, "e2e", "testdata", "next") // tests of the next release: see package nextrelease
	err := filepath.WalkDir(next, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range testFunc.FindAllSubmatch(text, -1) {
			tests[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names, tests
}

var testFunc = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)[A-Za-z0-9_]*)\(`)

func namesOf(d ast.Decl) (names []string) {
	switch d := d.(type) {
	case *ast.FuncDecl:
		if d.Recv == nil {
			return []string{d.Name.Name}
		}
		switch r := d.Recv.List[0].Type.(type) {
		case *ast.StarExpr:
			if id, ok := r.X.(*ast.Ident); ok {
				return []string{"(*" + id.Name + ")." + d.Name.Name}
			}
		case *ast.Ident:
			return []string{"(" + r.Name + ")." + d.Name.Name}
		}
	case *ast.GenDecl:
		for _, s := range d.Specs {
			if ts, ok := s.(*ast.TypeSpec); ok {
				names = append(names, ts.Name.Name)
			}
		}
	}
	return names
}

// The functions that the walk names exist.
func TestWalkIsTrue(t *testing.T) {
	names, _ := declared(t)
	text, err := os.ReadFile(filepath.Join(root, "docs", "walk.md"))
	if err != nil {
		t.Fatal(err)
	}
	found := named.FindAllStringSubmatch(string(text), -1)
	if len(found) < 40 {
		t.Errorf("the walk names only %d functions", len(found))
	}
	for _, m := range found {
		name := m[1] + "." + m[3]
		if m[2] != "" {
			name = m[1] + ".(" + m[2] + ")." + m[3]
		}
		if !names[name] {
			t.Errorf("docs/walk.md names %s, which does not exist", name)
		}
	}
}

var test = regexp.MustCompile(`\bTest[A-Z][A-Za-z0-9]*`)

// A test that a document or a comment names exists.
func TestPromisesNameTestsThatExist(t *testing.T) {
	_, tests := declared(t)
	files := []string{filepath.Join(root, "README.md")}
	docs, _ := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	files = append(files, docs...)
	for _, p := range all(t) {
		for _, f := range p.GoFiles {
			files = append(files, filepath.Join(p.Dir, f))
		}
	}
	seen := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range test.FindAllString(string(text), -1) {
			if strings.HasSuffix(file, "registrytest.go") || strings.Contains(file, "registrytest/") ||
				name == "TestMain" {
				continue // tests of a suite are called by name in code
			}
			seen++
			if !tests[name] {
				t.Errorf("%s names %s, which does not exist", file, name)
			}
		}
	}
	if seen < 10 {
		t.Errorf("only %d tests are named", seen)
	}
}

// The host in README is the one that is compiled and run. It has at most 55 lines and one import of this module.
func TestReadmeShowsTheRealHost(t *testing.T) {
	program, err := os.ReadFile(filepath.Join(root, "examples", "embed", "main.go"))
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(readme), "```go\n"+string(program)+"```") {
		t.Error("README.md does not show examples/embed/main.go as it is")
	}
	if n := strings.Count(string(program), "\n"); n > 55 {
		t.Errorf("examples/embed/main.go has %d lines; it should stay below 55", n)
	}
	for _, line := range strings.Split(string(program), "\n") {
		if strings.Contains(line, `"holdfast/`) && strings.TrimSpace(line) != `"holdfast/host"` {
			t.Errorf("examples/embed/main.go imports %s", strings.TrimSpace(line))
		}
	}
}

// Each test name is unique in the module, so that a document or a message can name a test without its package.
func TestNamesOfTestsAreUnique(t *testing.T) {
	seen := map[string]string{"TestMain": ""}
	for _, p := range all(t) {
		files, err := filepath.Glob(filepath.Join(p.Dir, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range testFunc.FindAllSubmatch(text, -1) {
				name := string(m[1])
				if other, exists := seen[name]; exists && name != "TestMain" {
					t.Errorf("%s is in %s and in %s", name, other, file)
				}
				seen[name] = file
			}
		}
	}
	if len(seen) < 500 {
		t.Errorf("only %d tests were read", len(seen))
	}
}
