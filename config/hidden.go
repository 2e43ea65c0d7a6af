package config

import (
	"bytes"

	"github.com/agext/levenshtein"
)

// secretsName is the name of what is never shown.
const secretsName = "secrets"

// hiding is the statement `secrets = ...` that is being read.
type hiding struct {
	active bool
	start  int // behind the '='
	depth  int // of brackets around it
}

// mayHide begins to hide what is assigned to the word, if that is secrets.
func (s *scanner) mayHide(word string) {
	if word == secretsName && !s.hiding.active {
		s.hiding = hiding{true, s.at, len(s.stack)}
	}
}

// hide ends it at the end of a line that is no part of a bracket within the statement.
func (s *scanner) hide(end int) {
	if s.hiding.active && (len(s.stack) <= s.hiding.depth || end == len(s.src)) {
		s.secrets = append(s.secrets, span{s.hiding.start, end})
		s.hiding.active = false
	}
}

// hideSecrets notes where secrets blocks are, also misspelt ones. In a text that is broken everything behind the first
// one counts as secret.
func (d *decoder) hideSecrets(out outline, shift int) {
	for _, at := range out.secrets {
		d.secrets = append(d.secrets, span{at.start + shift, at.end + shift})
	}
	for _, b := range out.braces {
		if levenshtein.Distance(b.word, secretsName, nil) <= 2 {
			d.secrets = append(d.secrets, span{b.open + shift, b.close + shift})
		}
	}
	if at := bytes.Index(d.src.Text, []byte("secret")); at >= 0 && len(out.faults) > 0 {
		d.secrets = append(d.secrets, span{at + len("secret"), len(d.src.Text) + 1})
	}
}
