package config

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"holdfast/hooks"
	"holdfast/registry"
)

// seed adds all test files. A path that contains "volume" is a volume file.
func seed(f *testing.F, volumes bool) {
	for _, pattern := range []string{"testdata/*/*.hcl", "../examples/hcl/*/*.hcl"} {
		names, err := filepath.Glob(pattern)
		if err != nil {
			f.Fatal(err)
		}
		for _, name := range names {
			if text, err := os.ReadFile(name); err == nil && strings.Contains(name, "volume") == volumes {
				f.Add(text)
			}
		}
	}
}

// checkDiagnostics checks what holds for any text: diagnostics are few, in bounds, and their snippets are in the text.
func checkDiagnostics(t *testing.T, text []byte, ds registry.Diagnostics) {
	if len(ds) > maxDiagnostics+1 {
		t.Errorf("%d diagnostics", len(ds))
	}
	for _, d := range ds {
		if d.Summary == "" || d.Start.Line < 1 || d.Start.Column < 1 || d.Start.Byte > len(text) ||
			d.End.Byte < d.Start.Byte {
			t.Errorf("not well formed: %#v", d)
		}
		shown := strings.TrimSuffix(d.Snippet, "...")
		if !strings.ContainsRune(shown, '\ufffd') && !bytes.Contains(text, []byte(shown)) {
			t.Errorf("the snippet %q is not in the text", d.Snippet)
		}
	}
}

func FuzzParseJob(f *testing.F) {
	seed(f, false)
	f.Fuzz(func(t *testing.T, text []byte) {
		job, ds := ParseJob(Source{"x.hcl", text}, testOptions())
		checkDiagnostics(t, text, ds)
		if (job == nil) != (ds.Err() != nil) {
			t.Fatalf("job %v, diagnostics %v", job, ds)
		}
		if job == nil {
			return
		}
		for _, g := range job.Groups {
			if len(g.Sealed) > 0 {
				checkGroup(t, g)
			}
		}
		first, err := json.Marshal(job)
		if err != nil {
			t.Fatal(err)
		}
		again, _ := ParseJob(Source{"x.hcl", text}, testOptions())
		if second, _ := json.Marshal(again); !bytes.Equal(first, second) {
			t.Errorf("the same text gives\n%s\nand\n%s", first, second)
		}
	})
}

// checkGroup checks what holds for every accepted group: each request names a volume and its use, and no two mounts of
// a task have the same destination.
func checkGroup(t *testing.T, g hooks.Group) {
	spec, err := OpenGroup(g.Sealed)
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range spec.Volumes {
		u := v.Usage
		block, inline := u.Attachment == registry.BlockDevice, v.Ephemeral != nil
		switch {
		case !slices.Contains(registry.AccessModes, u.Access), !block && u.Attachment != registry.FileSystem,
			block && (u.FSType != "" || u.MountFlags != "" || u.MountGroup != ""), u.Access.ReaderOnly() && !u.ReadOnly,
			inline == (v.Source != ""), inline && (v.PerAlloc || v.Ephemeral.Plugin == "" ||
				strings.HasPrefix(string(u.Access), "multi-node")),
			!inline && !v.PerAlloc && g.Count > 1 && strings.HasPrefix(string(u.Access), "single-node"):
			t.Errorf("accepted with count %d: %+v %+v", g.Count, v, v.Ephemeral)
		}
	}
	for task, mounts := range spec.Mounts {
		for i, m := range mounts {
			taken := slices.ContainsFunc(mounts[:i], func(o hooks.VolumeMount) bool {
				return o.Destination == m.Destination
			})
			if !strings.HasPrefix(m.Destination, "/") || taken {
				t.Errorf("task %q: mounts %+v", task, mounts)
			}
		}
	}
}

func FuzzParseVolume(f *testing.F) {
	seed(f, true)
	f.Fuzz(func(t *testing.T, text []byte) {
		spec, ds := ParseVolume(Source{"x.hcl", text}, testOptions())
		checkDiagnostics(t, text, ds)
		if (spec == nil) != (ds.Err() != nil) {
			t.Fatalf("spec %v, diagnostics %v", spec, ds)
		}
		if spec == nil {
			return
		}
		if len(spec.Capabilities) == 0 || spec.ID == "" || spec.Plugin == "" || spec.Name == "" ||
			spec.Namespace == "" {
			t.Errorf("accepted without what is needed: %+v", spec)
		}
		for name, s := range spec.Secrets {
			if given := strings.Join(slices.DeleteFunc([]string{s.Env, s.File, s.Callback, s.Literal.Reveal()},
				func(s string) bool { return s == "" }), "\n"); given == "" || strings.Contains(given, "\n") {
				t.Errorf("secret %q is %+v", name, s)
			}
		}
	})
}
