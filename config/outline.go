package config

import (
	"bytes"
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/hashicorp/hcl/v2"
	"github.com/hashicorp/hcl/v2/hclsyntax"
)

// Limits of a text. They are checked before HCL parses it, because deep nesting overflows the parser's stack.
const (
	maxBytes  = 64 << 10
	maxTokens = 30_000
	maxDepth  = 32
)

// secretsName names the block or attribute whose content diagnostics never show.
const secretsName = "secrets"

// fault is an error in the bytes or tokens of a text.
type fault struct {
	at              hcl.Range
	summary, detail string
}

// brace is one { ... } of a text.
type brace struct {
	word        string // "parameters" of `parameters {` and `parameters = {`; empty: no identifier precedes it
	at          int    // where the word starts
	open, close int    // of the braces; close is past the end
}

// outline is the structure of a text, found in its tokens.
type outline struct {
	text    []byte
	tokens  hclsyntax.Tokens
	open    []int // indexes of opening tokens that are not closed yet
	suspect int   // index of a { whose } is indented less; -1: none
	secret  int   // index of the = of a `secrets = ...` statement; -1: none
	depth   int   // len(open) at that statement

	fault   *fault // the first one; nil: none
	braces  []brace
	secrets []span // secrets that are not in a block of that name
}

// outlineOf returns the outline of a text. It ends at the first fault.
func outlineOf(text []byte, name string, start hcl.Pos) *outline {
	o := &outline{text: text, tokens: lex(text, name, start), suspect: -1, secret: -1}
	for i, t := range o.tokens {
		if i >= maxTokens {
			o.fail(t.Range, "split it, or move large data out of it", "the file has more than %d tokens", maxTokens)
		} else {
			o.add(i)
		}
		if o.fault != nil {
			return o
		}
	}
	o.checkClosed()
	return o
}

// commentEnd closes a comment that the text does not close. Without it HCL's lexer would read that comment as
// operators, and search the rest of the text again at each /* in it.
const commentEnd = " */"

// lex returns the tokens of a text, without the comments that end within a line. A comment that is never closed stays.
func lex(text []byte, name string, start hcl.Pos) hclsyntax.Tokens {
	tokens, _ := hclsyntax.LexConfig(slices.Concat(text, []byte(commentEnd)), name, start)
	length := start.Byte + len(text)
	end := tokens[len(tokens)-1] // hclsyntax.TokenEOF
	end.Range.Start.Byte, end.Range.Start.Column = length, end.Range.Start.Column-len(commentEnd)
	end.Range.End = end.Range.Start
	tokens = slices.DeleteFunc(tokens, func(t hclsyntax.Token) bool {
		comment := t.Type == hclsyntax.TokenComment && !bytes.HasSuffix(t.Bytes, []byte("\n"))
		open := t.Range.End.Byte > length && bytes.HasPrefix(t.Bytes, []byte("/*"))
		return t.Range.Start.Byte >= length || comment && !open
	})
	return append(tokens, end)
}

// bytesFault returns the error in the size or the characters of a text, or nil.
func bytesFault(src Source) *fault {
	at := func(start, length int) hcl.Range { return src.rangeOf(start, start+length) }
	switch zero := bytes.IndexByte(src.Text, 0); {
	case len(src.Text) > maxBytes:
		return &fault{at(0, 1), fmt.Sprintf("the file has %d bytes; at most %d are allowed", len(src.Text), maxBytes),
			"move large data out of it"}
	case zero >= 0:
		return &fault{at(zero, 1), "the file contains a NUL byte", "is this a text file, in UTF-8?"}
	case !utf8.Valid(src.Text):
		return &fault{at(invalidUTF8(src.Text), 1), "the file is not valid UTF-8 here", "save it as UTF-8"}
	}
	if i := bytes.IndexFunc(src.Text, changesDirection); i >= 0 {
		return &fault{at(i, 3), "the file contains an invisible character that changes the direction of text",
			"remove it: it makes text read other than it is"}
	}
	return nil
}

