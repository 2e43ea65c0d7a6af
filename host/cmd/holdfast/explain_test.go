package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"holdfast/host/agent/control"
	"holdfast/registry"
)

const (
	first  = "0a1b2c3d-0000-4000-8000-000000000001"
	second = "4e5f6a7b-0000-4000-8000-000000000002"
)

// waits is one of every kind.
func waits() []control.Wait {
	at := func(w registry.Wait) registry.Wait {
		w.Alloc, w.Request, w.Volume, w.Since = first, "data", registry.VolumeName{Namespace: "default", ID: "disk"}, noon.Add(-75*time.Second)
		return w
	}
	staging := registry.Wait{
		Step: registry.StepStage, For: "plugin fake", RPC: registry.NodeStageRPC, Code: "UNAVAILABLE", Detail: "backend\x1b[31m is down", Attempt: 5, Next: noon.Add(4 * time.Second),
	}
	other := control.Other{Wait: at(staging), Job: "other"}
	other.Alloc = second
	sick := control.Instance{Role: "csi-node", Alloc: second, Task: "t", Active: true, Health: "unhealthy", Cause: "missed", Detail: "no answer in 1s", Since: noon.Add(-time.Hour)}
	monolith := sick
	monolith.Role = "csi-controller"
	help := func(what string) control.Help {
		return control.Help{What: what, Means: "Somebody has to do something.", Then: "It is tried again until it is done; then the alloc goes on.", Do: []control.Do{
			{Why: "read the plugin's log", Command: "holdfast alloc logs 4e5f6a7b fake"}, {Why: "end the waiting, and the job", Command: "holdfast job stop db"},
		}}
	}
	return []control.Wait{
		{Wait: at(registry.Wait{Step: registry.StepClaim, Detail: "volume disk is held", Next: noon}), Job: "db", Help: help("volume disk is held by job other"), Others: []control.Other{other},
			Holders: []control.Holder{{Alloc: second, Job: "other", State: "releasing", Access: "single-node-writer", ReadOnly: true, Since: noon.Add(-50 * time.Hour)}, {Alloc: "ffffffff", Access: "single-node-writer"}}},
		{Wait: at(registry.Wait{Step: registry.StepPlugin, For: "plugin fake to be healthy on this node"}), Job: "db", Help: help("volume disk waits for plugin fake"),
			Plugin: &control.Plugin{ID: "fake", Instances: []control.Instance{monolith, sick}, Tasks: []control.PluginTask{{Alloc: second, Task: "t", Restart: &registry.RestartRequest{Cause: "missed"}}}}},
		{Wait: at(registry.Wait{Step: registry.StepPlugin, For: "plugin fake to be healthy on this node"}), Help: help("volume disk waits for plugin fake"),
			Plugin: &control.Plugin{ID: "fake", Tasks: []control.PluginTask{{Alloc: second, Task: "t", Job: "fake", Phase: "starting", Attempt: 3}}}},
		{Wait: at(registry.Wait{Step: registry.StepTurn, For: "a mount for alloc 4e5f6a7b"}), Job: "db", Help: help("something else is under way for volume disk"), Others: []control.Other{other}},
		{Wait: at(registry.Wait{Step: registry.StepTurn, For: "the deletion"}), Help: help("something else is under way for volume disk"), Open: &registry.Intent{RPC: registry.DeleteVolumeRPC, Since: noon.Add(-time.Minute)}},
		{Wait: at(staging), Job: "db", Help: help("volume disk is not staged yet")},
		{Wait: at(registry.Wait{Step: registry.StepDetach, For: "plugin fake", RPC: registry.ControllerUnpublishRPC, Attempt: 1}), Job: "db", Help: help("volume disk is not detached yet"), Plugin: &control.Plugin{ID: "fake", Instances: []control.Instance{sick}}},
		{Wait: at(registry.Wait{Step: registry.StepAttach, Detail: "its secrets cannot be had: the environment has no DB_PASSWORD"}), Help: help("volume disk is not attached yet")},
		{Wait: registry.Wait{For: "plugin fake", RPC: registry.CreateVolumeRPC, Detail: "the connection was lost", Attempt: 2}, Help: help("volume disk is not created yet")},
	}
}

func trouble() *control.Trouble {
	return &control.Trouble{Found: "its server is gone", Since: noon.Add(-2 * time.Minute), Help: control.Help{
		What: "the mount of volume disk does not work", Then: "It is not touched.", Do: []control.Do{{Why: "see all", Command: "holdfast doctor"}},
	}}
}

func growth() *control.Trouble {
	return &control.Trouble{Found: "NodeExpandVolume: INTERNAL: it\x1b[31m is dark", Since: noon.Add(-time.Hour), Help: control.Help{
		What: "volume disk is expanded to 2097152 bytes, and not on this node yet", Means: "The plugin cannot do it now.",
		Then: "It is tried again when the volume is mounted anew.", Do: []control.Do{{Why: "have it tried now", Command: "holdfast volume expand disk --size 2097152"}},
	}}
}

