package config

import (
	"fmt"
	"strings"
	"testing"

	"github.com/hashicorp/hcl/v2"
	"github.com/hashicorp/hcl/v2/hclsyntax"
)

// inConfig puts text into a task's config.
func inConfig(text string) string {
	return "task \"t\" {\n  driver = \"exec\"\n  config {\n" + text + "\n  }\n}\n"
}

// TestHostileText parses texts that would take HCL seconds, kill it, or make too much data. Each is refused for the
// wanted reason; those with "-" are accepted.
func TestHostileText(t *testing.T) {
	deep := "this is nested more than 32 levels deep"
	for name, c := range map[string]struct{ text, want string }{
		"parentheses":   {"x = " + strings.Repeat("(", 1<<20), "the file has 1048580 bytes"},
		"brackets":      {"x = " + strings.Repeat("[", 60_000), deep},
		"braces":        {strings.Repeat("a {\n", 10_000), deep},
		"templates":     {`x = ` + strings.Repeat(`"${`, 10_000), deep},
		"directives":    {`x = ` + strings.Repeat(`"%{if `, 5_000), deep},
		"heredocs":      {strings.Repeat("x = <<A\n${\n", 5_000), deep},
		"comments":      {strings.Repeat("/* ", 20_000), "this comment is never closed"},
		"tokens":        {strings.Repeat("a=1\n", 16_000), "more than 30000 tokens"},
		"one byte more": {strings.Repeat("#", maxBytes+1), "the file has 65537 bytes"},
		"much of it":    {strings.Repeat("x", 64<<20), "the file has 67108864 bytes"},
		"dollars":       {`x = "` + strings.Repeat(`$$${`, 40) + strings.Repeat("}", 40) + `"`, ""},
		"backslashes":   {`x = "` + strings.Repeat(`\${`, 40) + strings.Repeat("}", 40) + `"`, ""},
		"if in if":      {"x = \"" + strings.Repeat("%{if true}", 5_000) + strings.Repeat("%{endif}", 500) + "\"", ""},
		"bangs":         {"x = " + strings.Repeat("!", 29_000) + "true", ""},
		"minus":         {"x = " + strings.Repeat("-", 29_000) + "1", ""},
		"conditions":    {"x = " + strings.Repeat("a?b:", 7_000) + "c", ""},
		"long name":     {strings.Repeat("n", 60_000) + " {}", ""},
		"many names":    {inConfig(strings.Repeat("a {}\n", 5_000)), "-"},
		"many mistakes": {"job \"x\" {\n" + strings.Repeat("  a {}\n", 6_000) + "}", "and "},
		"many locals":   {"locals {\n" + chain(2_500) + "}\n" + inConfig("x = local.a2499"), "-"},
		"product":       {inConfig(`x = setproduct(range(900), range(900), range(900))`), "too much data"},
		"replace":       {inConfig(`x = replace(join("", range(1000)), "", join("", range(1000)))`), "too much data"},
		"indent":        {inConfig(`x = indent(999999999, "a\nb\nc")`), "too much data"},
		"big product":   {inConfig("x = " + strings.Repeat("1e999 * ", 200) + "1"), "too large"},
		"deep json":     {inConfig(`x = jsondecode("` + strings.Repeat("[", 20_000) + `")`), ""},
		"references": {"locals {\n  s = join(\"\", range(1000))\n}\n" +
			inConfig(`x = "`+strings.Repeat("${local.s}", 5_000)+`"`), "too much data"},
		"format again": {inConfig(`x = format("` + strings.Repeat("%[1]s", 10_000) + `", join("", range(1000)))`),
			"too much data"},
		"wide verb":      {inConfig(`x = format("a %%%-09999999.1f", 1)`), "too much data"},
		"width argument": {inConfig(`x = format("%*d", 9999999, 1)`), "too much data"},
		"long keys": {inConfig(`x = {for a in range(1000) : "${join("", range(1000))}${a}" => 1}`),
			"too much data"},
		"hidden work": {inConfig(
			`x = [for a in range(1000) : [for b in range(1000) : length("${join("", range(1000))}${a}")]]`),
			"too much data"},
		"infinite":       {inConfig(`x = pow(10, 999999999)`), "too large"},
		"dynamic blocks": {"job \"x\" {\n" + nestedDynamic(4) + "}", "too much data"},
		"template loops": {inConfig(
			`x = "%{for a in range(1000)}%{for b in range(1000)}%{for c in range(1000)}x%{endfor}%{endfor}%{endfor}"`),
			"too much data"},
	} {
		t.Run(name, func(t *testing.T) {
			job, ds := ParseJob(Source{"x.hcl", []byte(c.text)}, Options{})
			if c.want == "-" {
				if job == nil {
					t.Fatalf("refused: %v", ds.Err())
				}
				return
			}
			if job != nil || ds.Err() == nil {
				t.Fatal("accepted")
			}
			if got := ds.Err().Error(); !strings.Contains(got, c.want) || len(ds) > maxDiagnostics+1 ||
				len(got) > 20_000 {
				t.Errorf("%d diagnostics: %.500s\nwant %s", len(ds), got, c.want)
			}
		})
	}
}