// invalidUTF8 returns the offset of the first byte that is not UTF-8. bytes.IndexRune would also find a valid U+FFFD.
func invalidUTF8(text []byte) (at int) {
	for {
		r, n := utf8.DecodeRune(text[at:])
		if r == utf8.RuneError && n <= 1 {
			return at
		}
		at += n
	}
}

// changesDirection reports whether r is a bidirectional embedding, override or isolate of Unicode.
func changesDirection(r rune) bool { return r >= 0x202a && r <= 0x202e || r >= 0x2066 && r <= 0x2069 }

func (o *outline) fail(at hcl.Range, detail, summary string, args ...any) {
	o.fault = &fault{at, fmt.Sprintf(summary, args...), detail}
}

// add adds the token i to the outline.
func (o *outline) add(i int) {
	t := o.tokens[i]
	switch t.Type {
	case hclsyntax.TokenOBrace, hclsyntax.TokenOBrack, hclsyntax.TokenOParen, hclsyntax.TokenTemplateInterp,
		hclsyntax.TokenTemplateControl, hclsyntax.TokenOQuote, hclsyntax.TokenOHeredoc:
		if o.open = append(o.open, i); len(o.open) > maxDepth {
			o.fail(t.Range, "use fewer levels, or a local for a part of it",
				"this is nested more than %d levels deep", maxDepth)
		}
	case hclsyntax.TokenCBrace, hclsyntax.TokenCBrack, hclsyntax.TokenCParen, hclsyntax.TokenTemplateSeqEnd,
		hclsyntax.TokenCQuote, hclsyntax.TokenCHeredoc:
		o.closeWith(t)
	case hclsyntax.TokenQuotedNewline:
		o.neverClosed(t)
	case hclsyntax.TokenNumberLit:
		if e := bytes.IndexAny(t.Bytes, "eE"); e >= 0 && len(bytes.TrimLeft(t.Bytes[e+1:], "+-")) > 4 {
			o.fail(t.Range, "write it with fewer digits after the e", "this number is too large")
		}
	case hclsyntax.TokenEqual:
		if word := o.wordBefore(i).Bytes; o.secret < 0 && (string(word) == secretsName || string(word) == "password") {
			o.secret, o.depth = i, len(o.open)
		}
	case hclsyntax.TokenNewline, hclsyntax.TokenComment:
		if bytes.HasPrefix(t.Bytes, []byte("/*")) {
			at := t.Range
			at.End = hcl.Pos{Line: at.Start.Line, Column: at.Start.Column + 2, Byte: at.Start.Byte + 2}
			o.fail(at, "add the missing */", "this comment is never closed")
		}
		if o.secret >= 0 && len(o.open) <= o.depth {
			o.secrets = append(o.secrets, span{o.tokens[o.secret].Range.Start.Byte, t.Range.Start.Byte})
			o.secret = -1
		}
	}
}

// wordBefore returns the identifier before the token i if a statement starts with it, else a token without bytes.
func (o *outline) wordBefore(i int) hclsyntax.Token {
	if i == 0 || o.tokens[i-1].Type != hclsyntax.TokenIdent {
		return hclsyntax.Token{}
	}
	if i > 1 {
		switch o.tokens[i-2].Type {
		case hclsyntax.TokenNewline, hclsyntax.TokenComment, hclsyntax.TokenOBrace, hclsyntax.TokenCBrace:
		default:
			return hclsyntax.Token{}
		}
	}
	return o.tokens[i-1]
}

var closers = map[hclsyntax.TokenType]hclsyntax.TokenType{
	hclsyntax.TokenOParen: hclsyntax.TokenCParen, hclsyntax.TokenOBrack: hclsyntax.TokenCBrack,
	hclsyntax.TokenOBrace: hclsyntax.TokenCBrace, hclsyntax.TokenTemplateInterp: hclsyntax.TokenTemplateSeqEnd,
	hclsyntax.TokenTemplateControl: hclsyntax.TokenTemplateSeqEnd, hclsyntax.TokenOQuote: hclsyntax.TokenCQuote,
	hclsyntax.TokenOHeredoc: hclsyntax.TokenCHeredoc,
}