// What people read of each kind of wait and trouble, on a wide sheet and on a narrow one.
func TestExplanations(t *testing.T) {
	for name, width := range map[string]int{"explain": usualWidth, "explain_narrow": leastWidth} {
		golden(t, name, func(w io.Writer) error {
			s := &sheet{w, width, noon, true}
			if err := writeWaits(s, waits()); err != nil {
				return err
			}
			return errors.Join(writeTrouble(s, first, "db", "data", trouble()), writeGrowth(s, growth()))
		})
	}
}

// A plugin's text cannot end its line, and no word is broken; what can fit, fits.
func TestNothingIsWiderThanTheSheet(t *testing.T) {
	for width := 40; width < 150; width += 7 {
		var out bytes.Buffer
		if err := writeWaits(&sheet{&out, width, noon, true}, waits()); err != nil {
			t.Fatal(err)
		}
		for _, line := range strings.Split(out.String(), "\n") {
			text := strings.TrimSpace(line)
			if length(line) > width && !strings.HasPrefix(text, "holdfast ") && !strings.HasPrefix(text, "WAITING") && !strings.HasSuffix(text, ":") {
				t.Errorf("at %d: %q", width, line)
			}
			if strings.ContainsRune(line, '\x1b') {
				t.Errorf("a control character: %q", line)
			}
		}
		for _, w := range waits() {
			for _, d := range w.Help.Do {
				if !strings.Contains(out.String(), d.Command+"\n") {
					t.Errorf("at %d: %s cannot be copied", width, d.Command)
				}
			}
		}
	}
}

// Columns stay columns: whatever wraps, each begins where its head does, and every word is there.
func TestTablesWrap(t *testing.T) {
	rows := [][]any{
		{"0a1b2c3d", "a fairly long text which has to be wrapped somewhere in the middle of it", "x"},
		{"4e5f6a7b", "short", "/a/path/that/nobody/breaks/whatever/the/width/is"},
	}
	for width := 30; width < 140; width += 5 {
		table := newTable("ID", "REASON", "PATH")
		for _, r := range rows {
			table.add(r...)
		}
		var out bytes.Buffer
		if err := table.write(&sheet{&out, width, noon, true}, ""); err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
		reason, path := strings.Index(lines[0], "REASON"), strings.Index(lines[0], "PATH")
		for _, line := range lines {
			for _, at := range []int{reason, path} {
				if len(line) > at && (line[at-1] != ' ' || line[at-2] != ' ') {
					t.Errorf("at %d: a column begins elsewhere:\n%s", width, out.String())
				}
			}
		}
		var row bytes.Buffer
		if err := table.write(&sheet{&row, width, noon, false}, ""); err != nil || strings.Count(row.String(), "\n") != 1+len(rows) {
			t.Errorf("what is no terminal has a row on several lines: %v\n%s", err, row.String())
		}
		words := strings.Fields(out.String())
		for _, r := range rows {
			for _, word := range strings.Fields(fmt.Sprintln(r...)) {
				if !slices.Contains(words, word) {
					t.Errorf("at %d: %q is lost or broken:\n%s", width, word, out.String())
				}
			}
		}
	}
}

func TestSpans(t *testing.T) {
	for want, d := range map[string]time.Duration{
		"0s": -time.Second, "1s": 700 * time.Millisecond, "59s": 59 * time.Second, "1m0s": time.Minute, "2m5s": 125 * time.Second,
		"1h1m": time.Hour + 90*time.Second, "23h59m": 24*time.Hour - time.Minute, "2d2h": 50 * time.Hour,
	} {
		if got := span(d); got != want {
			t.Errorf("%v: %s, want %s", d, got, want)
		}
	}
}

// Golden files that no test writes would be read by nobody.
func TestGoldenFilesAreRead(t *testing.T) {
	files, err := filepath.Glob("testdata/explain*.want")
	if err != nil || len(files) != 2 {
		t.Errorf("%v, %v", files, err)
	}
}

// told is what the stories of package e2e tell, with what people are advised to type.
const told = "../../../e2e/testdata/tells/*.want"

// Whatever a person is advised to type is a command of this program, with arguments that it takes.
func TestWhatIsAdvisedCanBeTyped(t *testing.T) {
	tales, err := filepath.Glob(told)
	if err != nil || len(tales) < 10 {
		t.Fatalf("%v, %v", tales, err)
	}
	advised := map[string]bool{}
	for _, path := range tales {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`(?m)^  .*  (holdfast .*)$`).FindAllStringSubmatch(string(text), -1) {
			advised[m[1]] = true
		}
	}
	if len(advised) < 10 {
		t.Errorf("only %d commands are advised: %v", len(advised), advised)
	}
	for line := range advised {
		c, args, err := newRoot(streams{io.Discard, io.Discard}, &places{}).Find(strings.Fields(line)[1:])
		if err == nil {
			err = c.ParseFlags(args)
		}
		if err == nil && c.HasSubCommands() {
			err = errors.New("it is a group of commands")
		}
		if err == nil {
			err = c.ValidateArgs(c.Flags().Args())
		}
		if err != nil {
			t.Errorf("%s: %v", line, err)
		}
	}
}
