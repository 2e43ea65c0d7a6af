// Command cosanity checks how a container orchestrator uses CSI. It is a CSI plugin that misbehaves as a scenario says,
// and a judge of the calls that it got. See docs/cosanity.md.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
)

// journalName is the name of the journal in a plugin's directory.
const journalName = "journal.jsonl"

const usage = `usage:
  cosanity scenarios                             list the scenarios
  cosanity rules                                 list the rules
  cosanity plugin -dir DIR [flags] SCENARIO      serve CSI at CSI_ENDPOINT until interrupted
  cosanity judge [flags] DIR...                  judge the calls that the plugin got`

func main() {
	broken, err := run(os.Args[1:], os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "cosanity:", err)
		os.Exit(2)
	}
	if broken {
		os.Exit(1)
	}
}

// run executes a command. broken reports whether the journal breaks a rule.
func run(args []string, out io.Writer) (broken bool, err error) {
	if len(args) == 0 {
		return false, errors.New(usage)
	}
	switch args[0] {
	case "scenarios":
		for _, s := range scenarios {
			fmt.Fprintf(out, "%-10s %s\n", s.name, s.text)
			if s.steps != "" {
				fmt.Fprintf(out, "%10s %s\n", "", s.steps)
			}
		}
		return false, nil
	case "rules":
		writeRules(out)
		return false, nil
	case "plugin":
		return false, servePlugin(args[1:], out)
	case "judge":
		return judge(args[1:], out)
	}
	return false, errors.New(usage)
}

func servePlugin(args []string, out io.Writer) error {
	cfg, err := pluginConfig(args)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	p, err := csifake.New(cfg)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "serving CSI at", p.Socket())
	return p.Run(ctx)
}

// pluginConfig returns the configuration of a scenario's plugin, and writes its script.
func pluginConfig(args []string) (cfg csifake.Config, err error) {
	flags := flag.NewFlagSet("plugin", flag.ContinueOnError)
	dir := flags.String("dir", "", "directory for the journal and the state; plugins of one storage system share it")
	endpoint := flags.String("endpoint", os.Getenv("CSI_ENDPOINT"), "unix socket, as unix:///path")
	role := flags.String("role", "monolith", "controller, node or monolith")
	node := flags.String("node-id", "node-1", "answer of NodeGetInfo")
	instance := flags.String("instance", "", "name in the journal; default ROLE@NODE-ID")
	if err := flags.Parse(args); err != nil {
		return cfg, err
	}
	at := slices.IndexFunc(scenarios, func(s scenario) bool { return s.name == flags.Arg(0) })
	if at < 0 || flags.NArg() != 1 || *dir == "" || *endpoint == "" {
		return cfg, errors.New(
			"plugin needs -dir DIR, a socket in CSI_ENDPOINT, and one of the scenarios that cosanity scenarios lists")
	}
	cfg = scenarios[at].config
	cfg.Role, cfg.NodeID, cfg.Instance = csifake.Role(*role), *node, *instance
	cfg.Socket, cfg.Endpoint = csifake.SocketPath(*endpoint), *endpoint
	cfg.Journal, cfg.Backend = filepath.Join(*dir, journalName), csifake.NewBackend(filepath.Join(*dir, "state.json"))
	cfg.Mounts, cfg.DataDir, cfg.Mount = true, filepath.Join(*dir, "data"), csifake.MountBind
	cfg.Die, cfg.ScriptFile = csifake.KillProcess, filepath.Join(*dir, *role+"-script.json")
	if err := os.MkdirAll(cfg.DataDir, 0o700); err != nil {
		return cfg, err
	}
	return cfg, writeScript(cfg.ScriptFile, scenarios[at].script)
}

// writeScript writes the rules to a file. The plugin counts their matches in a file beside it, so a plugin that has
// crashed once continues the count at its next start.
func writeScript(path string, rules []csifake.Rule) error {
	if rules == nil {
		rules = []csifake.Rule{}
	}
	text, err := json.Marshal(rules)
	if err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o600)
}

func judge(args []string, out io.Writer) (broken bool, err error) {
	flags := flag.NewFlagSet("judge", flag.ContinueOnError)
	running := flags.Bool("running", false, "volumes are still in use: nothing has to be taken down")
	allow := flags.String("allow", "", "rules that are not judged, with commas between")
	byNode := flags.Bool("by-node", false,
		"calls of different nodes for one volume may overlap, and so may repeated controller calls")
	if err := flags.Parse(args); err != nil {
		return false, err
	}
	if flags.NArg() == 0 {
		return false, errors.New("judge needs the directory of a plugin, or several")
	}
	o := journal.Options{Settled: !*running, ByNode: *byNode, Allow: strings.Split(*allow, ",")}
	var all []judged
	for _, dir := range flags.Args() {
		lines, err := journal.Read(filepath.Join(dir, journalName))
		if err != nil {
			return false, err
		}
		all = append(all, judged{filepath.Base(dir), lines, journal.Judge(lines, o)})
	}
	return writeVerdicts(out, all), nil
}
