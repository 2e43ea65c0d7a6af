package hooks

import "strings"

// Expand resolves the references that stand verbatim in a carried job: ${NAME}, ${node.unique.id}, ${attr.kernel.name},
// ${meta.rack}, or with an index ${env["NAME"]}, ${meta["rack"]}. A variable is looked up by its name, everything else
// by its dotted form ("meta.rack"). What is unknown stays as it is, and a value is not expanded again.
func Expand(text string, env map[string]string) string {
	var out strings.Builder
	for {
		start := strings.Index(text, "${")
		if start < 0 {
			break
		}
		length := strings.IndexByte(text[start:], '}')
		if length < 0 {
			break
		}
		out.WriteString(text[:start])
		reference := text[start : start+length+1]
		if value, known := lookUp(strings.TrimSpace(reference[2:length]), env); known {
			out.WriteString(value)
			text = text[start+len(reference):]
			continue
		}
		// Only these two characters are skipped: an unknown reference may contain a known one.
		out.WriteString("${")
		text = text[start+2:]
	}
	out.WriteString(text)
	return out.String()
}

// lookUp returns the value of a reference, which is written without ${ and }.
func lookUp(name string, env map[string]string) (string, bool) {
	if value, known := env[name]; known {
		return value, true
	}
	base, rest, indexed := strings.Cut(name, `["`)
	key, closed := strings.CutSuffix(rest, `"]`)
	switch {
	case !indexed || !closed:
		variable, found := strings.CutPrefix(name, "env.")
		if !found {
			return "", false
		}
		key = variable
	case base != "env": // meta["rack"] is in env as meta.rack, but env["NAME"] as NAME
		key = base + "." + key
	}
	value, known := env[key]
	return value, known
}
