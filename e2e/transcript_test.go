package e2e

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/rogpeppe/go-internal/testscript"
)

var update = flag.Bool("update", false, "rewrite testdata/tells")

// transcript is what an operator sees on a terminal, command by command, without what differs from run to run.
type transcript struct {
	name   string
	text   bytes.Buffer
	allocs []string // short ids, in the order of their appearance
}

type transcriptKey struct{}

// tells is a command of scripts: see TestScripts.
func tells(ts *testscript.TestScript, args []string) error {
	if len(args) < 3 {
		return errors.New("usage: tells NAME PATTERN PROGRAM ARG...")
	}
	want, err := regexp.Compile("(?ms)" + args[1])
	if err != nil {
		return err
	}
	output := ""
	err = repeat(args[1], func() (string, error) {
		out, err := programOf(ts, args[2:]).CombinedOutput()
		output = string(out)
		if exit, is := errors.AsType[*exec.ExitError](err); is {
			output, err = fmt.Sprintf("%s(exit code %d)\n", out, exit.ExitCode()), nil
		}
		if want.MatchString(output) {
			return "", err
		}
		return output + "\n", err
	})
	if err != nil {
		return err
	}
	t, m := transcriptOf(ts, args[0]), machineOf(ts)
	fmt.Fprintf(&t.text, "$ %s\n%s\n", t.masked(m, strings.Join(args[2:], " ")), t.masked(m, output))
	return nil
}

func transcriptOf(ts *testscript.TestScript, name string) *transcript {
	all := ts.Value(transcriptKey{}).(*[]*transcript)
	for _, t := range *all {
		if t.name == name {
			return t
		}
	}
	t := &transcript{name: name}
	*all = append(*all, t)
	return t
}

var (
	longID  = regexp.MustCompile(`\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b`)
	shortID = regexp.MustCompile(`\b[0-9a-f]{8}\b`)
	masks   = []struct{ what, with string }{
		{`\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b`, "YYYY-MM-DD hh:mm:ss"}, // as wide as it was
		{`\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ`, "YYYY-MM-DDThh:mm:ssZ"},
		{`\b[0-9hm]*\d+[smhd] ago`, "<duration> ago"},
		{`(?m)^waited \d+s so far: .*\n`, ""}, // as often as it took seconds
		{`next in [0-9hm]*\d+s`, "next in <duration>"},
		{`(Attempts +)\d+`, "$1<number>"},
		{`, try \d+`, ", try <number>"},
		{`attempt \d+,`, "attempt <number>,"},
		{`\((process|pid) \d+\)`, "($1 <pid>)"},
		{`(running +\d+ +\d+ +)\d+ `, "$1<pid> "},
		{`\bvol-[0-9a-f]{16}\b`, "<external id>"},
		{`/[a-z2-7]{26}\b`, "/<hash>"},
	}
)

// masked returns the text without what differs from run to run.
func (t *transcript) masked(m *machine, text string) string {
	hcl, _ := filepath.Abs("testdata/hcl")
	text = strings.NewReplacer(m.dir, "<dir>", bin, "<bin>", hcl, "<hcl>").Replace(text)
	text = longID.ReplaceAllString(text, "$1")
	text = shortID.ReplaceAllStringFunc(text, t.alloc)
	for _, mask := range masks {
		text = regexp.MustCompile(mask.what).ReplaceAllString(text, mask.with)
	}
	return text
}

// alloc returns what stands for a short id, as wide as it.
func (t *transcript) alloc(id string) string {
	for i, known := range t.allocs {
		if known == id {
			return fmt.Sprintf("<alloc%d>", i+1)
		}
	}
	t.allocs = append(t.allocs, id)
	return fmt.Sprintf("<alloc%d>", len(t.allocs))
}

// check compares the words of the transcript with its golden file. Line breaks depend on the width of masked texts.
func (t *transcript) check() error {
	path := filepath.Join("testdata", "tells", t.name+".want")
	if *update {
		return os.WriteFile(path, t.text.Bytes(), 0o644)
	}
	want, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if strings.Join(strings.Fields(t.text.String()), " ") != strings.Join(strings.Fields(string(want)), " ") {
		return fmt.Errorf("%s: the output is\n%s\nwant\n%s", path, t.text.String(), want)
	}
	return nil
}
