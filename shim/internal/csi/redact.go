package csi

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"holdfast/registry"
)

// Limits of redaction, in bytes except for maxSecrets.
const (
	maxText        = 1 << 10 // kept of a plugin's text
	maxSecrets     = 512     // number of secrets remembered for one plugin
	maxSecretBytes = 1 << 20 // total size of their values
	// minUnnamed is the length from which a secret is masked everywhere in a text. To mask "true" or "1234" everywhere
	// would hide words that are no secrets.
	minUnnamed = 6
)

// secret is a value that must not appear in a text. If name is set, the value is masked only behind that name, else
// everywhere.
type secret struct{ name, value string }

type secretList []secret

// add adds a secret. A long value is masked everywhere, a short one only behind its name. A short one without a name is
// dropped.
func (l *secretList) add(name, value string) {
	switch {
	case len(value) >= minUnnamed:
		*l = append(*l, secret{"", value})
	case value != "" && name != "":
		*l = append(*l, secret{name, value})
	}
}

// addMessage adds the values that must not appear in a text about a request: the fields that CSI declares secret
// (csi_secret), and the entries of other maps and the mount flags whose names look like names of secrets.
func (l *secretList) addMessage(m protoreflect.Message) {
	if mount, is := m.Interface().(*csi.VolumeCapability_MountVolume); is {
		registry.FlagsOf(mount.GetMountFlags()).Secrets(l.add)
	}
	m.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		declared, _ := proto.GetExtension(field.Options(), csi.E_CsiSecret).(bool)
		switch {
		case field.IsMap():
			value.Map().Range(func(key protoreflect.MapKey, value protoreflect.Value) bool {
				if declared || registry.SecretName(key.String()) {
					l.add(key.String(), value.String())
				}
				return true
			})
		case declared:
			l.add(string(field.Name()), value.String())
		case field.IsList() && field.Message() != nil:
			for i := range value.List().Len() {
				l.addMessage(value.List().Get(i).Message())
			}
		case field.Message() != nil:
			l.addMessage(value.Message())
		}
		return true
	})
}

func secretsIn(req proto.Message) (out secretList) {
	out.addMessage(req.ProtoReflect())
	return out
}

// secrets returns the secrets in p, and the values of its contexts whose names look like secrets.
func (p Private) secrets() (out secretList) {
	for name, s := range p.Secrets {
		out.add(name, s.Reveal())
	}
	for _, c := range p.Contexts {
		for name, value := range c {
			if registry.SecretName(name) {
				out.add(name, value)
			}
		}
	}
	p.MountFlags.Secrets(out.add)
	return out
}

// sentSecrets holds the secrets that were sent to one plugin. A plugin may repeat them in any later answer, so they are
// masked in all its texts. They are kept in memory only.
type sentSecrets struct {
	mu    sync.Mutex        // guards the fields below; held while masks are built, by calls of this plugin only
	sent  []secret          // the newest last
	bytes int               // of the values
	masks *strings.Replacer // of sent; nil: sent has changed since they were built
}

// add remembers secrets that are about to be sent. Beyond the limits it drops the oldest, but never those of the
// current call.
func (s *sentSecrets) add(secrets []secret) {
	s.mu.Lock()
	defer s.mu.Unlock()
	older := len(s.sent) // the secrets at the start of sent that are not of this call
	for _, one := range secrets {
		if i := slices.Index(s.sent, one); i >= 0 {
			s.sent = slices.Delete(s.sent, i, i+1)
			if i < older {
				older--
			}
		} else {
			s.bytes, s.masks = s.bytes+len(one.value), nil
		}
		s.sent = append(s.sent, one)
	}
	for older > 0 && (len(s.sent) > maxSecrets || s.bytes > maxSecretBytes) {
		s.bytes, s.masks = s.bytes-len(s.sent[0].value), nil
		s.sent = slices.Delete(s.sent, 0, 1)
		older--
	}
}

// redactor returns a redactor for the secrets that were sent to the plugin, the given secrets included.
func (s *sentSecrets) redactor(secrets []secret) redactor {
	s.add(secrets)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.masks == nil {
		s.masks = masksOf(s.sent)
	}
	return redactor{masks: s.masks}
}

