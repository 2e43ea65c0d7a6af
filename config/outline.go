package config

import (
	"bytes"
	"fmt"
	"strings"
	"unicode/utf8"
)

// Limits of a text. They are checked before HCL parses it: the lexer is slow and deep nesting overflows the parser's
// stack.
const (
	maxBytes  = 64 << 10
	maxTokens = 30_000
	maxDepth  = 32
)

// fault is a lexical error in a text. An end of 0 means one byte.
type fault struct {
	start, end      int
	summary, detail string
}

// brace is one { ... } of a text, with the word before it if a statement starts there.
type brace struct {
	word        string // "parameters" of `parameters {`
	at          int    // where the word starts
	open, close int    // of the braces; close is past the end
}

// outline is the structure of a text, found in one pass over its bytes in O(n) and without recursion.
type outline struct {
	faults  []fault
	braces  []brace
	secrets []span // secrets that are not in a block of that name
}

// frame is an open construct: '(' '[' '{', '"' for a string, 'T' for a template's ${ or %{, 'H' for a heredoc.
type frame struct {
	kind   byte
	open   int
	word   string
	at     int
	label  string // of a '{': the text before it
	marker []byte // of a heredoc
}

// scanner reads a text once, from its start to its end, and makes its outline.
type scanner struct {
	src     []byte
	at      int
	tokens  int
	stack   []frame
	word    string // the identifier just read
	wordAt  int    // and where
	label   string // the string just read
	starts  bool   // a statement may start here
	suspect int    // offset of a { whose } is indented less; -1 if none
	hiding  hiding
	outline
}

// outlineOf returns the outline of a text. If the text has faults, the outline may end at the first one.
func outlineOf(src []byte) outline {
	s := &scanner{src: src, starts: true, suspect: -1}
	if s.checkBytes(); len(s.faults) > 0 {
		return s.outline
	}
	for s.at < len(s.src) && s.step() {
	}
	s.hide(len(s.src))
	if s.at >= len(s.src) {
		s.checkClosed()
	}
	return s.outline
}

// checkBytes checks the size, the encoding and invisible characters.
func (s *scanner) checkBytes() {
	switch bad := bytes.IndexByte(s.src, 0); {
	case len(s.src) > maxBytes:
		s.fail(0, 1, fmt.Sprintf("the file has %d bytes; at most %d are allowed", len(s.src), maxBytes),
			"move large data out of it")
	case bad >= 0:
		s.fail(bad, bad+1, "the file contains a NUL byte", "is this a text file, in UTF-8?")
	case !utf8.Valid(s.src):
		at := invalidUTF8(s.src)
		s.fail(at, at+1, "the file is not valid UTF-8 here", "save it as UTF-8")
	default:
		if at := bytes.IndexFunc(s.src, changesDirection); at >= 0 {
			s.fail(at, at+3, "the file contains an invisible character that changes the direction of text",
				"remove it: it makes text read other than it is")
		}
	}
}

func invalidUTF8(src []byte) int {
	at := 0
	for at < len(src) {
		r, n := utf8.DecodeRune(src[at:])
		if r == utf8.RuneError && n == 1 {
			break
		}
		at += n
	}
	return at
}

// changesDirection reports whether r is a bidirectional embedding, override or isolate of Unicode.
func changesDirection(r rune) bool { return r >= 0x202a && r <= 0x202e || r >= 0x2066 && r <= 0x2069 }

// step reads one token or one run of text. It returns false if the rest cannot be scanned.
func (s *scanner) step() bool {
	if s.tokens++; s.tokens > maxTokens {
		s.fail(s.at, s.at+1, fmt.Sprintf("the file has more than %d tokens", maxTokens),
			"split it, or move large data out of it")
		return false
	}
	switch s.top().kind {
	case '"':
		return s.text('"')
	case 'H':
		return s.text('\n')
	}
	return s.code()
}

func (s *scanner) top() frame {
	if len(s.stack) == 0 {
		return frame{}
	}
	return s.stack[len(s.stack)-1]
}

