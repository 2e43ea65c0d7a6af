package csi

import (
	"encoding/base64"
	"encoding/json"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"pgregory.net/rapid"

	"holdfast/registry"
)

// redactorFor masks secrets without names.
func redactorFor(values ...string) redactor {
	var p private
	for _, value := range values {
		p.add("", value)
	}
	return (&sentSecrets{}).redactorOf(p)
}

func TestRedact(t *testing.T) {
	r := redactorFor("", "s3cret", "s3cret-long", `a"bcde`, "<a&bc>")
	for _, c := range []struct{ in, want string }{
		{"", ""},
		{"plain text", "plain text"},
		{"a token s3cret, twice s3cret", "a token ***, twice ***"},
		{"s3cret-long before s3cret", "*** before ***"},
		{"line\nbreak\ttab\x00\x1b[31m", "line break tab  [31m"},
		{"bad \xff\xfe bytes", "bad \uFFFD bytes"},
		{"right\u202eto left\u2028end", "right to left end"},
		{`quoted a\"bcde`, "quoted ***"},
		{`as JSON \u003ca\u0026bc\u003e!`, "as JSON ***!"},
		{strings.Repeat("é", maxText), strings.Repeat("é", maxText/2) + "…"},
		{strings.Repeat("x", maxText-1) + "é", strings.Repeat("x", maxText-1) + "\uFFFD…"},
	} {
		if got := r.redact(c.in); got != c.want {
			t.Errorf("Redact(%q) is %q, want %q", c.in, got, c.want)
		}
	}
}

// TestDriverTextsKeepTheirWords has real drivers' texts for a volume with flags, parameters and contexts, and one secret of each length.
func TestDriverTextsKeepTheirWords(t *testing.T) {
	masked := carried(
		map[string]registry.SecretValue{"apikey": "hunter2-long", "verbose": "true", "pin": "1234", "a": "a"},
		registry.FlagsOf([]string{"vers=4,hard", "-o username=smbuser,password=FLAGSECRET-1234", "loop", "pwd=abc"}),
		map[string]string{"fsType": "ext4", "server": "server", "share": "/export", "adminSecret": "CTX-SECRET", "size": "1073741824", "loop": "true"},
		map[string]string{"device": "/dev/loop1", "token": "PUBLISH-TOKEN"},
	)
	r := (&sentSecrets{}).redactorOf(masked)
	for in, want := range map[string]string{
		"mount -t nfs -o vers=4,hard server:/export failed":                   "mount -t nfs -o vers=4,hard server:/export failed",
		"ext4fs has 1073741824 in all":                                        "ext4fs has 1073741824 in all",
		"cannot format ext4 on /dev/loop1: true":                              "cannot format ext4 on /dev/loop1: true",
		"mount -o username=smbuser,password=FLAGSECRET-1234 //s":              "mount -o username=smbuser,password=*** //s",
		"login with FLAGSECRET-1234 was refused":                              "login with *** was refused",
		"token PUBLISH-TOKEN, secret CTX-SECRET":                              "token ***, secret ***",
		"hunter2-long is wrong":                                               "*** is wrong",
		"verbose=true is true":                                                "verbose=*** is true",
		`{"pin":"1234","port":1234}`:                                          `{"pin":"***","port":1234}`,
		"pin: 1234":                                                           "pin: ***",
		"a banana":                                                            "a banana",
		"pwd=abc and abc":                                                     "pwd=*** and abc",
		"password=never-sent,vers=3":                                          "password=***,vers=3",
		"GET https://s/?access_token=xyz&n=1 failed":                          "GET https://s/?access_token=***&n=1 failed",
		`{"clientSecret": "never sent", "n": 1}`:                              `{"clientSecret": "***", "n": 1}`,
		`{"clientSecret": "never \"sent\"", "n": 1}`:                          `{"clientSecret": "***", "n": 1}`,
		"mount -o password='never sent',vers=3":                               "mount -o password='***',vers=3",
		"secret default/smb-creds: token expired":                             "secret default/smb-creds: token expired",
		`key="default/pvc" secretName=smb-creds`:                              `key="default/pvc" secretName=smb-creds`,
		"base64 " + base64.StdEncoding.EncodeToString([]byte("hunter2-long")): "base64 ***",
	} {
		if got := r.redact(in); got != want {
			t.Errorf("%q is shown as %q, want %q", in, got, want)
		}
	}
}

// secretGen makes secrets that can be told from what stands for them.
func secretGen() *rapid.Generator[string] {
	return rapid.StringMatching(`[a-zA-Z0-9"\\ /+<>&=%é-]{6,16}`)
}

// Whatever a plugin says, and however it writes a secret: what is left is short, printable and without it.
func TestNoSecretSurvivesRedact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		secrets := rapid.SliceOfN(secretGen(), 0, 4).Draw(t, "secrets")
		parts := rapid.SliceOf(rapid.String()).Draw(t, "other")
		for _, s := range secrets {
			j, _ := json.Marshal(s)
			parts = append(parts, rapid.SampledFrom([]string{
				s, strconv.Quote(s), string(j), url.QueryEscape(s), url.PathEscape(s), base64.StdEncoding.EncodeToString([]byte(s)),
				base64.URLEncoding.EncodeToString([]byte(s)), "password=" + s, s + s, s[:3] + s,
			}).Draw(t, "form"))
		}
		if len(parts) > 0 {
			parts = rapid.Permutation(parts).Draw(t, "order")
		}
		text := strings.Join(parts, rapid.SampledFrom([]string{"", " ", "\n", "\xff", ","}).Draw(t, "between"))
		got := redactorFor(secrets...).redact(text)
		for _, s := range secrets {
			for _, form := range forms(s) {
				if strings.Contains(got, form) {
					t.Fatalf("%q shows %q of %q", got, form, s)
				}
			}
		}
		if len(got) > maxText+len("…")+2 || !utf8.ValidString(got) || strings.ContainsFunc(got, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Fatalf("%q is %d bytes", got, len(got))
		}
	})
}

// FuzzRedact holds the same for texts and secrets that the generators above do not think of.
func FuzzRedact(f *testing.F) {
	f.Add("error: canary-secret", "canary-secret")
	f.Add("a\xffb", "\xff")
	f.Add("canarycanary", "canary")
	f.Fuzz(func(t *testing.T, s, secret string) {
		got := redactorFor(secret).redact(s + secret)
		if !utf8.ValidString(got) || len(got) > 4*maxText {
			t.Errorf("%q", got)
		}
		if len(secret) >= shortest && !strings.ContainsAny(secret, "*…\uFFFD") && strings.Contains(got, secret) {
			t.Errorf("%q shows %q", got, secret)
		}
	})
}
