package hooks

import "testing"

func scratch(at string) TaskSpec {
	return TaskSpec{Plugin: PluginSpec{ID: "loopfs", Type: TypeNode, ScratchDir: at}}
}

// TestScratch: the plan has one more mount and one more variable; without isolation the variable names the host's
// directory.
func TestScratch(t *testing.T) {
	for name, isolated := range map[string]bool{"starting-scratch": true, "starting-scratch-no-isolation": false} {
		p, err := Starting(example, pluginTask(isolated), scratch("/scratch/"))
		if err != nil {
			t.Fatal(err)
		}
		golden(t, "testdata/"+name+".golden", render(t, p.Plan))
	}
	for _, at := range []string{"scratch", "/", "/csi", "/csi/x", "/local"} {
		if _, err := Starting(example, pluginTask(true), scratch(at)); err == nil {
			t.Errorf("%s was accepted", at)
		}
	}
}