func (s *scanner) push(f frame) bool {
	if s.stack = append(s.stack, f); len(s.stack) <= maxDepth {
		return true
	}
	s.fail(f.open, f.open+1, fmt.Sprintf("this is nested more than %d levels deep", maxDepth),
		"use fewer levels, or a local for a part of it")
	return false
}

func (s *scanner) fail(start, end int, summary, detail string) {
	s.faults = append(s.faults, fault{start, end, summary, detail})
}

// text reads a string or a heredoc up to its end or the next template.
func (s *scanner) text(end byte) bool {
	for s.at < len(s.src) {
		c, rest := s.src[s.at], s.src[s.at:]
		switch {
		case c == '\\' && end == '"' && len(rest) > 1 && rest[1] != '\n':
			s.at += 2
		case bytes.HasPrefix(rest, []byte("$${")) || bytes.HasPrefix(rest, []byte("%%{")):
			s.at += 3
		case bytes.HasPrefix(rest, []byte("${")) || bytes.HasPrefix(rest, []byte("%{")):
			s.at += 2
			return s.push(frame{kind: 'T', open: s.at - 2})
		case c == '\n' && end == '"':
			s.endOfBrokenString()
			return true
		case c == '"' && end == '"':
			s.label = string(s.src[s.pop().open+1 : s.at])
			s.at++
			return true
		case c == '\n':
			s.at++
			if s.heredocEnds() {
				return true
			}
		default:
			s.at++
		}
	}
	return true
}

// heredocEnds leaves the heredoc if the line that starts here contains only its marker. The line break is not part of
// the heredoc.
func (s *scanner) heredocEnds() bool {
	line := s.src[s.at:]
	if n := bytes.IndexByte(line, '\n'); n >= 0 {
		line = line[:n]
	}
	if !bytes.Equal(bytes.TrimSpace(line), s.top().marker) {
		return false
	}
	s.at += len(line)
	s.pop()
	return true
}

// endOfBrokenString closes an unterminated string at the line's end, so that scanning can find further errors.
func (s *scanner) endOfBrokenString() {
	open := s.pop().open
	s.fail(open, s.at, "this string is not closed on its line",
		"add the missing \", or use a heredoc (<<EOT) for text of several lines")
}

func (s *scanner) pop() frame {
	f := s.top()
	s.stack = s.stack[:len(s.stack)-1]
	return f
}

// code reads one token outside strings.
func (s *scanner) code() bool {
	c, rest := s.src[s.at], s.src[s.at:]
	word, label, starts := s.word, s.label, s.starts
	s.word, s.label = "", ""
	switch {
	case c == '\n':
		s.hide(s.at)
		s.at, s.starts = s.at+1, true
		return true
	case c == ' ' || c == '\t' || c == '\r':
		s.at, s.tokens, s.word, s.label = s.at+1, s.tokens-1, word, label
		return true
	case c == '#' || bytes.HasPrefix(rest, []byte("//")):
		s.skipTo("\n", false)
		return true
	case bytes.HasPrefix(rest, []byte("/*")):
		return s.comment()
	}
	s.starts = false
	switch {
	case isWord(c):
		s.readWord(starts)
		return true
	case c == '"':
		s.at++
		return s.push(frame{kind: '"', open: s.at - 1})
	case bytes.HasPrefix(rest, []byte("<<")):
		return s.heredoc()
	case strings.IndexByte("([{", c) >= 0:
		s.at, s.starts = s.at+1, c == '{'
		return s.push(frame{kind: c, open: s.at - 1, word: word, at: s.wordAt, label: label})
	case strings.IndexByte(")]}", c) >= 0:
		return s.close(c)
	case c == '=':
		s.word = word // `secrets = {` is secrets too
		s.mayHide(word)
	}
	s.at++
	return true
}

// skipTo moves to, or past, the next occurrence of end. It returns false if there is none.
func (s *scanner) skipTo(end string, past bool) bool {
	n := bytes.Index(s.src[s.at:], []byte(end))
	if n < 0 {
		s.at = len(s.src)
		return false
	}
	if s.at += n; past {
		s.at += len(end)
	}
	return true
}

func (s *scanner) comment() bool {
	open := s.at
	if s.at += 2; !s.skipTo("*/", true) {
		s.fail(open, open+2, "this comment is never closed", "add the missing */")
		s.stack = nil
	}
	return true
}

