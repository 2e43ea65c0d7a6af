package config

import (
	"encoding/json"
	"strings"
	"testing"
)

// nextFiles are files that this release accepts and earlier ones refuse.
var nextFiles = []string{"testdata/next/scratch.hcl"}

// TestScratchIsOfANewerVersion: a reader that does not know scratch_dir would start the plugin without it, so it
// refuses a task with a scratch_dir. It still reads all others.
func TestScratchIsOfANewerVersion(t *testing.T) {
	for text, want := range map[string]int{"": 1, `scratch_dir = "/scratch"`: scratchVersion} {
		job := mustParse(t, strings.Replace(pluginText, "MORE", text, 1), Options{})
		var v struct{ Version int }
		if err := json.Unmarshal(job.Groups[0].Tasks[0].Sealed, &v); err != nil || v.Version != want {
			t.Errorf("%q is sealed with version %d, %v", text, v.Version, err)
		}
	}
}

const pluginText = `task "t" {
  driver = "exec"
  csi_plugin {
    id   = "p"
    type = "monolith"
    MORE
  }
}`

func TestScratchApart(t *testing.T) {
	for _, text := range []string{`scratch_dir = "/csi"`, `scratch_dir = "/csi/x"`, `scratch_dir = "scratch"`,
		`scratch_dir = "/local"`} {
		if got, ds := parse("job.hcl", []byte(strings.Replace(pluginText, "MORE", text, 1))); got != nil ||
			ds.Err() == nil {
			t.Errorf("%s was accepted", text)
		}
	}
}
