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
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

var update = flag.Bool("update", false, "write testdata/tells anew")

// tale is what a person sees on a terminal, command by command, with what differs from run to run left out.
type tale struct {
	name   string
	text   bytes.Buffer
	allocs []string // short ids, in the order in which they were told
}

type tellsKey struct{}

// tells runs a program until what it says matches, and adds that to a tale, which is held against testdata/tells when the script has ended.
func tells(ts *testscript.TestScript, args []string) error {
	if len(args) < 3 {
		return errors.New("usage: tells TALE PATTERN PROGRAM ARG...")
	}
	want, err := regexp.Compile("(?ms)" + args[1])
	if err != nil {
		return err
	}
	said, last := "", ""
	for limit, turn := time.Now().Add(patience), time.Now(); ; turn = breathe(turn) {
		if said, err = spoken(ts, args[2:]); err != nil {
			return err
		}
		if want.MatchString(said) {
			break
		}
		if last = said; time.Now().After(limit) {
			return fmt.Errorf("waited in vain for %s; last: %s", args[1], last)
		}
	}
	t := taleOf(ts, args[0])
	fmt.Fprintf(&t.text, "$ %s\n%s\n", t.masked(on(ts), strings.Join(args[2:], " ")), t.masked(on(ts), said))
	return nil
}

func taleOf(ts *testscript.TestScript, name string) *tale {
	tales := ts.Value(tellsKey{}).(*[]*tale)
	for _, t := range *tales {
		if t.name == name {
			return t
		}
	}
	t := &tale{name: name}
	*tales = append(*tales, t)
	return t
}

// spoken is what a program writes, and how it ends if that is not well.
func spoken(ts *testscript.TestScript, args []string) (string, error) {
	cmd := exec.Command(filepath.Join(bin, args[0]), args[1:]...)
	cmd.Env, cmd.Dir = on(ts).environ(), ts.MkAbs(".")
	out, err := cmd.CombinedOutput()
	if exit, is := errors.AsType[*exec.ExitError](err); is {
		return fmt.Sprintf("%s(exit code %d)\n", out, exit.ExitCode()), nil
	}
	return string(out), err
}

var (
	longID  = regexp.MustCompile(`\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b`)
	shortID = regexp.MustCompile(`\b[0-9a-f]{8}\b`)
	masks   = []struct{ what, with string }{
		{`\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b`, "YYYY-MM-DD hh:mm:ss"}, // as wide as it was
		{`\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ`, "YYYY-MM-DDThh:mm:ssZ"},
		{`\b\d+s ago`, "<duration> ago"},
		{`next in \d+s`, "next in <duration>"},
		{`\b\d+ so far`, "<number> so far"},
		{`, try \d+`, ", try <number>"},
		{`attempt \d+,`, "attempt <number>,"},
		{`\((process|pid) \d+\)`, "($1 <pid>)"},
		{`(running +\d+ +\d+ +)\d+ `, "$1<pid> "},
		{`\bvol-[0-9a-f]{16}\b`, "<external id>"},
		{`/[a-z2-7]{26}\b`, "/<hash>"},
	}
)

// masked is the text without what differs from run to run.
func (t *tale) masked(m *machine, text string) string {
	text = strings.NewReplacer(m.dir, "<dir>", bin, "<bin>", shared(), "<hcl>").Replace(text)
	text = longID.ReplaceAllString(text, "$1")
	text = shortID.ReplaceAllStringFunc(text, t.alloc)
	for _, mask := range masks {
		text = regexp.MustCompile(mask.what).ReplaceAllString(text, mask.with)
	}
	return text
}

// alloc is as wide as the id it stands for.
func (t *tale) alloc(id string) string {
	for i, known := range t.allocs {
		if known == id {
			return fmt.Sprintf("<alloc%d>", i+1)
		}
	}
	t.allocs = append(t.allocs, id)
	return fmt.Sprintf("<alloc%d>", len(t.allocs))
}

// judge holds the tale against what is kept of it. Where lines break depends on how long what was left out is: words count.
func (t *tale) judge() error {
	path := filepath.Join("testdata", "tells", t.name+".want")
	if *update {
		return os.WriteFile(path, t.text.Bytes(), 0o644)
	}
	want, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if strings.Join(strings.Fields(t.text.String()), " ") != strings.Join(strings.Fields(string(want)), " ") {
		return fmt.Errorf("%s: it tells\n%s\nwant\n%s", path, t.text.String(), want)
	}
	return nil
}

func shared() string {
	dir, _ := filepath.Abs("testdata/hcl")
	return dir
}
