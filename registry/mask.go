package registry

import (
	"regexp"
	"strings"
	"sync"
)

// lazily compiles an expression when it is needed first: most processes, such as the parent of a task, need none.
func lazily(pattern string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(pattern) })
}

// Masked replaces a secret's value in output for people.
const Masked = "***"

// secretNames matches the end of a secret's name after it is reduced to lower-case letters.
var secretNames = lazily(`(password|passwd|passphrase|secrets?|tokens?|` +
	`(access|account|api|auth|encryption|master|private|secret|shared)key)$`)

// secretWords matches short words only as the whole name or its last word: "monkey" is not a key.
var secretWords = lazily(`(?i)(^|[^a-z])(pass|pwd|key)[0-9]*$`)

var noLetters = lazily(`[^a-z]+`)

// SecretName reports whether a mount flag, parameter or context key of this name holds a secret. It checks the end of
// the name: "node-stage-secret" holds a secret, "node-stage-secret-name" does not.
func SecretName(name string) bool {
	return secretNames().MatchString(noLetters().ReplaceAllString(strings.ToLower(name), "")) ||
		secretWords().MatchString(name)
}

// Secrets calls each for every value in the flags whose name is a SecretName, such as "password=x" in
// "-o username=u,password=x".
func (f Flags) Secrets(each func(name, value string)) {
	for _, flag := range f.List() {
		for _, s := range secretsOf(flag) {
			each(s.name, flag[s.from:s.to])
		}
	}
}

// Masked returns the flags with Masked in place of each secret.
func (f Flags) Masked() Flags {
	flags := f.List()
	for i, flag := range flags {
		var out strings.Builder
		last := 0
		for _, s := range secretsOf(flag) {
			out.WriteString(flag[last:s.from] + Masked)
			last = s.to
		}
		flags[i] = out.String() + flag[last:]
	}
	return FlagsOf(flags)
}

// flagSecret is the name of a secret in a mount flag and the position of its value.
type flagSecret struct {
	name     string
	from, to int
}

// assigned matches a name and its value in a mount flag. The value ends at a comma or is quoted.
var assigned = lazily(`([^\s,="']+)=("[^"]*"|'[^']*'|[^,]*)`)

// secretsOf returns the secrets in one mount flag, such as a comma-separated list of options.
func secretsOf(flag string) (out []flagSecret) {
	for at := 0; at < len(flag); {
		m := assigned().FindStringSubmatchIndex(flag[at:])
		if m == nil {
			return out
		}
		s := flagSecret{flag[at+m[2] : at+m[3]], at + m[4], at + m[5]}
		if next := strings.Index(flag[s.from:s.to], " -"); next >= 0 { // another option in the same flag
			s.to = s.from + next
		}
		at = s.to
		if n := s.to - s.from; n > 1 && strings.ContainsRune(`"'`, rune(flag[s.from])) && flag[s.to-1] == flag[s.from] {
			s.from, s.to = s.from+1, s.to-1
		}
		if s.to > s.from && SecretName(s.name) {
			out = append(out, s)
		}
	}
	return out
}

// Masked returns the usage with secrets in its mount flags masked.
func (u Usage) Masked() Usage {
	u.MountFlags = u.MountFlags.Masked()
	return u
}

// Masked returns the volume with secrets in its mount flags, parameters and context masked.
func (v Volume) Masked() Volume {
	v.Mutable, v.Modification.Asked = masked(v.Mutable), masked(v.Modification.Asked)
	v.Modification.Earlier = nil // not for status
	v.MountFlags, v.Parameters, v.Context = v.MountFlags.Masked(), masked(v.Parameters), masked(v.Context)
	return v
}

// Masked returns the snapshot with secrets in its parameters masked.
func (s VolumeSnapshot) Masked() VolumeSnapshot {
	s.Parameters = masked(s.Parameters)
	return s
}

func masked(values map[string]string) map[string]string {
	if values == nil {
		return nil
	}
	out := make(map[string]string, len(values))
	for name, value := range values {
		if value != "" && SecretName(name) {
			value = Masked
		}
		out[name] = value
	}
	return out
}
