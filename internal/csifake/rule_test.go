package csifake

import (
	"strings"
	"testing"
)

// A script with an unknown word is an error, and so is such a rule in a test.
func TestUnknownWordsInAScriptAreErrors(t *testing.T) {
	for _, text := range []string{
		`{"rpc": "Probe"}`, `[{"rpc": "NodeStageVolum"}]`, `[{"rpc": "Probe", "cod": "INTERNAL"}]`,
		`[{"code": "BROKEN"}]`, `[{"code": "CODE_x"}]`, `[{"when": "later"}]`, `[{"rpc": "Probe", "when": "middle"}]`,
		`[{"hang": "long"}]`,
	} {
		if _, err := ParseScript([]byte(text)); err == nil || !strings.HasPrefix(err.Error(), "csifake: script: ") {
			t.Errorf("%s: %v", text, err)
		}
	}
	if err := Start(t, Config{}).Script(Rule{RPC: "Probe", Hang: "long"}); err == nil {
		t.Error("a rule with an unknown word is accepted")
	}
}