// closeWith closes what was opened last. A token that closes something else is a fault.
func (o *outline) closeWith(t hclsyntax.Token) {
	i, opening := -1, hclsyntax.Token{}
	if last := len(o.open) - 1; last >= 0 {
		i, opening = o.open[last], o.tokens[o.open[last]]
	}
	switch {
	case i >= 0 && closers[opening.Type] == t.Type:
		o.open = o.open[:len(o.open)-1]
		if opening.Type == hclsyntax.TokenOBrace {
			o.addBrace(i, t)
		}
	case opening.Type == hclsyntax.TokenOBrack || opening.Type == hclsyntax.TokenOParen:
		o.neverClosed(t)
	default:
		o.fail(t.Range, "remove it, or add what it was meant to close", "this %q closes nothing", t.Bytes)
	}
}

// addBrace adds the braces from the token i to the token closing.
func (o *outline) addBrace(i int, closing hclsyntax.Token) {
	opening, word := o.tokens[i], o.wordBefore(i)
	if i > 0 && o.tokens[i-1].Type == hclsyntax.TokenEqual {
		word = o.wordBefore(i - 1)
	}
	b := brace{string(word.Bytes), word.Range.Start.Byte, opening.Range.Start.Byte, closing.Range.End.Byte}
	o.braces = append(o.braces, b)
	if i > 1 && o.tokens[i-1].Type == hclsyntax.TokenCQuote && string(o.tokens[i-2].Bytes) == secretsName {
		o.secrets = append(o.secrets, span{b.open, b.close}) // dynamic "secrets" {
	}
	if o.suspect < 0 && o.leftOf(closing, opening) {
		o.suspect = i
	}
}

// leftOf reports whether the closing bracket starts its line and is indented less than the line of the opening one.
func (o *outline) leftOf(closing, opening hclsyntax.Token) bool {
	at := closing.Range.Start.Byte
	start, indent := o.indent(at)
	_, other := o.indent(opening.Range.Start.Byte)
	return start+indent == at && indent < other
}

// indent returns the start of the line that contains the byte at, and the width of its leading white space.
func (o *outline) indent(at int) (start, width int) {
	start = bytes.LastIndexByte(o.text[:at], '\n') + 1
	return start, len(o.text[start:]) - len(bytes.TrimLeft(o.text[start:], " \t"))
}

// checkClosed reports an opening token that is not closed at the end of the text. Of several braces it prefers the one
// that indentation shows to be unclosed.
func (o *outline) checkClosed() {
	end := o.tokens[len(o.tokens)-1]
	switch last := len(o.open) - 1; {
	case last < 0:
	case o.suspect >= 0 && o.tokens[o.open[last]].Type == hclsyntax.TokenOBrace:
		o.fail(o.tokens[o.suspect].Range, "add the missing }", "this { seems to lack its }")
	default:
		o.neverClosed(end)
	}
	if o.secret >= 0 {
		o.secrets = append(o.secrets, span{o.tokens[o.secret].Range.Start.Byte, end.Range.End.Byte})
	}
}

// neverClosed reports that what was opened last is not closed before end.
func (o *outline) neverClosed(end hclsyntax.Token) {
	opening := o.tokens[o.open[len(o.open)-1]]
	switch opening.Type {
	case hclsyntax.TokenOQuote:
		at := hcl.Range{Filename: opening.Range.Filename, Start: opening.Range.Start, End: end.Range.Start}
		o.fail(at, `add the missing ", or use a heredoc (<<EOT) for text of several lines`,
			"this string is not closed on its line")
	case hclsyntax.TokenOHeredoc:
		o.fail(opening.Range, "add a line that holds nothing but its marker", "this heredoc is never closed")
	case hclsyntax.TokenOParen:
		o.fail(opening.Range, `add the missing ")"`, "this %q is never closed", opening.Bytes)
	case hclsyntax.TokenOBrack:
		o.fail(opening.Range, `add the missing "]"`, "this %q is never closed", opening.Bytes)
	default:
		o.fail(opening.Range, `add the missing "}"`, "this %q is never closed", opening.Bytes)
	}
}
