package config

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// leaves records for each field below v whether it is set anywhere.
func leaves(v reflect.Value, path string, set map[string]bool) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if field := v.Type().Field(i); field.Tag.Get("json") != "-" { // else it is never stored
				leaves(v.Field(i), path+"."+field.Name, set)
			}
		}
	case reflect.Pointer:
		if !v.IsNil() {
			leaves(v.Elem(), path, set)
		} else {
			leaves(reflect.Zero(v.Type().Elem()), path, set)
		}
	case reflect.Slice, reflect.Map:
		if v.Type().Elem().Kind() != reflect.Struct && v.Type().Elem().Kind() != reflect.Slice {
			set[path] = set[path] || v.Len() > 0
			return
		}
		elements := []reflect.Value{reflect.Zero(v.Type().Elem())}
		for _, e := range v.Seq2() {
			elements = append(elements, e)
		}
		for _, e := range elements {
			leaves(e, path+"[]", set)
		}
	default:
		set[path] = set[path] || !v.IsZero()
	}
}

// unset lists the fields that none of the values sets.
func unset(values ...any) []string {
	set := map[string]bool{}
	for _, v := range values {
		leaves(reflect.ValueOf(v), fmt.Sprintf("%T", v), set)
	}
	var out []string
	for path, is := range set {
		if !is {
			out = append(out, path)
		}
	}
	slices.Sort(out)
	return out
}

// OpenGroup and OpenTask return every field of a spec, also one that is added later.
func TestSealedComesBackWhole(t *testing.T) {
	group, task := registrytest.Filled[hooks.GroupSpec](t, 1), registrytest.Filled[hooks.TaskSpec](t, 2)
	if missing := unset(group, task); len(missing) > 0 {
		t.Errorf("not filled: %v", missing)
	}
	if got, err := OpenGroup(seal(sealed{Group: &group})); err != nil || !reflect.DeepEqual(got, group) {
		t.Errorf("got  %+v, %v\nwant %+v", got, err, group)
	}
	if got, err := OpenTask(seal(sealed{Task: &task})); err != nil || !reflect.DeepEqual(got, task) {
		t.Errorf("got  %+v, %v\nwant %+v", got, err, task)
	}
}

// TestGoodFilesSetEveryField: the good files set every field that a group, a plugin's task and a volume can have.
func TestGoodFilesSetEveryField(t *testing.T) {
	var all []any
	for _, name := range append(matches(t, "testdata/good/*.hcl", 8), nextFiles...) {
		src := Source{name, read(t, name)}
		if strings.Contains(name, "volume") {
			spec, _ := ParseVolume(src, testOptions())
			all = append(all, *spec)
			continue
		}
		job, _ := ParseJob(src, testOptions())
		for _, g := range job.Groups {
			if spec, err := OpenGroup(g.Sealed); err == nil {
				all = append(all, spec)
			}
			for _, task := range g.Tasks {
				if spec, err := OpenTask(task.Sealed); err == nil {
					all = append(all, spec)
				}
			}
		}
	}
	if missing := unset(all...); len(missing) > 0 {
		t.Errorf("no good file sets %v", missing)
	}
	missing := unset(registry.VolumeSpec{ID: "x"})
	if !slices.Contains(missing, "registry.VolumeSpec.MountGroup") ||
		slices.Contains(missing, "registry.VolumeSpec.ID") {
		t.Errorf("the check says of a spec with nothing but an id that %v is unset", missing)
	}
}

// A reader that does not know sub_path would expose the whole volume, so it must reject a group with one and accept all
// others. The same holds for fields of a create block, without which another volume would be created.
func TestSubPathIsOfANewerVersion(t *testing.T) {
	version := func(s sealed) int {
		var v struct{ Version int }
		if err := json.Unmarshal(seal(s), &v); err != nil {
			t.Fatal(err)
		}
		return v.Version
	}
	mounts := func(sub string) *hooks.GroupSpec {
		return &hooks.GroupSpec{Mounts: map[string][]hooks.VolumeMount{"a": {{Volume: "v"}},
			"b": {{Volume: "v"}, {Volume: "v", SubPath: sub}}}}
	}
	creates := func(c hooks.Create) *hooks.GroupSpec {
		return &hooks.GroupSpec{Volumes: []hooks.VolumeRequest{{}, {Create: &c}}, Mounts: mounts("a").Mounts}
	}
	for what, c := range map[string]struct {
		sealed sealed
		want   int
	}{
		"a create block":              {sealed{Group: creates(hooks.Create{Plugin: "p"})}, 2},
		"one with a name":             {sealed{Group: creates(hooks.Create{Name: "n"})}, 3},
		"one with mutable parameters": {sealed{Group: creates(hooks.Create{Mutable: map[string]string{"a": "b"}})}, 3},
		"a plugin's task":             {sealed{Task: &hooks.TaskSpec{}}, 1},
		"no mounts":                   {sealed{Group: &hooks.GroupSpec{}}, 1},
		"all of a volume":             {sealed{Group: mounts("")}, 1},
		"a part of one":               {sealed{Group: mounts("a/b")}, 2},
	} {
		if got := version(c.sealed); got != c.want {
			t.Errorf("%s: version %d, want %d", what, got, c.want)
		}
	}
}
