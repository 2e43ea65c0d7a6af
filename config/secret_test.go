package config

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"testing"

	"holdfast/registry"
)

const canary = "hunter2hunter2"

var canaryFile = volumeHead + `secrets {
  password   = "` + canary + `"
  "quoted/k" = "` + canary + ` and more"
  reference  = { env = "` + canary + ` x" }
  heredoc    = <<EOT
` + canary + `
EOT
}
parameters {
  after = "x"
}
`

var canaryJob = `job "x" {
  group "g" {
    volume "v" {
      type = "csi"
      ephemeral {
        plugin_id = "p"
        secrets {
          password   = "` + canary + `"
          "quoted/k" = "` + canary + ` and more"
          reference  = { env = "` + canary + ` x" }
        }
        context { after = "x" }
      }
    }
    task "t" { driver = "exec" }
  }
}
`

// canaryStatements are secrets that are not in a block named secrets.
var canaryStatements = []string{
	`secrets = { password = "` + canary + `" }`,
	`secrets = "` + canary + `"`,
	"secrets = [\n  1, \"" + canary + "\"]",
	"secrets = upper(<<EOT\n" + canary + "\nEOT\n)",
	"secrets = merge({\n  a = 1\n}, { b = \"" + canary + "\" })",
	"dynamic \"secrets\" {\n  for_each = [1]\n  content {\n    password = \"" + canary + "\"\n    inner {}\n  }\n}",
}

// TestNoDiagnosticShowsASecret checks that no diagnostic repeats a secret, whatever is wrong with the file.
func TestNoDiagnosticShowsASecret(t *testing.T) {
	volume := func(text string) registry.Diagnostics {
		_, ds := ParseVolume(Source{"v.hcl", []byte(text)}, Options{})
		return ds
	}
	job := func(text string) registry.Diagnostics {
		_, ds := ParseJob(Source{"j.hcl", []byte(text)}, Options{})
		return ds
	}
	t.Run("volume", func(t *testing.T) { neverShown(t, "", canaryFile, "", volume) })
	t.Run("job", func(t *testing.T) { neverShown(t, "", canaryJob, "", job) })
	t.Run("password of a registry", func(t *testing.T) {
		for _, auth := range []string{`auth { username = "u`, "auth {\n", `auth = { username = "u",`} {
			head := `job "x" { group "g" { task "t" { config { ` + auth + ` password = "` + canary
			for _, end := range []string{"", `"`, `" }`, "\n}}}}}", "\"\n}}}}", "\"\n}}}}}", "\"\n}}}}}}"} {
				if text := fmt.Sprintf("%#v", job(head+end)); strings.Contains(text, "hunter2") {
					t.Errorf("%s%s: %s", head, end, text)
				}
			}
		}
	})
	head, rest, _ := strings.Cut(canaryJob, "secrets {")
	_, tail, _ := strings.Cut(rest, "context {")
	for _, statement := range canaryStatements {
		t.Run("statement", func(t *testing.T) {
			neverShown(t, volumeHead, statement+"\n", "parameters { after = 1 }\n", volume)
			neverShown(t, head, statement+"\n", "context {"+tail, job)
		})
	}
}

// neverShown breaks the text between head and tail at each place, in several ways. No diagnostic may have the secret.
func neverShown(t *testing.T, head, text, tail string, parse func(string) registry.Diagnostics) {
	for i := range text {
		before, after := head+text[:i], text[i:]+tail
		for _, broken := range []string{
			before, before + after[1:], before + `"` + after, before + "{" + after, before + "$" + after, before + "=" +
				after,
		} {
			for _, d := range parse(broken) {
				if shown := fmt.Sprintf("%#v", d); strings.Contains(shown, "hunter2") {
					t.Fatalf("at byte %d of\n%s\nit says %s", i, broken, shown)
				}
			}
		}
	}
}

// TestLiteralSecretsOfVolumeFiles: a volume file may hold the values themselves, which no text of the spec repeats.
func TestLiteralSecretsOfVolumeFiles(t *testing.T) {
	src := Source{"v.hcl", read(t, "testdata/good/volume-secrets.hcl")}
	spec, ds := ParseVolume(src, Options{})
	want := map[string]registry.Secret{"user": {Literal: "admin"}, "number": {Literal: "12345"},
		"variable": {Literal: "from a variable"}, "composed": {Literal: "X"}, "reference": {Env: "KEY"}}
	if ds.Err() != nil || !maps.Equal(spec.Secrets, want) {
		t.Errorf("%v; the secrets are not those of the file", ds)
	}
	if text, err := json.Marshal(spec); err != nil ||
		strings.Contains(fmt.Sprintf("%s %v %+v %#v", text, spec, *spec, *spec), "admin") {
		t.Errorf("%s %+v, %v", text, spec, err)
	}
}

// TestSnippetsAreShownElsewhere is the control of TestNoDiagnosticShowsASecret: a mistake outside secrets is shown.
func TestSnippetsAreShownElsewhere(t *testing.T) {
	_, ds := ParseVolume(Source{"v.hcl", []byte(`id = ` + canary)}, Options{})
	if !strings.Contains(fmt.Sprintf("%#v", ds), canary) {
		t.Errorf("the mistake is not shown: %v", ds)
	}
}