// TestOpenCommentIsOneToken lexes a comment that is never closed. HCL's lexer alone would search it again at each /* in
// it, which takes seconds.
func TestOpenCommentIsOneToken(t *testing.T) {
	tokens := lex([]byte(strings.Repeat("/* ", 20_000)), "x.hcl", hcl.InitialPos)
	if len(tokens) != 2 || tokens[0].Type != hclsyntax.TokenComment {
		t.Errorf("%d tokens", len(tokens))
	}
}

func chain(n int) string {
	s := "  a0 = 1\n"
	for i := 1; i < n; i++ {
		s += fmt.Sprintf("  a%d = local.a%d\n", i, i-1)
	}
	return s
}

func nestedDynamic(n int) string {
	if n == 0 {
		return ""
	}
	return "dynamic \"update\" {\nfor_each = range(1000)\ncontent {\n" + nestedDynamic(n-1) + "}\n}\n"
}

// TestOrdinaryTextPasses parses common texts that a simple counter of brackets would refuse.
func TestOrdinaryTextPasses(t *testing.T) {
	for name, text := range map[string]string{
		"braces in a heredoc":  "x = <<EOT\n" + strings.Repeat("{{{ [[[ (((\n", 100) + "EOT",
		"quotes in a heredoc":  "x = <<-EOT\n  \"not closed\n  EOT",
		"marker inside a line": "x = <<EOT\nEOT is no end\n  EOT x\nEOT",
		"braces in a string":   `x = "` + strings.Repeat("{[(", 100) + `"`,
		"escaped templates":    `x = "` + strings.Repeat("$${", 100) + `"`,
		"escaped quotes":       `x = "a\"b{\\"`,
		"comments":             "# {{{ \"\n// ((( \"\n/* [[[ \"\n */ x = 1 # }",
		"string in template":   `x = "${join("}", ["a", "{"])}"`,
		"heredoc in a call":    "x = upper(<<EOT\na {\nEOT\n)",
		"directive":            `x = "%{ if true }{%{ else }}%{ endif }"`,
		"no newline at end":    "x = 1",
		"32 levels":            "x = " + strings.Repeat("[", maxDepth-2) + strings.Repeat("]", maxDepth-2),
		"long digits":          `x = "${join("", range(1000))}.${sha256(join("", range(1000)))}"`,
		"less than":            "x = 1 < 2",
		"no verb":              `x = format("%%1000 %% 1000* %100d", 1)`,
	} {
		if job, ds := ParseJob(Source{"x.hcl", []byte(inConfig(text))}, Options{}); job == nil {
			t.Errorf("%s: %v", name, ds.Err())
		}
	}
}
