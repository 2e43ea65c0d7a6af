package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// agentCommand returns the agent command with the flags of a command line.
func agentCommand(t *testing.T, args ...string) (*cobra.Command, *program) {
	t.Helper()
	t.Setenv("HOLDFAST_STATE_DIR", "")
	t.Setenv("HOLDFAST_ADDR", "")
	p := &program{}
	c, _, err := newRoot(p).Find([]string{"agent"})
	must(t, err)
	must(t, c.ParseFlags(args))
	return c, p
}

// readText reads a configuration file with the text, beside the flags of a command line.
func readText(t *testing.T, text string, args ...string) (c *cobra.Command, p *program, cluster string, err error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "agent.hcl")
	must(t, os.WriteFile(path, []byte(text), 0o600))
	c, p = agentCommand(t, args...)
	cluster, _, err = readConfig(c, path)
	return c, p, cluster, err
}

func TestConfigFileSetsFlagsThatTheCommandLineLacks(t *testing.T) {
	c, p, _, err := readText(t, `
		state_dir   = "/srv/holdfast"
		log_level   = "debug"
		shim_bake   = "3s"
		stop_tasks  = true
		volume_default_size = "1G"
	`, "--log-level", "error")
	must(t, err)
	if p.state != "/srv/holdfast" || p.logLevel != "error" {
		t.Errorf("state directory %q, log level %q", p.state, p.logLevel)
	}
	for flag, want := range map[string]string{"shim-bake": "3s", "stop-tasks": "true", "volume-default-size": "1G",
		"shim-swap-budget": "500ms"} {
		if got := c.Flags().Lookup(flag).Value.String(); got != want {
			t.Errorf("--%s is %s, want %s", flag, got, want)
		}
	}
}

func TestConfigFileErrorsNameTheLineAndTheKey(t *testing.T) {
	for text, want := range map[string]string{
		"\nstat_dir = \"/x\"":        `agent.hcl:2,1-9: unknown key "stat_dir"; did you mean "state_dir"?`,
		"state-dir = \"/x\"":         `did you mean "state_dir"?`,
		"recover = \"stop\"":         `unknown key "recover"`,
		"zzzzzzzzzzz = 1":            "the keys are docker_engine, ",
		"shim_bake = \"soon\"":       `agent.hcl:1,13-19: shim_bake = "soon": use a duration, like 10s or 500ms`,
		"node = [\"a\"]":             "node has to be a string, a number or a boolean",
		"node = null":                "node has to be a string, a number or a boolean",
		"node = hostname":            "agent.hcl:1,8-16: Variables not allowed",
		"volume_plugin {\n}":         "agent.hcl:1,1-14: Unexpected \"volume_plugin\" block",
		"node = \"a\"\nnode = \"b\"": "agent.hcl:2,1-5: Attribute redefined",
	} {
		_, _, _, err := readText(t, text)
		if _, usage := errors.AsType[usageError](err); !usage || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}

// An error about a value that is refused later also has the value's place.
func TestValuesOfTheConfigFileAreReportedByTheirPlace(t *testing.T) {
	for text, want := range map[string]string{
		"\nshim_bake = \"-5s\"":      `agent.hcl:2,13-18: shim_bake=-5s: the duration is negative`,
		"log_level = \"loud\"":       `agent.hcl:1,13-19: log_level "loud": use trace`,
		"driver = \"java\"":          `agent.hcl:1,10-16: driver "java": use exec`,
		"docker_engine = \"ftp://\"": `agent.hcl:1,17-25: docker_engine: `,
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, "agent.hcl")
		must(t, os.WriteFile(path, []byte(text), 0o600))
		root := newRoot(&program{out: io.Discard, errs: io.Discard})
		root.SetArgs([]string{"agent", "--config", path, "--state-dir", filepath.Join(dir, "state"), "--shim",
			os.Args[0]})
		err := root.Execute()
		if err == nil || !strings.Contains(err.Error(), want) || exitCode(err) != exitUsage {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}

// The shim reports errors in the cluster block with the lines of the whole file.
func TestConfigFileKeepsTheLinesOfItsClusterBlock(t *testing.T) {
	block := "cluster { # of three nodes\n  id = \"c\"\n  tls {\n    ca_file = \"/ca\"\n  }\n}\n"
	text := "node = \"a\"\n\n" + block + "log_level = \"debug\"\n"
	if _, _, got, err := readText(t, text); err != nil || got != "\n\n"+block {
		t.Errorf("%q, %v", got, err)
	}
	if _, _, _, err := readText(t, text+block); err == nil ||
		!strings.Contains(err.Error(), "agent.hcl:10,1-8: there is") {
		t.Error(err)
	}
}

// The file of packages can be read, and has each key of the agent with its meaning and its default.
func TestPackagedConfigFile(t *testing.T) {
	c, _ := agentCommand(t)
	const path, socket = "../../../packaging/agent.hcl", "/run/docker/plugins/holdfast.sock"
	text, err := os.ReadFile(path)
	must(t, err)
	keys := configKeys(c)
	for name, f := range keys {
		value, comment := strconv.Quote(f.DefValue), "# "
		switch {
		case name == "volume_plugin":
			value, comment = strconv.Quote(socket), ""
		case f.Value.Type() == "bool":
			value = f.DefValue
		}
		want := fmt.Sprintf("\n# %s\n%s%s = %s\n", f.Usage, comment, name, value)
		if !strings.Contains(string(text), want) {
			t.Errorf("%s lacks%s", path, want)
		}
	}
	if got := regexp.MustCompile(`(?m)^(# )?\w+ = `).FindAll(text, -1); len(got) != len(keys) {
		t.Errorf("%s has %d keys, want %d: %q", path, len(got), len(keys), got)
	}
	if _, _, err := readConfig(c, path); err != nil || keys["volume_plugin"].Value.String() != socket {
		t.Errorf("volume_plugin is %s, %v", keys["volume_plugin"].Value, err)
	}
}
