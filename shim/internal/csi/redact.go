package csi

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"holdfast/registry"
)

// maxDetail bounds what is kept of a plugin's text, in bytes.
const maxDetail = 1 << 10

// Redact returns s as it may be shown: bounded, printable, on one line, and with registry.Masked in place of secrets. The
// secrets are the strings that masks replaces (nil: none), and values whose name is a registry.SecretName: password=x.
func Redact(s string, masks *strings.Replacer) string {
	if masks != nil {
		s = masks.Replace(s)
	}
	s = printable(s)
	if masks != nil {
		s = masks.Replace(s)
	}
	s = maskNamed(s)
	if len(s) > maxDetail {
		s = s[:maxDetail] + "…"
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
}

// named matches a value behind its name: name=value as in a mount flag or a URL, also in quotes, and "name":"value" as in
// JSON.
var named = regexp.MustCompile(`([A-Za-z][A-Za-z0-9_./-]*)(?:(?:="|" ?: ?")((?:[^"\\]|\\.)+)|='([^']+)|=([^,\s"'&;)\]}]+))`)

// maskNamed masks values that are named like secrets, even if this process never sent them. A name before a colon counts
// only in JSON, because prose says "secret: not found".
func maskNamed(s string) string {
	var out strings.Builder
	last := 0
	for _, m := range named.FindAllStringSubmatchIndex(s, -1) {
		if name := s[m[2]:m[3]]; name != "key" && registry.SecretName(name) { // logs are full of key="name"
			from, to := max(m[4], m[6], m[8]), max(m[5], m[7], m[9]) // those of the groups that did not match are -1
			out.WriteString(s[last:from] + registry.Masked)
			last = to
		}
	}
	return out.String() + s[last:]
}

// masksOf replaces every form of the words, the longest first: one may be part of another.
func masksOf(words map[word]uint64) *strings.Replacer {
	masks := map[string]string{}
	for w := range words {
		for _, form := range forms(w.value) {
			if w.name == "" {
				masks[form] = registry.Masked
				continue
			}
			for _, between := range []string{"=", `="`, ":", ": ", `":"`, `": "`} {
				masks[w.name+between+form] = w.name + between + registry.Masked
			}
		}
	}
	var pairs []string
	for _, form := range slices.SortedFunc(maps.Keys(masks), func(x, y string) int {
		return cmp.Or(cmp.Compare(len(y), len(x)), cmp.Compare(x, y))
	}) {
		pairs = append(pairs, form, masks[form])
	}
	return strings.NewReplacer(pairs...)
}

// forms returns how a value may be written: as it is, and as Go, JSON, base64 and URLs write it.
func forms(v string) []string {
	quoted := strconv.Quote(v)
	all := []string{v, quoted[1 : len(quoted)-1]}
	if j, err := json.Marshal(v); err == nil {
		all = append(all, string(j[1:len(j)-1]))
	}
	if len(v) >= shortest {
		all = append(all, base64.RawStdEncoding.EncodeToString([]byte(v)), base64.RawURLEncoding.EncodeToString([]byte(v)),
			url.QueryEscape(v), url.PathEscape(v))
	}
	return all
}
