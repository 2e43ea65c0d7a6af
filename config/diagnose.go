package config

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/agext/levenshtein"
	"github.com/hashicorp/hcl/v2"
	"github.com/hashicorp/hcl/v2/hclsyntax"

	"holdfast/registry"
)

// maxDiagnostics bounds the reported diagnostics.
const maxDiagnostics = 20

// maxKept bounds the collected diagnostics, from which the reported ones are chosen.
const maxKept = 500

// maxSnippet bounds the quoted source text and maxSentence the message, in bytes.
const (
	maxSnippet  = 80
	maxSentence = 500
)

// span is a byte range of a text.
type span struct{ start, end int }

func (s span) meets(o span) bool { return s.start < o.end && o.start < s.end }

// errorf reports an error. The detail tells the user how to fix it.
func (d *decoder) errorf(at hcl.Range, detail, summary string, args ...any) {
	d.report(registry.SeverityError, at, fmt.Sprintf(summary, args...), detail)
}

// warnf reports valid text that does not have the effect it suggests.
func (d *decoder) warnf(at hcl.Range, detail, summary string, args ...any) {
	d.report(registry.SeverityWarning, at, fmt.Sprintf(summary, args...), detail)
}

// report adds a diagnostic, unless the same summary was reported at that place before. Beyond maxKept it only counts,
// except for the first error.
func (d *decoder) report(severity registry.Severity, at hcl.Range, summary, detail string) {
	diag := registry.Diagnostic{
		Severity: severity, Summary: shortened(summary, maxSentence), Detail: shortened(detail, maxSentence),
		File: at.Filename, Start: position(at.Start), End: position(at.End), Snippet: d.snippet(at),
	}
	firstError := severity == registry.SeverityError && !d.failed
	if len(d.diags) >= maxKept && !firstError {
		d.dropped++
		return
	}
	d.failed = d.failed || firstError
	same := func(o registry.Diagnostic) bool {
		return o.File == diag.File && o.Start == diag.Start && o.Summary == diag.Summary
	}
	if !slices.ContainsFunc(d.diags, same) {
		d.diags = append(d.diags, diag)
	}
}

func position(p hcl.Pos) registry.Position {
	if p == (hcl.Pos{}) {
		return registry.Position{}
	}
	return registry.Position{Line: max(p.Line, 1), Column: max(p.Column, 1), Byte: p.Byte}
}

// reportHCL reports the diagnostics of HCL. Within secrets it reports the position only, because HCL's messages may
// quote the text.
func (d *decoder) reportHCL(found hcl.Diagnostics) {
	for _, h := range found {
		at := hcl.Range{Filename: d.src.Name, Start: hcl.InitialPos, End: hcl.InitialPos}
		severity := registry.SeverityError
		if h.Subject != nil {
			at = *h.Subject
		}
		if h.Severity == hcl.DiagWarning {
			severity = registry.SeverityWarning
		}
		if d.inSecret(at) {
			d.report(severity, at, "this cannot be read", secretForm)
			continue
		}
		summary, detail := h.Summary, strings.TrimSpace(h.Detail)
		if call, ok := hcl.DiagnosticExtra[hclsyntax.FunctionCallDiagExtra](h); ok && call.FunctionCallError() != nil {
			summary, detail = call.FunctionCallError().Error(), ""
			if name := call.CalledFunctionName(); name != meterName && name != operandName { // these are internal
				summary = name + "(): " + summary
			}
		}
		if text := d.texts[at.Filename]; at.Start.Byte+1 < len(text) &&
			string(text[at.Start.Byte:at.Start.Byte+2]) == "${" {
			detail = renderFirst
		}
		d.report(severity, at, summary, detail)
	}
}

