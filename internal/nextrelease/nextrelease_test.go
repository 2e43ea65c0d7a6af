package nextrelease

import (
	"slices"
	"testing"
)

func TestCopiesOfTheNextReleaseFollowTheirOriginals(t *testing.T) {
	outdated, err := Outdated()
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range outdated {
		t.Errorf("%s has changed: change %s/%s in the same way, then run `go run ./internal/nextrelease/overlay "+
			"-update`", path, copies, path)
	}
}

func TestChangedOriginalIsListed(t *testing.T) {
	was := "aa  config/a.go\nbb  config/b.go\ncc  config/c.go\n"
	for is, want := range map[string][]string{
		was:                                    nil,
		"aa  config/a.go\ncc  config/c.go\n":   {"config/b.go"},
		"ab  config/a.go\n" + was[16:]:         {"config/a.go"},
		was + "dd  config/d.go\n":              {"config/d.go"},
		"cc  config/a.go\nbb  config/b.go\n\n": {"config/a.go", "config/c.go"},
	} {
		if got := changed(was, is); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", is, got, want)
		}
	}
}
