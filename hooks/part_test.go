package hooks

import (
	"errors"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"holdfast/registry"
)

func TestWrongSubPath(t *testing.T) {
	name := strings.Repeat("n", 255)
	deep := strings.Repeat(name+"/", 15) + name // 16 names: 4095 bytes
	for _, good := range []string{
		"a", "a/b", ".hidden/..two", "...", "with space", "ä", name, deep, "${NOMAD_ALLOC_ID}",
		`x-${env["NOMAD_ALLOC_INDEX"]}/b`, "a$b", "a\\b",
	} {
		if wrong := WrongSubPath(good); wrong != "" {
			t.Errorf("%.20q... %s", good, wrong)
		}
	}
	for bad, why := range map[string]string{
		"": "leave it out", ".": "leave it out", "/a": "relative", "//": "relative",
		"..": `".."`, "a/../b": `".."`, "a/..": `".."`, "../a": `".."`,
		"a/": "clean", "a//b": "clean", "./a": "clean", "a/./b": "clean", "a\x00b": "control", "a\nb": "control",
		"a\u0085b": "control",
		"a\xffb":   "UTF-8", name + "n": "255", "a/" + name + "n/b": "255", deep + "n": "4095", "a/" + deep: "4095",
		"${NOMAD_TASK_DIR}": "nothing else", "${NOMAD_ALLOC_ID": "nothing else",
		"${node.unique.id}/a": "nothing else", "${NOMAD_ALLOC_ID}/../b": `".."`, strings.Repeat("n", 128) +
			"${NOMAD_ALLOC_ID}": "255",
	} {
		if wrong := WrongSubPath(bad); !strings.Contains(wrong, why) {
			t.Errorf("%.20q... %q, want %q", bad, wrong, why)
		}
	}
}

// Every accepted sub_path stays below the volume, by its text, and is a path that the kernel takes, for any alloc.
func FuzzSubPath(f *testing.F) {
	f.Add("a/b", "alloc-1", uint64(0))
	f.Add("${NOMAD_ALLOC_ID}/${NOMAD_ALLOC_INDEX}", "a.b_c-1", uint64(7))
	f.Add("..", "..", uint64(1))
	f.Add("a/${NOMAD_ALLOC_ID}", "../x", uint64(1))
	f.Fuzz(func(t *testing.T, text, id string, index uint64) {
		spec := GroupSpec{Mounts: map[string][]VolumeMount{"t": {{Volume: "v", SubPath: text}}}}
		got, err := spec.For(registry.AllocID(id), index)
		if _, known := registry.ParseAllocID(id); known == nil && WrongSubPath(text) == "" && text != "" && err != nil {
			t.Errorf("%q is accepted, and for %q it is not: %v", text, id, err)
		}
		if err != nil || text == "" {
			return
		}
		path := got.Mounts["t"][0].SubPath
		if !filepath.IsLocal(path) || filepath.Clean(path) != path || path == "." || strings.Contains(path, "\x00") ||
			len(path) > MaxSubPath {
			t.Errorf("%q for %q: %q", text, id, path)
		}
		if spec.Mounts["t"][0].SubPath != text {
			t.Error("the spec itself was changed")
		}
	})
}

func TestPartsOfAnAlloc(t *testing.T) {
	spec := GroupSpec{
		Volumes: []VolumeRequest{{Name: "data"}, {Name: "other"}},
		Mounts: map[string][]VolumeMount{
			"a": {{Volume: "data", SubPath: "same"}, {Volume: "data", SubPath: "read", ReadOnly: true},
				{Volume: "other", SubPath: "x"}},
			"b": {
				{Volume: "data", SubPath: "same", ReadOnly: true}, {Volume: "data"},
				{Volume: "data", SubPath: "${NOMAD_ALLOC_ID}-${NOMAD_ALLOC_INDEX}"},
			},
		},
	}
	placed, err := spec.For("a1", 3)
	want := []Part{{"a1-3", false}, {"read", true}, {"same", false}}
	if got := placed.Parts("data"); err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	if got := placed.Parts("none"); got != nil {
		t.Errorf("%v", got)
	}
	for _, bad := range []string{"../x", "/etc", "a/../../b", "${NOMAD_TASK_NAME}"} {
		s := GroupSpec{Mounts: map[string][]VolumeMount{"t": {{Volume: "data", SubPath: bad}}}}
		if _, err := s.For("a1", 0); !errors.Is(err, registry.ErrInvalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// A task that mounts a part gets only that part, and a variable with its path. If the part is not mounted on the host,
// the task gets nothing.
func TestMountsOfParts(t *testing.T) {
	files := registry.Usage{Access: registry.SingleNodeMultiWriter, Attachment: registry.FileSystem}
	spec := GroupSpec{
		Volumes: []VolumeRequest{{Name: "data", Usage: files}},
		Mounts: map[string][]VolumeMount{
			"app": {
				{Volume: "data", Destination: "/srv/deep/log", SubPath: "log", ReadOnly: true},
				{Volume: "data", Destination: "/db", SubPath: "db"},
				{Volume: "data", Destination: "/db-too", SubPath: "db", Propagation: HostToTask},
				{Volume: "data", Destination: "/whole/it/all"},
			},
			"raw": {{Volume: "data", Destination: "/log", SubPath: "log"}},
		},
	}
	at := Published{Target: registry.Tree{Host: "/h/v", Task: "/t/v"}, Usage: files,
		Parts: map[string]string{"log": "/h/log", "db": "/h/db"}}
	plans, err := Mounts(spec, map[registry.RequestName]Published{"data": at}, map[string]bool{"app": true})
	want := map[string]Plan{
		"app": {
			Binds: []Bind{
				{Source: "/h/db", Target: "/db", Propagation: Private},
				{Source: "/h/db", Target: "/db-too", Propagation: HostToTask},
				{Source: "/h/log", Target: "/srv/deep/log", ReadOnly: true, Propagation: Private},
				{Source: "/h/v", Target: "/whole/it/all", Propagation: Private},
			},
			Env: []Env{{Name: "HOLDFAST_VOLUME_DATA", Value: "/db", Default: true}},
		},
		"raw": {Env: []Env{{Name: "HOLDFAST_VOLUME_DATA", Value: "/h/log", Default: true}}},
	}
	if err != nil || !reflect.DeepEqual(plans, want) {
		t.Errorf("got %+v, %v", plans, err)
	}
	delete(at.Parts, "log")
	for _, isolated := range []bool{true, false} {
		plans, err = Mounts(spec, map[registry.RequestName]Published{"data": at},
			map[string]bool{"app": isolated, "raw": isolated})
		if !errors.Is(err, registry.ErrInternal) || len(plans) > 0 {
			t.Errorf("a part that is not there: %+v, %v", plans, err)
		}
	}
}