// redactorOf returns the redactor for the texts of one call. If private could not resolve the secrets, the redactor
// withholds every text.
func (s *sentSecrets) redactorOf(ctx context.Context, req proto.Message, private PrivateFunc) redactor {
	secrets := secretsIn(req)
	if private != nil {
		p := private(ctx)
		if p.Unknown {
			return redactor{withhold: true}
		}
		secrets = append(secrets, p.secrets()...)
	}
	return s.redactor(secrets)
}

// lazyRedactor returns a function that returns the redactor for the texts in the answer to one call. The redactor is
// made at the first use, because private may resolve secrets.
func (f *Fleet) lazyRedactor(
	ctx context.Context, at registry.InstanceKey, req proto.Message, private PrivateFunc,
) func() redactor {
	return sync.OnceValue(func() redactor { return f.secretsOf(at.Plugin).redactorOf(ctx, req, private) })
}

// redactor makes a plugin's texts fit to be shown. The zero value masks only values that are named like secrets.
type redactor struct {
	masks    *strings.Replacer
	withhold bool // withhold every text
}

const withheld = "the plugin's text is withheld, because the volume's secrets could not be resolved to mask them in it"

// redact returns s bounded, printable, on one line, and with registry.Masked in place of secrets. These are the secrets
// that r knows, and values whose name is a registry.SecretName, such as password=x.
func (r redactor) redact(s string) string {
	if r.withhold {
		return withheld
	}
	s = printable(r.mask(s))
	s = maskNamed(r.mask(s)) // mask again: printable replaced characters by spaces, and a secret may have spaces
	if len(s) > maxText {
		s = s[:maxText] + "…"
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

func (r redactor) mask(s string) string {
	if r.masks == nil {
		return s
	}
	return r.masks.Replace(s)
}

func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
}

// namedValue matches a value behind its name: name=value as in a mount flag or a URL, also in quotes, and
// "name":"value" as in JSON.
var namedValue = regexp.MustCompile(
	`([A-Za-z][A-Za-z0-9_./-]*)(?:(?:="|" ?: ?")((?:[^"\\]|\\.)+)|='([^']+)|=([^,\s"'&;)\]}]+))`)

// maskNamed masks values whose names look like secrets, even if this process never sent them. A name before a colon
// counts only in JSON, because prose has texts such as "secret: not found".
func maskNamed(s string) string {
	var out strings.Builder
	last := 0
	for _, m := range namedValue.FindAllStringSubmatchIndex(s, -1) {
		if name := s[m[2]:m[3]]; name != "key" && registry.SecretName(name) { // logs are full of key="name"
			from, to := max(m[4], m[6], m[8]), max(m[5], m[7], m[9]) // -1: the group did not match
			out.WriteString(s[last:from] + registry.Masked)
			last = to
		}
	}
	return out.String() + s[last:]
}

// masksOf returns a replacer for every form of the secrets. Longer forms come first, because one may contain another.
func masksOf(secrets []secret) *strings.Replacer {
	masks := map[string]string{}
	for _, s := range secrets {
		for _, form := range forms(s.value) {
			if s.name == "" {
				masks[form] = registry.Masked
				continue
			}
			for _, between := range []string{"=", `="`, ":", ": ", `":"`, `": "`} {
				masks[s.name+between+form] = s.name + between + registry.Masked
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

// forms returns the ways to write a value: unchanged, and as Go, JSON, base64 and URLs encode it.
func forms(v string) []string {
	quoted := strconv.Quote(v)
	all := []string{v, quoted[1 : len(quoted)-1]}
	if j, err := json.Marshal(v); err == nil {
		all = append(all, string(j[1:len(j)-1]))
	}
	if len(v) >= minUnnamed {
		all = append(all, base64.RawStdEncoding.EncodeToString([]byte(v)),
			base64.RawURLEncoding.EncodeToString([]byte(v)),
			url.QueryEscape(v), url.PathEscape(v))
	}
	return all
}
