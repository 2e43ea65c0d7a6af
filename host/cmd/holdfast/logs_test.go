package main

import (
	"strings"
	"sync"
	"testing"
)

// If a task writes no line break, its output does not fill the memory, and none of it is lost.
func TestLinesOfLogsAreBounded(t *testing.T) {
	var out strings.Builder
	w := &lineWriter{to: &out, lock: &sync.Mutex{}, prefix: "p | "}
	text := strings.Repeat("x", 3*maxLine+10)
	for part := range len(text) / 10 {
		if _, err := w.Write([]byte(text[part*10 : part*10+10])); err != nil {
			t.Fatal(err)
		}
		if len(w.part) > maxLine {
			t.Fatalf("%d bytes are kept", len(w.part))
		}
	}
	must(t, w.flush())
	got := strings.ReplaceAll(strings.ReplaceAll(out.String(), "p | ", ""), "\n", "")
	if lines := strings.Count(out.String(), "\n"); lines != 3 || got != text[:len(text)/10*10] {
		t.Errorf("%d lines, %d bytes", lines, len(got))
	}
}
