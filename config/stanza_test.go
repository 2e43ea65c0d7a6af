package config

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// docs/stanzas.md is printed from the declarations that the parser reads by. A field is read as the type that is
// printed: fields.declared panics otherwise.
func TestStanzaReferenceIsWhatTheParserReads(t *testing.T) {
	if len(nextFiles) > 0 {
		t.Skip("the reference of the next release is not stored")
	}
	var b strings.Builder
	b.WriteString(`# Stanzas

Printed from the declarations of the parser (` + "`go test ./config -run Stanza -update`" + `). Words in *italics* are
defaults. A map is written as a block or as an attribute. A duration is written as "30s" or "1h30m", a size as bytes or
with a unit: "10GiB", "10GB". Expressions may use ` + "`var.NAME`, `local.NAME`" + ` and functions; what
Holdfast reads must be known before a task runs.
`)
	printed := map[*stanza]bool{}
	printStanza(&b, jobStanza, printed)
	printStanza(&b, specStanza, printed)
	printStanza(&b, variableStanza, printed)
	printStanza(&b, clusterStanza, printed)
	golden(t, "../docs/stanzas.md", b.String())
}

func printStanza(b *strings.Builder, s *stanza, printed map[*stanza]bool) {
	if printed[s] {
		return
	}
	printed[s] = true
	fmt.Fprintf(b, "\n## %s\n\n", strings.TrimPrefix(s.name, "a "))
	if s.doc != "" {
		fmt.Fprintf(b, "%s\n\n", s.doc)
	}
	b.WriteString("| name | type | default | meaning |\n|---|---|---|---|\n")
	for _, f := range s.fields {
		fmt.Fprintf(b, "| `%s` | %s | %s | %s |\n", f.name, typeOf(f), defaultOf(f), f.doc)
	}
	if s.carries() {
		carried := slices.Compact(slices.Sorted(slices.Values(slices.Concat(s.carriedAttrs, s.carriedBlocks))))
		fmt.Fprintf(b, "\nPassed on as written: `%s`.\n", strings.Join(carried, "`, `"))
	}
	for _, f := range s.fields {
		if f.block != nil {
			printStanza(b, f.block, printed)
		}
	}
}

func typeOf(f field) string {
	switch f.kind {
	case isNumber:
		return fmt.Sprintf("number, %d to %d", f.low, f.high)
	case isDuration:
		return fmt.Sprintf("duration, %s to %s", time.Duration(f.low), time.Duration(f.high))
	case isChoice:
		return fmt.Sprintf("one of `%s`", strings.Join(slices.DeleteFunc(slices.Clone(f.words), func(w string) bool {
			return w == ""
		}), "`, `"))
	}
	return string(f.kind)
}

func defaultOf(f field) string {
	switch {
	case f.required:
		return "required"
	case f.fallback != nil:
		return fmt.Sprintf("*%v*", f.fallback)
	}
	return ""
}
