package registry

import "fmt"

// Severity says whether a Diagnostic is an error or a warning.
type Severity string

const (
	SeverityError   Severity = "error"
	SeverityWarning Severity = "warning"
)

// Position is a place in a source text. Line and Column start at 1; Column counts characters, Byte starts at 0. The
// zero value means no place: the text is a value from the command line.
type Position struct {
	Line   int `json:"line"`
	Column int `json:"column"`
	Byte   int `json:"byte"`
}

// Diagnostic is one thing wrong with a text that a person wrote.
type Diagnostic struct {
	Severity Severity `json:"severity"`
	Summary  string   `json:"summary"`           // what is wrong, one line
	Detail   string   `json:"detail,omitempty"`  // what to do about it
	File     string   `json:"file"`              // as the caller named it
	Start    Position `json:"start"`             //
	End      Position `json:"end"`               //
	Snippet  string   `json:"snippet,omitempty"` // the offending text
}

func (d Diagnostic) String() string {
	at := d.File
	if d.Start.Line > 0 {
		at = fmt.Sprintf("%s:%d:%d", d.File, d.Start.Line, d.Start.Column)
	}
	s := fmt.Sprintf("%s: %s: %s", at, d.Severity, d.Summary)
	if d.Detail != "" {
		s += "; " + d.Detail
	}
	return s
}

// Diagnostics is everything found wrong, in the order of the text.
type Diagnostics []Diagnostic

// Err returns nil if no diagnostic is an error, else an ErrInvalid that lists all diagnostics, one per line.
func (ds Diagnostics) Err() error {
	text, found := "", false
	for _, d := range ds {
		found = found || d.Severity == SeverityError
		text += "\n" + d.String()
	}
	if !found {
		return nil
	}
	return Errorf(ErrInvalid, "%s", text[1:])
}
