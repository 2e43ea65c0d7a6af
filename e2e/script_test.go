package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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
)

// The stories of testdata/script, each on a machine of its own. When one has ended well, nothing of it may be left on the real machine.
//
// Commands besides those of testscript:
//
//	agent-start ARG...           start an agent on $D/s; what it says is in $D/agent.log when it has ended
//	agent-stop [INT]             end it with SIGTERM, or SIGINT; it must end well
//	agent-kill                   end it with SIGKILL
//	exits CODE PROGRAM ARG...    run a program that ends with that code
//	until PATTERN PROGRAM ARG... run a program again and again until it ends well and its output matches
//	order FILE PATTERN...        the patterns are found in the file (or stdout), each behind the one before
//	json [PATH PATTERN]          the last stdout is JSON, one value or one a line; what is at the path, as in 0.tasks.0.pid, matches
//	env-json NAME PATH           set a variable to what is at the path, and NAME_SHORT to its first eight characters
//	calls FILE                   print what a plugin's journal has of calls that change something, one a line with its outcome
//	plays FILE                   have the plugins with --script=$D/script do from now on what the file says; $D is known in it
//	tells TALE PATTERN PROGRAM ARG...
//	                             run a program until what it says matches, and add that to a tale, which has to be the one of testdata/tells
//	legal FILE                   the journal breaks no rule of CSI, and everything that was set up was taken down
func TestScripts(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("real mounts need root")
	}
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script", Setup: setup, RequireUniqueNames: true, Deadline: time.Now().Add(3 * patience), Condition: condition,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"agent-start": plain(func(ts *testscript.TestScript, args []string) error { return on(ts).start(args...) }),
			"agent-stop":  plain(agentStop), "agent-kill": plain(agentKill), "exits": plain(exits), "until": plain(untilMatch),
			"order": plain(order), "json": plain(jsonAt), "env-json": plain(envJSON), "calls": plain(calls), "legal": plain(legal),
			"tells": plain(tells), "plays": plain(plays),
		},
	})
}

// condition is what a script may ask besides what testscript knows: [fuse], of the kernel; [ci], where nothing may be missing.
func condition(name string) (bool, error) {
	switch name {
	case "fuse":
		_, err := os.Stat("/dev/fuse")
		return err == nil, nil
	case "ci":
		return os.Getenv("CI") != "", nil
	}
	return false, fmt.Errorf("unknown condition %q", name)
}

type machineKey struct{}

func on(ts *testscript.TestScript) *machine { return ts.Value(machineKey{}).(*machine) }

// setup gives a script its machine, and judges at the end what is left of it.
func setup(env *testscript.Env) error {
	m, err := newMachine()
	if err != nil {
		return err
	}
	env.Values[machineKey{}] = m
	tales := &[]*tale{}
	env.Values[tellsKey{}] = tales
	shared, err := filepath.Abs("testdata/hcl")
	if err != nil {
		return err
	}
	demo, err := filepath.Abs("../examples/hcl")
	if err != nil {
		return err
	}
	for _, v := range append(m.environ(), "D="+m.dir, "BIN="+bin, "HCL="+shared, "EXAMPLES="+demo) {
		name, value, _ := strings.Cut(v, "=")
		env.Setenv(name, value)
	}
	t := env.T()
	env.Defer(func() {
		failed := false
		if f, is := t.(interface{ Failed() bool }); is {
			failed = f.Failed()
		}
		found := []string(nil)
		if !failed {
			found = m.eventuallyLeft()
		}
		if err := m.sweep(); err != nil {
			found = append(found, err.Error())
		}
		if failed || len(found) > 0 {
			t.Log("agents said:\n" + m.said())
		}
		for _, tale := range *tales {
			if err := tale.judge(); err != nil && !failed {
				found = append(found, err.Error())
			}
		}
		if len(found) > 0 {
			t.Fatal("left behind, or told otherwise:\n" + strings.Join(found, "\n"))
		}
	})
	return nil
}

// plain is a command that cannot be negated.
func plain(do func(*testscript.TestScript, []string) error) func(*testscript.TestScript, bool, []string) {
	return func(ts *testscript.TestScript, neg bool, args []string) {
		if neg {
			ts.Fatalf("this command cannot be negated")
		}
		ts.Check(do(ts, args))
	}
}

func agentStop(ts *testscript.TestScript, args []string) error {
	sig := unix.SIGTERM
	if len(args) > 0 {
		sig = unix.SIGINT
	}
	err := on(ts).end(sig)
	if err != nil {
		err = fmt.Errorf("%w\n%s", err, on(ts).said())
	}
	return errors.Join(err, os.WriteFile(on(ts).path("agent.log"), []byte(on(ts).said()), 0o600))
}

