package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"

	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/internal/etcdtest"
)

// TestScripts runs the scripts of testdata/script, each on a machine of its own. Nothing of a script may be left when
// it has succeeded.
//
// Commands besides those of testscript:
//
//	agent-start ARG...           start an agent on $D/s; its output is in $D/agent.log once it has exited
//	agent-stop [INT]             end it with SIGTERM, or SIGINT; it must exit with success
//	agent-kill                   end it with SIGKILL
//	etcd start|STOP|CONT|KILL    start an etcd, whose address is $ETCD, or send it a signal
//	exits CODE PROGRAM ARG...    run a program that exits with the code
//	until PATTERN PROGRAM ARG... run a program again and again until it succeeds and its output matches
//	order FILE PATTERN...        the patterns are found in the file (or stdout), each after the one before
//	json [PATH PATTERN]          the last stdout is JSON, one value or one per line; the value at the path, as in
//	                             0.tasks.0.pid, matches
//	env-json NAME PATH           set a variable to the value at the path, and NAME_SHORT to its first eight characters
//	calls FILE                   print the mutating calls of a plugin's journal, one per line, with their outcome
//	plays FILE                   have the plugins with --script=$D/script act by the file's rules from now on;
//	                             $D is replaced
//	tells NAME PATTERN PROGRAM ARG...
//	                             run a program until its output matches, and add it to a transcript that is
//	                             compared with testdata/tells/NAME.want
//	legal FILE                   the journal breaks no rule of CSI, and everything that was set up was taken down
func TestScripts(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("real mounts need root")
	}
	type command = func(*testscript.TestScript, []string) error
	commands := map[string]func(*testscript.TestScript, bool, []string){}
	for name, do := range map[string]command{
		"agent-start": func(ts *testscript.TestScript, args []string) error {
			return machineOf(ts).startAgent(args...)
		},
		"agent-stop": agentStop, "agent-kill": agentKill, "etcd": etcd, "exits": exits, "until": untilMatch,
		"order": order, "json": jsonMatch, "env-json": envJSON, "calls": calls, "legal": legal, "tells": tells,
		"plays": plays,
	} {
		commands[name] = func(ts *testscript.TestScript, neg bool, args []string) {
			if neg {
				ts.Fatalf("%s cannot be negated", name)
			}
			ts.Check(do(ts, args))
		}
	}
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script", Setup: setup, RequireUniqueNames: true,
		Condition: condition, Cmds: commands,
	})
}

// condition evaluates [fuse], which the kernel needs, and [ci], where nothing may be missing.
func condition(name string) (bool, error) {
	switch name {
	case "fuse":
		return exists("/dev/fuse"), nil
	case "ci":
		return os.Getenv("CI") != "", nil
	}
	return false, fmt.Errorf("unknown condition %q", name)
}

type machineKey struct{}

func machineOf(ts *testscript.TestScript) *machine { return ts.Value(machineKey{}).(*machine) }

// setup gives a script its machine, and checks at the end what is left of it.
func setup(env *testscript.Env) error {
	m, err := newMachine()
	if err != nil {
		return err
	}
	env.Values[machineKey{}] = m
	transcripts := &[]*transcript{}
	env.Values[transcriptKey{}] = transcripts
	shared, err1 := filepath.Abs("testdata/hcl")
	examples, err2 := filepath.Abs("../examples/hcl")
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer free.Close()
	for _, v := range append(m.environ(), "D="+m.dir, "BIN="+bin, "HCL="+shared, "EXAMPLES="+examples,
		"FREE_ADDRESS="+free.Addr().String()) {
		name, value, _ := strings.Cut(v, "=")
		env.Setenv(name, value)
	}
	t := env.T()
	env.Defer(func() {
		failed := false
		if f, is := t.(interface{ Failed() bool }); is {
			failed = f.Failed()
		}
		var found []string
		if !failed {
			found = m.finalLeftovers()
		}
		if err := m.sweep(); err != nil {
			found = append(found, err.Error())
		}
		if failed || len(found) > 0 {
			t.Log("output of agents:\n" + m.agentOutput())
		}
		for _, tr := range *transcripts {
			if err := tr.check(); err != nil && !failed {
				found = append(found, err.Error())
			}
		}
		if len(found) > 0 {
			t.Fatal("left behind, or another output:\n" + strings.Join(found, "\n"))
		}
	})
	return nil
}

func agentStop(ts *testscript.TestScript, args []string) error {
	sig := unix.SIGTERM
	if len(args) > 0 {
		sig = unix.SIGINT
	}
	m := machineOf(ts)
	err := m.endAgent(sig)
	if err != nil {
		err = fmt.Errorf("%w\n%s", err, m.agentOutput())
	}
	return errors.Join(err, os.WriteFile(m.path("agent.log"), []byte(m.agentOutput()), 0o600))
}

func agentKill(ts *testscript.TestScript, _ []string) error {
	if err := machineOf(ts).endAgent(unix.SIGKILL); err == nil {
		return errors.New("the agent ended well before it was killed")
	}
	return nil
}

func etcd(ts *testscript.TestScript, args []string) error {
	m := machineOf(ts)
	if args[0] != "start" {
		return m.etcd.Process.Signal(unix.SignalNum("SIG" + args[0]))
	}
	cmd, at, err := etcdtest.Command(m.path("etcd"), "http")
	if err != nil {
		return err
	}
	m.etcd = cmd
	ts.Setenv("ETCD", at)
	return cmd.Start()
}

