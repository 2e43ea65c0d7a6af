package csifake

import (
	"os"
	"reflect"
	"strings"
	"testing"
)

// TestNonsense: a script that says nonsense is an error, and so is a rule of a test.
func TestNonsense(t *testing.T) {
	for _, text := range []string{
		`{"rpc": "Probe"}`, `[{"rpc": "NodeStageVolum"}]`, `[{"rpc": "Probe", "cod": "INTERNAL"}]`,
		`[{"code": "BROKEN"}]`,
		`[{"code": "CODE_x"}]`,
		`[{"when": "later"}]`, `[{"rpc": "Probe", "when": "middle"}]`, `[{"hang": "long"}]`, `[{"late": "1s"}]`,
		`[{"late": "1s", "code": "ABORTED", "when": "after"}]`,
		`[{"rpc": "GetMetadataDelta", "late": "1s", "code": "ABORTED"}]`,
		`[{"rpc": "NodeStageVolume", "mount_late": "1s"}]`,
		`[{"lie": "white"}]`, `[{"rpc": "NodeStageVolume", "lie": "leave-target"}]`,
		`[{"lie": "no-mount", "when": "after"}]`,
		`[{"pattern": ["ok", "odd"]}]`, `[{"every": "1s"}]`, `[{"hostile": "friendly"}]`,
		`[{"rpc": "Probe", "hostile": "id-4097"}]`,
		`[{"reply": {}}]`, `[{"rpc": "Probe", "reply": {"redy": true}}]`, `[{"garbage": "http1"}]`,
		`[{"rpc": "accept"}]`,
		`[{"rpc": "accept", "garbage": "spam"}]`,
	} {
		if _, err := ParseScript([]byte(text)); err == nil || !strings.HasPrefix(err.Error(), "csifake: script: ") {
			t.Errorf("%s: %v", text, err)
		}
	}
	fake := Start(t, Config{Port: &Port{}})
	defer func() {
		if recover() == nil {
			t.Error("a test may install nonsense")
		}
	}()
	fake.On("Probe").Lie("white")
}

// TestScriptOfEverything: what a test can have a plugin in its process do, a file can have any plugin do, but for
// functions and gates.
func TestScriptOfEverything(t *testing.T) {
	rules := reflect.TypeFor[Rule]()
	for i := range rules.NumField() {
		f := rules.Field(i)
		if f.IsExported() && f.Name != "Answer" && f.Tag.Get("json") == "-" {
			t.Errorf("no file can say %s", f.Name)
		}
	}
}

// TestTable: the documentation has every word that a script can say.
func TestTable(t *testing.T) {
	text, err := os.ReadFile("doc.go")
	must(t, err)
	words := []string{string(Before), string(Middle), string(After), Accept, Fuse, string(UntilCancelled),
		string(ForEver)}
	for h := range hostilities {
		words = append(words, string(h))
	}
	for l := range lies {
		words = append(words, string(l))
	}
	for g := range sow {
		words = append(words, string(g))
	}
	for s := range steps {
		words = append(words, s)
	}
	rules := reflect.TypeFor[Rule]()
	for i := range rules.NumField() {
		if name, _, _ := strings.Cut(rules.Field(i).Tag.Get("json"), ","); name != "" && name != "-" {
			words = append(words, name)
		}
	}
	for _, word := range words {
		if !strings.Contains(tableOf(string(text)), " "+word+" ") {
			t.Errorf("the table in doc.go does not have %s", word)
		}
	}
}

// tableOf is the indented part of the chapter on scripts, as words with blanks around them.
func tableOf(text string) string {
	_, chapter, _ := strings.Cut(text, "# What can be scripted")
	chapter, _, _ = strings.Cut(chapter, "//\n// # ")
	var table strings.Builder
	between := func(r rune) bool { return strings.ContainsRune(" \t\n,;:()/", r) }
	for line := range strings.Lines(chapter) {
		if strings.HasPrefix(line, "//\t") {
			table.WriteString(" " + strings.Join(strings.FieldsFunc(line, between), " ") + " ")
		}
	}
	return table.String()
}