func agentKill(ts *testscript.TestScript, _ []string) error {
	if err := on(ts).end(unix.SIGKILL); err == nil {
		return errors.New("it ended well before it was killed")
	}
	return nil
}

// program runs one as exec does.
func program(ts *testscript.TestScript, args []string) (out, errs string, code int, err error) {
	err = ts.Exec(args[0], args[1:]...)
	out, errs = ts.ReadFile("stdout"), ts.ReadFile("stderr")
	if exit, is := errors.AsType[*exec.ExitError](err); is {
		return out, errs, exit.ExitCode(), nil
	}
	return out, errs, 0, err
}

func exits(ts *testscript.TestScript, args []string) error {
	want, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	_, _, code, err := program(ts, args[1:])
	if err == nil && code != want {
		err = fmt.Errorf("it ends with code %d, not %d", code, want)
	}
	return err
}

func untilMatch(ts *testscript.TestScript, args []string) error {
	want, err := regexp.Compile("(?m)" + args[0])
	if err != nil {
		return err
	}
	last := ""
	for limit, turn := time.Now().Add(patience), time.Now(); time.Now().Before(limit); turn = breathe(turn) {
		cmd := exec.Command(filepath.Join(bin, args[1]), args[2:]...)
		if _, err := os.Stat(cmd.Path); err != nil {
			cmd = exec.Command(args[1], args[2:]...)
		}
		cmd.Env = on(ts).environ()
		cmd.Dir = ts.MkAbs(".")
		var errs bytes.Buffer
		cmd.Stderr = &errs
		out, err := cmd.Output()
		if err == nil && want.Match(out) {
			_, err := ts.Stdout().Write(out)
			return err
		}
		last = fmt.Sprintf("%v\n%s%s", err, out, errs.Bytes())
	}
	return fmt.Errorf("waited in vain for %s; last: %s", args[0], last)
}

// breathe sleeps after a program that was run in vain for twice as long as it took, within bounds, so that who asks is not who keeps the machine
// busy, and says when it was over.
func breathe(since time.Time) time.Time {
	time.Sleep(min(max(20*time.Millisecond, 2*time.Since(since)), time.Second))
	return time.Now()
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
			return fmt.Errorf("there is no %q", p)
		}
		rest = rest[at[1]:]
	}
	return nil
}

func jsonAt(ts *testscript.TestScript, args []string) error {
	if len(args) == 0 {
		_, err := decoded(ts)
		return err
	}
	found, err := lookUp(ts, args[0])
	if err != nil {
		return err
	}
	if ok, err := regexp.MatchString("^(?:"+args[1]+")$", found); err != nil || !ok {
		return errors.Join(err, fmt.Errorf("%s is %q", args[0], found))
	}
	return nil
}

func envJSON(ts *testscript.TestScript, args []string) error {
	found, err := lookUp(ts, args[1])
	ts.Setenv(args[0], found)
	ts.Setenv(args[0]+"_SHORT", found[:min(8, len(found))])
	return err
}

// decoded is the last stdout: one value, or a list of those that it has, one a line.
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

func lookUp(ts *testscript.TestScript, path string) (string, error) {
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
	return tellCalls(ts.Stdout(), ts.MkAbs(args[0]))
}

// tellCalls writes what a journal has of calls that change something, one a line.
func tellCalls(to io.Writer, path string) error {
	list, err := csifake.Calls(path)
	if err != nil {
		return err
	}
	for _, c := range list {
		if !journal.Mutates(c.RPC) {
			continue
		}
		outcome := "no answer"
		if c.End != nil {
			outcome = c.End.Code
		}
		if _, err := fmt.Fprintf(to, "%s %s%s: %s\n", c.RPC, c.Volume, c.Name, outcome); err != nil {
			return err
		}
	}
	return nil
}

// plays replaces the script as a whole: a plugin may be reading it.
func plays(ts *testscript.TestScript, args []string) error {
	next := on(ts).path("script.next")
	if err := os.WriteFile(next, []byte(strings.ReplaceAll(ts.ReadFile(args[0]), "$D", on(ts).dir)), 0o600); err != nil {
		return err
	}
	return os.Rename(next, on(ts).path("script"))
}

func legal(ts *testscript.TestScript, args []string) error {
	var broken []error
	for _, v := range csifake.Check(ts.MkAbs(args[0]), journal.Options{Settled: true}) {
		broken = append(broken, errors.New(v.String()))
	}
	return errors.Join(broken...)
}