func exits(ts *testscript.TestScript, args []string) error {
	want, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	code := 0
	err = ts.Exec(args[1], args[2:]...)
	if exit, is := errors.AsType[*exec.ExitError](err); is {
		code, err = exit.ExitCode(), nil
	}
	if err == nil && code != want {
		err = fmt.Errorf("exit code %d, not %d", code, want)
	}
	return err
}

// programOf is a program of bin, or of the machine.
func programOf(ts *testscript.TestScript, args []string) *exec.Cmd {
	cmd := exec.Command(args[0], args[1:]...)
	if path := filepath.Join(bin, args[0]); exists(path) {
		cmd = exec.Command(path, args[1:]...)
	}
	cmd.Env, cmd.Dir = machineOf(ts).environ(), ts.MkAbs(".")
	return cmd
}

func untilMatch(ts *testscript.TestScript, args []string) error {
	want, err := regexp.Compile("(?m)" + args[0])
	if err != nil {
		return err
	}
	return repeat(args[0], func() (string, error) {
		cmd := programOf(ts, args[1:])
		var errs bytes.Buffer
		cmd.Stderr = &errs
		out, err := cmd.Output()
		if err == nil && want.Match(out) {
			_, err := ts.Stdout().Write(out)
			return "", err
		}
		return fmt.Sprintf("%v\n%s%s", err, out, errs.Bytes()), nil
	})
}

// repeat calls try until it fails or returns an empty text. Between two calls it sleeps for twice as long as a call
// takes, within bounds, to leave the processors to others.
func repeat(what string, try func() (last string, err error)) error {
	for limit := time.Now().Add(waitLimit); ; {
		began := time.Now()
		last, err := try()
		if err != nil || last == "" {
			return err
		}
		if time.Now().After(limit) {
			return fmt.Errorf("timed out waiting for %s; last: %s", what, last)
		}
		time.Sleep(min(max(20*time.Millisecond, 2*time.Since(began)), time.Second))
	}
}

func order(ts *testscript.TestScript, args []string) error {
	text := ts.ReadFile(args[0])
	rest := text
	for _, p := range args[1:] {
		re, err := regexp.Compile("(?m)" + p)
		if err != nil {
			return err
		}
		at := re.FindStringIndex(rest)
		switch {
		case at == nil && re.MatchString(text):
			return fmt.Errorf("%q comes too early", p)
		case at == nil:
			return fmt.Errorf("%q is missing", p)
		}
		rest = rest[at[1]:]
	}
	return nil
}

func jsonMatch(ts *testscript.TestScript, args []string) error {
	if len(args) == 0 {
		return errOf(decoded(ts))
	}
	found, err := jsonValue(ts, args[0])
	if err != nil {
		return err
	}
	if ok, err := regexp.MatchString("^(?:"+args[1]+")$", found); err != nil || !ok {
		return errors.Join(err, fmt.Errorf("%s is %q", args[0], found))
	}
	return nil
}

func envJSON(ts *testscript.TestScript, args []string) error {
	found, err := jsonValue(ts, args[1])
	ts.Setenv(args[0], found)
	ts.Setenv(args[0]+"_SHORT", found[:min(8, len(found))])
	return err
}

// decoded returns the last stdout: one value, or a list of values, one per line.
func decoded(ts *testscript.TestScript) (any, error) {
	var all []any
	d := json.NewDecoder(strings.NewReader(ts.ReadFile("stdout")))
	d.UseNumber()
	for {
		var v any
		err := d.Decode(&v)
		switch {
		case errors.Is(err, io.EOF) && len(all) == 0:
			return nil, errors.New("no JSON at all")
		case errors.Is(err, io.EOF) && len(all) == 1:
			return all[0], nil
		case errors.Is(err, io.EOF):
			return all, nil
		case err != nil:
			return nil, err
		}
		all = append(all, v)
	}
}

func jsonValue(ts *testscript.TestScript, path string) (string, error) {
	v, err := decoded(ts)
	if err != nil {
		return "", err
	}
	for _, key := range strings.Split(path, ".") {
		switch at := v.(type) {
		case map[string]any:
			v = at[key]
		case []any:
			i, err := strconv.Atoi(key)
			if err != nil || i >= len(at) {
				return "", fmt.Errorf("%s: no %s in a list of %d", path, key, len(at))
			}
			v = at[i]
		default:
			return "", fmt.Errorf("%s: no %s in %v", path, key, v)
		}
	}
	return fmt.Sprint(v), nil
}

func calls(ts *testscript.TestScript, args []string) error {
	return printCalls(ts.Stdout(), ts.MkAbs(args[0]))
}

// printCalls prints the mutating calls of a journal.
func printCalls(to io.Writer, path string) error {
	list, err := csifake.Calls(path)
	for _, c := range list {
		if journal.Mutates(c.RPC) {
			_, failed := fmt.Fprintf(to, "%s %s%s: %s\n", c.RPC, c.Volume, c.Name, codeOf(c))
			err = errors.Join(err, failed)
		}
	}
	return err
}

// plays replaces the plugins' script as a whole: a plugin may be reading it.
func plays(ts *testscript.TestScript, args []string) error {
	m := machineOf(ts)
	text := strings.ReplaceAll(ts.ReadFile(args[0]), "$D", m.dir)
	return errors.Join(os.WriteFile(m.path("script.next"), []byte(text), 0o600),
		os.Rename(m.path("script.next"), m.path("script")))
}

func legal(ts *testscript.TestScript, args []string) error {
	var violations []error
	for _, v := range csifake.Check(ts.MkAbs(args[0]), journal.Options{Settled: true}) {
		violations = append(violations, errors.New(v.String()))
	}
	return errors.Join(violations...)
}
