package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/hashicorp/go-hclog"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent/control"
	"holdfast/internal/display"
	"holdfast/internal/tracing/otlp"
	"holdfast/registry"
)

// Exit codes.
const (
	exitOK         = 0
	exitFailed     = 1 // the command failed, was refused, or left something behind
	exitUsage      = 2 // the command line is wrong
	exitNoAgent    = 3 // no agent answers at the control socket
	exitInspect    = 4 // doctor: inspection or repair failed
	exitIncomplete = 5 // doctor: inspection incomplete, no inconsistencies found
	// 128 and the signal's number: ended by that signal
)

// flagError is a wrong value of a flag, or of its key in a configuration file.
type flagError struct {
	flag, problem string
	key           string // key with its place in the file; empty: the command line sets the flag
}

func badFlag(flag, format string, args ...any) error {
	return usageError{&flagError{flag: flag, problem: fmt.Sprintf(format, args...)}}
}

func (e *flagError) Error() string { return cmp.Or(e.key, "--"+e.flag) + e.problem }

// usageError is an error in the command line.
type usageError struct{ error }

// errForced means that a second signal has forced the end.
var errForced = errors.New("forced by a second signal")

// errReported means that the failure was already printed.
var errReported = errors.New("failed")

// errIncomplete means that an inspection without findings was incomplete. That was already printed.
var errIncomplete = errors.New("the inspection is incomplete")

// program is one run of this program: the flags of all commands, and the outputs.
type program struct {
	state, run, address string
	json                bool
	logLevel            string

	out, errs io.Writer

	traces *otlp.Exporter // nil: no traces are wanted
	end    func(error)    // ends the span of the command; nil: there is none
}

const defaultState = "/var/lib/holdfast"

// run runs the program. All output passes through display.Writer, because texts of jobs and plugins are untrusted.
func run(args []string, out, errs io.Writer) int {
	p := &program{out: display.NewWriter(out), errs: display.NewWriter(errs)}
	root := newRoot(p)
	root.SetArgs(args)
	root.SetOut(p.out)
	root.SetErr(p.errs)
	err := root.ExecuteContext(context.Background()) // the root context
	p.endTrace(err)
	if end := slices.Index(args, "--"); end >= 0 { // a command for alloc exec may follow
		args = args[:end]
	}
	p.json = p.json || slices.Contains(args, "--json") // an error in other flags may come before --json was parsed
	list, several := errors.AsType[failures](err)
	if !several {
		list = failures{err}
	}
	for _, e := range list {
		p.report(e)
	}
	return exitCode(err)
}

// errorLine is an error as a JSON object.
type errorLine struct {
	Error string `json:"error"`
	Kind  string `json:"kind"`           // as kindOf returns it
	Next  string `json:"next,omitempty"` // what to do
}

// report prints an error, unless it was already printed.
func (p *program) report(err error) {
	_, byCommand := errors.AsType[commandExit](err)
	if err == nil || byCommand || errors.Is(err, errReported) || errors.Is(err, errIncomplete) {
		return
	}
	line := errorLine{Error: err.Error(), Kind: kindOf(err)}
	switch {
	case errors.Is(err, control.ErrNoAgent) && errors.Is(err, os.ErrPermission):
		line.Next = "the socket belongs to another user: run the command as root or as the user that runs the agent"
	case errors.Is(err, control.ErrNoAgent):
		line.Next = p.adviseNoAgent()
	case errors.Is(err, os.ErrPermission) && os.Geteuid() != 0:
		line.Next = "run the command as root, or name directories of your own: --state-dir, --run-dir"
	}
	if p.json {
		writeJSONLine(p.errs, line)
		return
	}
	fmt.Fprintln(p.errs, "holdfast:", line.Error)
	if line.Next != "" {
		fmt.Fprintln(p.errs, line.Next)
	}
}

// kindOf returns the kind of an error: the text of a kind in package registry, or usage, no agent, interrupted or
// other.
func kindOf(err error) string {
	for _, kind := range registry.Kinds {
		if errors.Is(err, kind) {
			return kind.Error()
		}
	}
	switch code := exitCode(err); {
	case code == exitUsage:
		return "usage"
	case code == exitNoAgent:
		return "no agent"
	case code > 128:
		return "interrupted"
	}
	return "other"
}

// adviseNoAgent returns what to do if no agent answers. It does not advise to start an agent that is already running.
func (p *program) adviseNoAgent() string {
	if p.address == "" || p.state != "" { // with only --address, the state directory is not known
		if pid, held := host.LockHolder(p.stateDir()); held {
			return fmt.Sprintf("an agent is running: process %s uses %s. If its control socket was removed, it makes "+
				"a new one within a few seconds: try again. If it was started with another --run-dir, use the "+
				"same. Otherwise end it with kill %[1]s and start it again: tasks keep running", pid, p.stateDir())
		}
	}
	return "start one with holdfast agent, or set --state-dir, --run-dir or --address (HOLDFAST_ADDR)"
}

