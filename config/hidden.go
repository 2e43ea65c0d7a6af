package config

import (
	"bytes"

	"github.com/agext/levenshtein"
)

// secretsName names the block or attribute whose content diagnostics never show.
const secretsName = "secrets"

// hiding tracks the `secrets = ...` statement that the scanner reads.
type hiding struct {
	active bool
	start  int // after the '='
	depth  int // bracket nesting around it
}

// mayHide starts to hide the assigned value if the word is secrets, or password, as in auth of a container.
func (s *scanner) mayHide(word string) {
	if (word == secretsName || word == "password") && !s.hiding.active {
		s.hiding = hiding{true, s.at, len(s.stack)}
	}
}

// hide ends the hidden span at a line end outside the statement's brackets.
func (s *scanner) hide(end int) {
	if s.hiding.active && (len(s.stack) <= s.hiding.depth || end == len(s.src)) {
		s.secrets = append(s.secrets, span{s.hiding.start, end})
		s.hiding.active = false
	}
}

// hideSecrets records the spans of secrets blocks, including misspelt ones. In a malformed text everything after the
// first of them, or after the first password, counts as secret.
func (d *decoder) hideSecrets(out outline, shift int) {
	for _, at := range out.secrets {
		d.secrets = append(d.secrets, span{at.start + shift, at.end + shift})
	}
	for _, b := range out.braces {
		if levenshtein.Distance(b.word, secretsName, nil) <= 2 {
			d.secrets = append(d.secrets, span{b.open + shift, b.close + shift})
		}
	}
	for _, word := range []string{"secret", "password"} {
		if at := bytes.Index(d.src.Text, []byte(word)); at >= 0 && len(out.faults) > 0 {
			d.secrets = append(d.secrets, span{at + len(word), len(d.src.Text) + 1})
		}
	}
}
