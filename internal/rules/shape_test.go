package rules

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A line has at most 120 columns, with tabs of 4. A file that is not a test has at most 500 lines, and its functions
// have at most 80.
const maxColumns, maxLines, maxFunction = 120, 500, 80

func TestShapeOfFiles(t *testing.T) {
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(root, path)
		switch {
		case err != nil:
			return err
		case d.IsDir() && (rel == ".git" || rel == ".cache" || rel == "bin"):
			return filepath.SkipDir
		case d.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, ".pb.go"):
			return nil
		}
		text, err := os.ReadFile(path)
		if err == nil {
			checkShape(t, rel, strings.Split(strings.TrimSuffix(string(text), "\n"), "\n"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func checkShape(t *testing.T, path string, lines []string) {
	t.Helper()
	isTest, start := strings.HasSuffix(path, "_test.go"), -1 // of the function
	if len(lines) > maxLines && !isTest {
		t.Errorf("%s has %d lines; cut it along its subjects", path, len(lines))
	}
	for i, line := range lines {
		if n := columns(line); n > maxColumns {
			t.Errorf("%s:%d has %d columns", path, i+1, n)
		}
		switch {
		case strings.HasPrefix(line, "func "):
			start = i
		case line == "}" && start >= 0:
			if i-start > maxFunction && !isTest {
				t.Errorf("%s:%d: the function has %d lines", path, start+1, i-start)
			}
			start = -1
		}
	}
}

func columns(line string) (n int) {
	for _, r := range line {
		n++
		if r == '\t' {
			n += (4 - n%4) % 4
		}
	}
	return n
}
