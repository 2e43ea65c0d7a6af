package e2e

import (
	"os"
	"os/exec"
	"testing"
)

// Holdfast keeps the rules of CSI with a plugin that crashes. CI runs all scenarios (make cosanity).
func TestHoldfastPassesCosanity(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("real mounts need root")
	}
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), "../examples/cosanity.sh", "crash")
	cmd.Env = append(cmd.Environ(), "BIN="+bin)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