func exitCode(err error) int {
	_, usage := errors.AsType[usageError](err)
	_, inspection := errors.AsType[inspectError](err)
	ofCommand, isCommand := errors.AsType[commandExit](err)
	signal, isSignal := errors.AsType[interrupted](err)
	switch {
	case err == nil:
		return exitOK
	case isCommand:
		return int(ofCommand)
	case usage, isCobraUsage(err):
		return exitUsage
	case errors.Is(err, control.ErrNoAgent):
		return exitNoAgent
	case inspection:
		return exitInspect
	case errors.Is(err, errIncomplete):
		return exitIncomplete
	case isSignal && !errors.Is(err, errForced):
		return signal.code()
	}
	return exitFailed
}

// isCobraUsage recognizes errors in flags before the command. Cobra does not pass these to FlagErrorFunc.
func isCobraUsage(err error) bool {
	starts := []string{"unknown flag: ", "unknown shorthand flag: ", "flag needs an argument: ", "invalid argument "}
	return slices.ContainsFunc(starts, func(s string) bool { return strings.HasPrefix(err.Error(), s) })
}

func newRoot(p *program) *cobra.Command {
	root := group("holdfast", "Run jobs with CSI storage on this node",
		newRun(p), newAgent(p), newValidate(p), newJob(p), newPlugin(p), newVolume(p),
		newSnapshot(p), newGroupSnapshot(p), newAlloc(p), newClaim(p), newNode(p), newEvents(p),
		newShim(p), newDoctor(p), newCluster(p), newEndpoint(p), newVersion(p), newDocs())
	root.SilenceErrors, root.SilenceUsage = true, true
	root.Long = `Run jobs with CSI storage on this node.

Exit codes:
  0  success
  1  failure
  2  usage error
  3  no agent is running
  4  doctor: inspection or repair failed
  5  doctor: inspection incomplete, no inconsistencies found
  129, 130, 143  ended by SIGHUP, SIGINT, SIGTERM (agent, csi-endpoint: 0)`
	root.TraverseChildren = true // so that an error names an unknown flag that stands before a subcommand
	root.Version = host.Version
	root.SetVersionTemplate("holdfast {{.Version}}\n")
	root.PersistentPreRunE = func(c *cobra.Command, args []string) error {
		p.startTrace(c)
		return errors.Join(p.checkLevel(), p.checkAddress(), checkFlags(c.Flags()), checkUTF8(args))
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{flagValueError(err)} })
	flags := root.PersistentFlags()
	flags.StringVar(&p.state, "state-dir", os.Getenv("HOLDFAST_STATE_DIR"),
		"state directory (env HOLDFAST_STATE_DIR; default "+defaultState+"; run: a temporary directory)")
	flags.StringVar(&p.run, "run-dir", "",
		"directory for sockets (default /run/holdfast/DIGEST, with a digest of the state directory's path)")
	flags.StringVar(&p.address, "address", os.Getenv("HOLDFAST_ADDR"),
		"control socket of the agent, a path or unix://PATH (env HOLDFAST_ADDR; default agent.sock in the run "+
			"directory)")
	flags.BoolVar(&p.json, "json", false, "print JSON")
	flags.StringVar(&p.logLevel, "log-level", "",
		"log level: trace, debug, info, warn or error (default warn; agent: info)")
	prepareArguments(root, p)
	root.SetUsageTemplate(strings.ReplaceAll(root.UsageTemplate(), "FlagUsages |", "FlagUsagesWrapped 80 |"))
	return root
}

// group returns a command that only has subcommands.
func group(use, short string, sub ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Args: cobra.ArbitraryArgs}
	c.RunE = func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return c.Help()
		}
		text := fmt.Sprintf("unknown command %q for %s", args[0], c.CommandPath())
		if like := c.SuggestionsFor(args[0]); len(like) > 0 {
			text += fmt.Sprintf("; did you mean %s?", listed(like))
		}
		return usageError{fmt.Errorf("%s; see %s --help", text, c.CommandPath())}
	}
	c.SuggestionsMinimumDistance = 2
	c.AddCommand(sub...)
	return c
}

// excludeFlags makes a command refuse two flags together.
func excludeFlags(c *cobra.Command, one, other string) {
	c.PreRunE = func(c *cobra.Command, _ []string) error {
		if c.Flags().Changed(one) && c.Flags().Changed(other) {
			return usageError{fmt.Errorf("use either --%s or --%s", one, other)}
		}
		return nil
	}
}

func (p *program) stateDir() string {
	if p.state == "" {
		return realPath(defaultState)
	}
	return realPath(p.state)
}

