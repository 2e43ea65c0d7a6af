package csi

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"pgregory.net/rapid"

	"holdfast/internal/csifake"
	"holdfast/registry"
)

// redactorFor masks secrets without names.
func redactorFor(values ...string) redactor {
	var list secretList
	for _, value := range values {
		list.add("", value)
	}
	return (&sentSecrets{}).redactor(list)
}

func TestRedactedTextIsPrintableAndBounded(t *testing.T) {
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

// The texts are those of real drivers.
func TestDriverTextsKeepTheirWords(t *testing.T) {
	secrets := map[string]string{"apikey": "hunter2-long", "verbose": "true", "pin": "1234", "a": "a"}
	flags := []string{"vers=4,hard", "-o username=smbuser,password=FLAGSECRET-1234", "loop", "pwd=abc"}
	volume := map[string]string{"fsType": "ext4", "server": "server", "share": "/export", "adminSecret": "CTX-SECRET",
		"size": "1073741824", "loop": "true"}
	publish := map[string]string{"device": "/dev/loop1", "token": "PUBLISH-TOKEN"}
	r := (&sentSecrets{}).redactor(secretsIn(&csi.NodePublishVolumeRequest{
		Secrets: secrets, VolumeContext: volume, PublishContext: publish,
		VolumeCapability: usageCapability(registry.Usage{MountFlags: registry.FlagsOf(flags)}),
	}))
	const same = ""
	for in, want := range map[string]string{
		"mount -t nfs -o vers=4,hard server:/export failed": same,
		"ext4fs has 1073741824 in all":                      same,
		"cannot format ext4 on /dev/loop1: true":            same,
		"mount -o username=smbuser,password=FLAGSECRET-1234 //s": "mount -o " +
			"username=smbuser,password=*** //s",
		"login with FLAGSECRET-1234 was refused": "login with *** was refused",
		"token PUBLISH-TOKEN, secret CTX-SECRET": "token ***, secret ***",
		"hunter2-long is wrong":                  "*** is wrong",
		"verbose=true is true":                   "verbose=*** is true",
		`{"pin":"1234","port":1234}`:             `{"pin":"***","port":1234}`,
		"pin: 1234":                              "pin: ***",
		"a banana":                               same,
		"pwd=abc and abc":                        "pwd=*** and abc",
		"password=never-sent,vers=3":             "password=***,vers=3",
		"GET https://s/?access_token=xyz&n=1 failed": "GET https://s/?access_token=***&n=1 " +
			"failed",
		`{"clientSecret": "never sent", "n": 1}`:                              `{"clientSecret": "***", "n": 1}`,
		`{"clientSecret": "never \"sent\"", "n": 1}`:                          `{"clientSecret": "***", "n": 1}`,
		"mount -o password='never sent',vers=3":                               "mount -o password='***',vers=3",
		"secret default/smb-creds: token expired":                             same,
		`key="default/pvc" secretName=smb-creds`:                              same,
		"base64 " + base64.StdEncoding.EncodeToString([]byte("hunter2-long")): "base64 ***",
	} {
		if got := r.redact(in); got != cmp.Or(want, in) {
			t.Errorf("%q is shown as %q, want %q", in, got, want)
		}
	}
}

// secretGen makes secrets that differ from the mask.
func secretGen() *rapid.Generator[string] {
	return rapid.StringMatching(`[a-zA-Z0-9"\\ /+<>&=%é-]{6,16}`)
}

// Whatever form a secret has in a text, the result is short and printable, and does not contain it.
func TestNoSecretSurvivesRedact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		secrets := rapid.SliceOfN(secretGen(), 0, 4).Draw(t, "secrets")
		parts := rapid.SliceOf(rapid.String()).Draw(t, "other")
		for _, s := range secrets {
			j, _ := json.Marshal(s)
			parts = append(parts, rapid.SampledFrom([]string{
				s, strconv.Quote(s), string(j), url.QueryEscape(s), url.PathEscape(s),
				base64.StdEncoding.EncodeToString([]byte(s)),
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
		if len(got) > maxText+len("…")+2 || !utf8.ValidString(got) ||
			strings.ContainsFunc(got, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Fatalf("%q is %d bytes", got, len(got))
		}
	})
}

// FuzzRedact checks the same for any text and secret.
func FuzzRedact(f *testing.F) {
	f.Add("error: canary-secret", "canary-secret")
	f.Add("a\xffb", "\xff")
	f.Add("canarycanary", "canary")
	f.Fuzz(func(t *testing.T, s, secret string) {
		got := redactorFor(secret).redact(s + secret)
		if !utf8.ValidString(got) || len(got) > 4*maxText {
			t.Errorf("%q", got)
		}
		if len(secret) >= minUnnamed && !strings.ContainsAny(secret, "*…\uFFFD") && strings.Contains(got, secret) {
			t.Errorf("%q shows %q", got, secret)
		}
	})
}

// leakSecrets makes every call of the plugin fail with all secrets in the text.
func leakSecrets(fake *csifake.Plugin) {
	fake.On("").Code(codes.Internal, "it says: "+strings.Join(canaries[:len(canaries)-1], ", ")+
		fmt.Sprintf(" and %q", canaryQuoted))
}

// A secret of one call does not appear in the error of another call or of a probe.
func TestSecretsDoNotLeakIntoOtherCalls(t *testing.T) {
	fake, f := start(t, csifake.Config{})
	fake.On("").Reply(&csi.NodeStageVolumeResponse{}, nil)
	for _, c := range mutating {
		_ = c.do(patient(t), f)
	}
	fake.ClearScript()
	leakSecrets(fake)
	ctx, conn := patient(t), open(t, f)
	_, probe := conn.Probe(ctx)
	_, describe := conn.Describe(ctx, []registry.Role{registry.RoleNode})
	for what, err := range map[string]error{
		"Unstage":   f.Unstage(ctx, nodeKey, UnstageRequest{VolumeID: "vol-1", StagingPath: "/s"}),
		"Unpublish": f.Unpublish(ctx, nodeKey, UnpublishRequest{VolumeID: "vol-1", TargetPath: "/t"}),
		"Detach":    f.Detach(ctx, controllerKey, DetachRequest{VolumeID: "vol-1", Node: "n"}),
		"Delete":    f.Delete(ctx, controllerKey, DeleteRequest{VolumeID: "vol-1"}),
		"Probe":     probe, "Describe": describe,
	} {
		if err == nil || !strings.Contains(err.Error(), "it says: ") {
			t.Fatalf("%s: %v", what, err)
		}
		wantNone(t, what, err.Error(), canaries...)
	}
}

// A new process remembers no secrets. It asks for them only when the plugin has returned a text, and withholds the text
// if they are unknown.
func TestTextIsWithheldIfSecretsAreUnknown(t *testing.T) {
	fake, f := start(t, csifake.Config{})
	asked := 0
	private := func(p Private) func(context.Context) Private {
		return func(context.Context) Private { asked++; return p }
	}
	known := Private{Secrets: secrets, MountFlags: usage.MountFlags,
		Contexts: []map[string]string{publishContext, volumeContext, {"api-key": canaryParameter}}}
	unstage := func(f *Fleet, p Private) error {
		return f.Unstage(patient(t), nodeKey, UnstageRequest{VolumeID: "vol-1", StagingPath: "/s", Private: private(p)})
	}
	if err := unstage(f, known); err != nil || asked != 0 {
		t.Errorf("a call that succeeds asks %d times: %v", asked, err)
	}
	if err := unstage(New(table{}, Observer{Metrics: &CallMetrics{}}), known); err == nil || asked != 0 {
		t.Errorf("a call that was not sent asks %d times: %v", asked, err)
	}
	leakSecrets(fake)
	err := unstage(f, known)
	if err == nil || !strings.Contains(err.Error(), "it says: ") {
		t.Errorf("%v", err)
	}
	wantNone(t, "known", fmt.Sprint(err), canaries...)
	err = unstage(f, Private{Unknown: true})
	if err == nil || strings.Contains(err.Error(), "it says") || !strings.Contains(err.Error(), "INTERNAL") ||
		!strings.Contains(err.Error(), "withheld") {
		t.Errorf("%v", err)
	}
	if asked != 2 {
		t.Errorf("asked %d times", asked)
	}
}

// The oldest secrets are dropped, but never those of the current call.
func TestSentSecretsAreBounded(t *testing.T) {
	m := &sentSecrets{}
	kept := secret{"", "secret-kept"}
	for i := range 3 * maxSecrets {
		m.add([]secret{{"", fmt.Sprint("secret-", i)}, kept})
	}
	newest := secret{"", fmt.Sprint("secret-", 3*maxSecrets-1)}
	if len(m.sent) != maxSecrets || !slices.Contains(m.sent, newest) {
		t.Errorf("%d values are remembered; the newest: %v", len(m.sent), slices.Contains(m.sent, newest))
	}
	if !slices.Contains(m.sent, kept) {
		t.Error("a value that every call sends is forgotten")
	}
	large := secret{"", strings.Repeat("x", maxSecretBytes+1)}
	if got := m.redactor([]secret{large}).redact("is " + large.value); got != "is ***" {
		t.Errorf("a value beyond the limit is shown in its own call: %.20q", got)
	}
	m.add([]secret{kept})
	if m.bytes != len(kept.value) || len(m.sent) != 1 {
		t.Errorf("%d bytes of %d values are remembered", m.bytes, len(m.sent))
	}
	repeated := secret{"", strings.Repeat("r", maxSecretBytes/2+1)}
	fresh := secret{"", strings.Repeat("f", maxSecretBytes/2+1)}
	m.add([]secret{repeated, kept})
	m.add([]secret{fresh, repeated})
	if !slices.Equal(m.sent, []secret{fresh, repeated}) {
		t.Errorf("%d secrets are left of a call with 2", len(m.sent))
	}
}

// The cost of a failed probe does not depend on the number of secrets that were sent. To build the masks of 512 secrets
// takes thousands of allocations.
func TestFailedProbeBuildsNoMasks(t *testing.T) {
	f := New(table{}, Observer{Metrics: &CallMetrics{}})
	defer f.CloseAll()
	for i := range maxSecrets {
		f.secretsOf("disk").add([]secret{{"", fmt.Sprint("secret-number-", i)}})
		f.secretsOf("other").add([]secret{{"", fmt.Sprint("other-number-", i)}})
	}
	c, err := f.Connect("disk", taskKey, registry.Endpoint{Host: filepath.Join(socketDir(t), "none.sock")})
	must(t, err)
	probe := func() {
		if _, err := c.Probe(context.Background()); err == nil {
			t.Error("a probe without a listener succeeded")
		}
	}
	probe() // builds them once
	built := f.secretsOf("disk").masks
	if n := testing.AllocsPerRun(20, probe); n > 1000 {
		t.Errorf("a failed probe allocates %v times", n)
	}
	if f.secretsOf("disk").masks != built || built == nil || f.secretsOf("other").masks != nil {
		t.Error("masks were built for nothing")
	}
	if got := f.secretsOf("disk").redactor(nil).redact("secret-number-0 other-number-0"); got != "*** other-number-0" {
		t.Errorf("a secret of another plugin is masked: %s", got)
	}
}