// snippet returns the first line of the range, without secrets.
func (d *decoder) snippet(at hcl.Range) string {
	text, ok := d.texts[at.Filename]
	start, end := at.Start.Byte, at.End.Byte
	if !ok || start < 0 || end > len(text) || start >= end || d.inSecret(at) {
		return ""
	}
	line, _, _ := bytes.Cut(text[start:end], []byte("\n"))
	return strings.Map(printable, shortened(strings.TrimRight(string(line), "\r"), maxSnippet))
}

// shortened truncates s at a character boundary and appends three dots if s exceeds the limit.
func shortened(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + "..."
}

// printable replaces an unprintable character.
func printable(r rune) rune {
	if unicode.IsPrint(r) {
		return r
	}
	return unicode.ReplacementChar
}

func (d *decoder) inSecret(at hcl.Range) bool {
	if at.Filename != d.src.Name {
		return false
	}
	here := span{at.Start.Byte, max(at.End.Byte, at.Start.Byte+1)}
	return slices.ContainsFunc(d.secrets, here.meets)
}

// diagnostics returns the diagnostics in source order: at most maxDiagnostics, then a note about the rest. Warnings are
// left out before errors.
func (d *decoder) diagnostics() registry.Diagnostics {
	byPlace := func(a, b registry.Diagnostic) int {
		return cmp.Or(cmp.Compare(d.fileOrder(a), d.fileOrder(b)), cmp.Compare(a.Start.Byte, b.Start.Byte))
	}
	ds := slices.Clone(d.diags)
	slices.SortStableFunc(ds, func(a, b registry.Diagnostic) int {
		return cmp.Or(cmp.Compare(severityOrder(a), severityOrder(b)), byPlace(a, b))
	})
	shown := ds[:min(len(ds), maxDiagnostics)]
	slices.SortStableFunc(shown, byPlace)
	if len(ds) <= maxDiagnostics {
		return shown
	}
	rest := ds[maxDiagnostics]
	rest.Summary, rest.Detail, rest.Snippet = fmt.Sprintf("and %d more", len(ds)-maxDiagnostics+d.dropped), "", ""
	return append(shown, rest)
}

// severityOrder sorts errors before warnings.
func severityOrder(diag registry.Diagnostic) int {
	if diag.Severity == registry.SeverityError {
		return 0
	}
	return 1
}

// fileOrder sorts diagnostics of other files before those of the main file.
func (d *decoder) fileOrder(diag registry.Diagnostic) int {
	if diag.File == d.src.Name {
		return 1
	}
	return 0
}

// rangeOf returns the HCL range of the bytes [start, end) of the text.
func (s Source) rangeOf(start, end int) hcl.Range {
	return hcl.Range{Filename: s.Name, Start: s.pos(start), End: s.pos(max(end, start+1))}
}

func (s Source) pos(at int) hcl.Pos {
	at = min(at, len(s.Text))
	start := bytes.LastIndexByte(s.Text[:at], '\n') + 1
	line := bytes.TrimPrefix(s.Text[start:at], bom)
	return hcl.Pos{Line: bytes.Count(s.Text[:at], []byte("\n")) + 1, Column: utf8.RuneCount(line) + 1, Byte: at}
}

// didYouMean suggests the nearest of the names, or lists all of them if none is near.
func didYouMean(name string, names []string) string {
	switch best := nearest(name, names); {
	case best != "":
		return fmt.Sprintf("did you mean %q?", best)
	case len(names) == 0:
		return "remove it"
	}
	return "known here: " + strings.Join(slices.Compact(slices.Sorted(slices.Values(names))), ", ")
}

// nearest returns the name with the least edit distance, or an empty string if none is near.
func nearest(name string, names []string) string {
	best, least := "", len(name)/3+2
	for _, n := range slices.Sorted(slices.Values(names)) {
		if len(name) > 3 && strings.HasPrefix(n, name) {
			return n // name is the start of n
		}
		if len(n) < len(name)+least && len(name) < len(n)+least && levenshtein.Distance(name, n, nil) < least {
			best, least = n, levenshtein.Distance(name, n, nil)
		}
	}
	return best
}