func isWord(c byte) bool {
	return c == '_' || c == '-' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' ||
		c >= utf8.RuneSelf
}

func (s *scanner) readWord(starts bool) {
	start := s.at
	for s.at < len(s.src) && isWord(s.src[s.at]) {
		s.at++
	}
	word := s.src[start:s.at]
	if starts {
		s.word, s.wordAt = string(word), start
	}
	if e := bytes.IndexAny(word, "eE"); word[0] >= '0' && word[0] <= '9' && e >= 0 {
		digits := len(word) - e - 1
		if s.at < len(s.src) && s.src[s.at] == '+' {
			digits += len(s.src[s.at+1:]) - len(bytes.TrimLeft(s.src[s.at+1:], "0123456789"))
		}
		if digits > 4 {
			s.fail(start, s.at, "this number is too large", "write it with fewer digits after the e")
		}
	}
}

// heredoc enters the text after << or <<- and a marker.
func (s *scanner) heredoc() bool {
	open := s.at
	s.at += 2
	if s.at < len(s.src) && s.src[s.at] == '-' {
		s.at++
	}
	start := s.at
	for s.at < len(s.src) && isWord(s.src[s.at]) {
		s.at++
	}
	marker := s.src[start:s.at]
	rest := bytes.TrimPrefix(s.src[s.at:], []byte("\r"))
	if len(marker) == 0 || !bytes.HasPrefix(rest, []byte("\n")) {
		return true // HCL's parser reports the error
	}
	s.skipTo("\n", true)
	return s.push(frame{kind: 'H', open: open, marker: marker}) && (s.heredocEnds() || true)
}

var closers = map[byte]byte{'(': ')', '[': ']', '{': '}', 'T': '}'}

// close closes the innermost open bracket. Scanning stops after a bracket of another kind.
func (s *scanner) close(c byte) bool {
	f := s.top()
	switch {
	case closers[f.kind] == c:
	case f.kind == '[' || f.kind == '(':
		s.neverClosed(f)
		return false
	default:
		s.fail(s.at, s.at+1, fmt.Sprintf("this %q closes nothing", string(c)),
			"remove it, or add what it was meant to close")
		return false
	}
	s.pop()
	s.at++
	if f.kind == '{' {
		s.braces = append(s.braces, brace{f.word, f.at, f.open, s.at})
		if f.label == secretsName { // dynamic "secrets" {
			s.secrets = append(s.secrets, span{f.open, s.at})
		}
		if s.suspect < 0 && s.leftOf(s.at-1, f.open) {
			s.suspect = f.open
		}
	}
	s.starts = f.kind == '{'
	return true
}

// leftOf reports whether the closing bracket starts its line and is indented less than the line of the opening one.
func (s *scanner) leftOf(closing, opening int) bool {
	indent, rest := s.indent(closing)
	other, _ := s.indent(opening)
	return rest == closing && indent < other
}

// indent returns the width in bytes of the leading white space on the line of at, and the offset of its end.
func (s *scanner) indent(at int) (int, int) {
	start := bytes.LastIndexByte(s.src[:at], '\n') + 1
	end := start
	for s.src[end] == ' ' || s.src[end] == '\t' {
		end++
	}
	return end - start, end
}

// checkClosed reports an unclosed bracket. It prefers the bracket that indentation shows to be unclosed, else the
// innermost one.
func (s *scanner) checkClosed() {
	if len(s.stack) == 0 {
		return
	}
	f := s.top()
	switch {
	case f.kind == 'H':
		s.fail(f.open, f.open+2+len(f.marker), "this heredoc is never closed",
			"add a line that holds nothing but its marker")
	case f.kind == '"':
		s.endOfBrokenString()
	case s.suspect >= 0 && f.kind == '{':
		s.fail(s.suspect, s.suspect+1, "this { seems to lack its }", "add the missing }")
	default:
		s.neverClosed(f)
	}
}

func (s *scanner) neverClosed(f frame) {
	s.fail(f.open, f.open+1, fmt.Sprintf("this %q is never closed", string(s.src[f.open])),
		fmt.Sprintf("add the missing %q", string(closers[f.kind])))
}
