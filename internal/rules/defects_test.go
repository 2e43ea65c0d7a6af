package rules

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// row is a failure in docs/defects.md: its number, and the tests that it names.
var row = regexp.MustCompile(`(?m)^\| ([A-Z][0-9]+) \|.*\|([^|]*)\|$`)

// Every known failure has a row that names a test, and each test with a number is in the row of that number.
func TestDefectsHaveTheirTests(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "docs", "defects.md"))
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]string{}
	for _, m := range row.FindAllStringSubmatch(string(text), -1) {
		if _, twice := rows[m[1]]; twice {
			t.Errorf("docs/defects.md has two rows %s", m[1])
		}
		rows[m[1]] = m[2]
	}
	for part, n := range map[string]int{"G": 5, "V": 11, "H": 9} {
		for i := range n {
			id := fmt.Sprint(part, i+1)
			if named, found := rows[id]; !found {
				t.Errorf("docs/defects.md has no row %s", id)
			} else if !test.MatchString(named) {
				t.Errorf("docs/defects.md names no test of %s", id)
			}
		}
	}
	number := regexp.MustCompile(`^TestDefect([A-Z][0-9]+)`)
	_, tests := declared(t)
	for name := range tests {
		if m := number.FindStringSubmatch(name); m != nil && !strings.Contains(rows[m[1]], "`"+name+"`") {
			t.Errorf("%s is not in row %s of docs/defects.md", name, m[1])
		}
	}
}
