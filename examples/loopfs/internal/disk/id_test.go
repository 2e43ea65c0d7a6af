package disk

import (
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestForeignIDIsNotFound(t *testing.T) {
	for _, s := range []string{"vol-1", "VOL-" + strings.Repeat("0", 32), "vol-" + strings.Repeat("g", 32), "other",
		"vol-" + strings.Repeat("0", 33)} {
		if _, err := ParseID(Volume, s); status.Code(err) != codes.NotFound {
			t.Errorf("id %q: %v", s, err)
		}
	}
}

func FuzzIDs(f *testing.F) {
	for _, s := range []string{"", "..", "../x", "/etc/passwd", `a\b`, "a\x00b", "\x7f", "\xff\xfe",
		strings.Repeat("a", 129), "a good name", string(IDFor(Volume, "a good name"))} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if name, err := ParseName(s); err == nil {
			if id, err := ParseID(Volume, string(IDFor(Volume, name))); err != nil || id != IDFor(Volume, name) {
				t.Errorf("the id of name %q does not parse: %v", s, err)
			}
		}
		id, err := ParseID(Volume, s)
		if err != nil {
			if status.Code(err) != codes.InvalidArgument && status.Code(err) != codes.NotFound {
				t.Errorf("id %q: an error of no kind: %v", s, err)
			}
			return
		}
		for _, name := range []string{recordFile(id), imageName(id), dirName(id)} {
			if !filepath.IsLocal(name) || filepath.Clean(name) != name || strings.Count(name, "/") != 1 {
				t.Errorf("id %q leads to the file %q", s, name)
			}
		}
	})
}