// realPath returns the absolute path without symbolic links, as the kernel's mount table has it.
func realPath(path string) string {
	path, err := filepath.Abs(path)
	if err != nil {
		return path
	}
	if real, err := filepath.EvalSymlinks(path); err == nil {
		return real
	}
	if parent := filepath.Dir(path); parent != path {
		return filepath.Join(realPath(parent), filepath.Base(path))
	}
	return path
}

// runDirs returns the possible run directories of a state directory, the preferred one first.
func runDirs(state string) []string {
	first := hooks.DefaultRun(state, os.Getuid(), os.Getenv("XDG_RUNTIME_DIR"))
	return []string{first, state + "/run"}
}

// findRunDir returns the run directory of the flags. Without that flag, it returns the first suitable one of runDirs,
// or the first of all if none is suitable.
func (p *program) findRunDir(state string, suitable func(dir string) bool) string {
	if p.run != "" {
		return realPath(p.run)
	}
	dirs := runDirs(state)
	return dirs[max(0, slices.IndexFunc(dirs, suitable))]
}

// makeRunDir creates the run directory of an agent.
func (p *program) makeRunDir(state string) string {
	return p.findRunDir(state, func(dir string) bool { return os.MkdirAll(dir, 0o700) == nil })
}

// client returns a client for the agent that the flags select. It shows what its calls wait for.
func (p *program) client() *control.Client {
	c := control.NewClient(p.socket())
	c.Trace(p.traces.Provider())
	c.Waiting = (&waiter{to: p.errs, json: p.json}).report
	return c
}

// socket returns the path of the agent's control socket.
func (p *program) socket() string {
	if p.address != "" {
		return strings.TrimPrefix(p.address, "unix://")
	}
	return control.Socket(p.findRunDir(p.stateDir(), func(dir string) bool { return exists(control.Socket(dir)) }))
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// checkLevel refuses an unknown log level.
func (p *program) checkLevel() error {
	if p.logLevel != "" && hclog.LevelFromString(p.logLevel) == hclog.NoLevel {
		return badFlag("log-level", " %q: use trace, debug, info, warn or error", p.logLevel)
	}
	return nil
}

// checkFlags refuses negative durations and numbers of lines, and paths that are given and empty.
func checkFlags(flags *pflag.FlagSet) (err error) {
	paths := []string{"state-dir", "run-dir", "address", "shim", "config"}
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Changed && !utf8.ValidString(f.Value.String()) {
			err = errors.Join(err, badFlag(f.Name, " %q is not valid UTF-8", f.Value))
		}
		if f.Changed && f.Value.String() == "" && slices.Contains(paths, f.Name) {
			err = errors.Join(err, badFlag(f.Name, " is empty: leave it out for the default"))
		}
		if n, noInt := flags.GetInt(f.Name); noInt == nil && n < 0 {
			err = errors.Join(err, badFlag(f.Name, "=%d: the number is negative", n))
		}
		if d, noDuration := flags.GetDuration(f.Name); noDuration == nil && d < 0 {
			err = errors.Join(err, badFlag(f.Name, "=%s: the duration is negative; use one like 10s or 500ms", d))
		}
	})
	return err
}

// checkUTF8 refuses arguments that JSON and protobuf cannot pass on unchanged.
func checkUTF8(args []string) error {
	for _, arg := range args {
		if !utf8.ValidString(arg) {
			return usageError{fmt.Errorf("argument %q is not valid UTF-8", arg)}
		}
	}
	return nil
}

// checkAddress refuses an address that is not a unix socket.
func (p *program) checkAddress() error {
	if strings.Contains(strings.TrimPrefix(p.address, "unix://"), "://") {
		return badFlag("address", " %q: use the path of a socket, or unix://PATH", p.address)
	}
	return nil
}

// flagValueError returns an error that says how the value of a flag must be written. It replaces the error of the
// flag's parser.
func flagValueError(err error) error {
	wrong, is := errors.AsType[*pflag.InvalidValueError](err)
	if !is {
		return err
	}
	return fmt.Errorf("--%s %q: use %s", wrong.GetFlag().Name, wrong.GetValue(), valueForm(wrong.GetFlag()))
}

// valueForm returns how the value of a flag must be written. It is not called for
// a flag of text, which accepts every value.
func valueForm(flag *pflag.Flag) string {
	switch flag.Value.Type() {
	case "bool":
		return "true or false"
	case "duration":
		return "a duration, like 10s or 500ms"
	}
	return "a number"
}

func (p *program) logger(byDefault string) hclog.Logger {
	level := hclog.LevelFromString(cmp.Or(p.logLevel, byDefault))
	return hclog.New(&hclog.LoggerOptions{Name: "holdfast", Level: level, Output: p.errs})
}
