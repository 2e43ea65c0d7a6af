package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
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
		w.Alloc, w.Request, w.Volume, w.Since = first, "data", registry.VolumeName{Namespace: "default",
			ID: "disk"}, noon.Add(-75*time.Second)
		return w
	}
	staging := registry.Wait{
		Step: registry.StepStage, For: "plugin fake", RPC: registry.NodeStageRPC, Code: "UNAVAILABLE",
		Detail: "backend\x1b[31m is down", Attempt: 5, Next: noon.Add(4 * time.Second),
	}
	other := control.Other{Wait: at(staging), Job: "other"}
	other.Alloc = second
	sick := control.Instance{Role: "csi-node", Alloc: second, Task: "t", Active: true, Health: "unhealthy",
		Cause: "missed", Detail: "no answer in 1s", Since: noon.Add(-time.Hour)}
	monolith := sick
	monolith.Role = "csi-controller"
	help := func(what string) control.Help {
		return control.Help{What: what, Means: "Somebody has to do something.",
			Then: "Holdfast retries until it succeeds; then the alloc continues.", Do: []control.Do{
				{Why: "read the plugin's log", Command: "holdfast alloc logs 4e5f6a7b fake"},
				{Why: "stop the job", Command: "holdfast job stop db"},
			}}
	}
	return []control.Wait{
		{Wait: at(registry.Wait{Step: registry.StepClaim, Detail: "volume disk is held", Next: noon}), Job: "db",
			Help: help("volume disk is held by job other"), Others: []control.Other{other},
			Holders: []control.Holder{{Alloc: second, Job: "other", State: "releasing", Access: "single-node-writer",
				ReadOnly: true, Since: noon.Add(-50 * time.Hour)}, {Alloc: "ffffffff", Access: "single-node-writer"}}},
		{Wait: at(registry.Wait{Step: registry.StepPlugin, For: "plugin fake to be healthy on this node"}), Job: "db",
			Help: help("volume disk waits for plugin fake"),
			Plugin: &control.Plugin{ID: "fake", Instances: []control.Instance{monolith, sick},
				Tasks: []control.PluginTask{{Alloc: second, Task: "t",
					Restart: &registry.RestartRequest{Cause: "missed"}}}}},
		{Wait: at(registry.Wait{Step: registry.StepPlugin, For: "plugin fake to be healthy on this node"}),
			Help: help("volume disk waits for plugin fake"),
			Plugin: &control.Plugin{ID: "fake", Tasks: []control.PluginTask{{Alloc: second, Task: "t", Job: "fake",
				Phase: "starting", Attempt: 3}}}},
		{Wait: at(registry.Wait{Step: registry.StepTurn, For: "a mount for alloc 4e5f6a7b"}), Job: "db",
			Help: help("something else is under way for volume disk"), Others: []control.Other{other}},
		{Wait: at(registry.Wait{Step: registry.StepTurn, For: "the deletion"}),
			Help: help("something else is under way for volume disk"),
			Open: &registry.Intent{RPC: registry.DeleteVolumeRPC, Since: noon.Add(-time.Minute)}},
		{Wait: at(staging), Job: "db", Help: help("volume disk is not staged yet")},
		{Wait: at(registry.Wait{Step: registry.StepDetach, For: "plugin fake", RPC: registry.ControllerUnpublishRPC,
			Attempt: 1}), Job: "db", Help: help("volume disk is not detached yet"),
			Plugin: &control.Plugin{ID: "fake", Instances: []control.Instance{sick}}},
		{Wait: at(registry.Wait{Step: registry.StepAttach,
			Detail: "its secrets cannot be had: the environment has no DB_PASSWORD"}),
			Help: help("volume disk is not attached yet")},
		{Wait: registry.Wait{For: "plugin fake", RPC: registry.CreateVolumeRPC, Detail: "the connection was lost",
			Attempt: 2}, Help: help("volume disk is not created yet")},
	}
}

func trouble() *control.Trouble {
	return &control.Trouble{Found: "its server is gone", Since: noon.Add(-2 * time.Minute), Help: control.Help{
		What: "the mount of volume disk does not work", Then: "It is not touched.",
		Do: []control.Do{{Why: "see all", Command: "holdfast doctor"}},
	}}
}

func growth() *control.Trouble {
	return &control.Trouble{Found: "NodeExpandVolume: INTERNAL: it\x1b[31m is dark", Since: noon.Add(-time.Hour),
		Help: control.Help{
			What:  "volume disk is expanded to 2097152 bytes, and not on this node yet",
			Means: "The plugin cannot do it now.",
			Then:  "It is tried again when the volume is mounted anew.",
			Do:    []control.Do{{Why: "retry now", Command: "holdfast volume expand disk --size 2097152"}},
		}}
}

func TestNoticesReadAsHelp(t *testing.T) {
	defer func(clock func() time.Time) { now = clock }(now)
	now = func() time.Time { return noon }
	golden(t, "explain", func(w io.Writer) error {
		if err := writeWaits(w, waits()); err != nil {
			return err
		}
		return errors.Join(writeTrouble(w, first, "db", "data", trouble()), writeReported(w, "PENDING", growth()))
	})
}

// told matches the transcripts of package e2e, which hold advised commands.
const told = "../../../e2e/testdata/tells/*.want"

// Each advised command exists and accepts its arguments.
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
		c, args, err := newRoot(streams{io.Discard, io.Discard}, &globalFlags{}).Find(strings.Fields(line)[1:])
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
