package rules

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// banned is what of go-plugin breaks under a swap.
var banned = regexp.MustCompile(`\b(ReattachConfig|ReattachFunc|CleanupClients|GRPCBrokerMultiplex|Managed:|broker\.(Dial|Accept|NextId)|` +
	`[A-Za-z]\w* \*plugin\.GRPCBroker)`)

// What of go-plugin breaks under a swap is not used at all: its broker dies with the first host, reattaching checks nothing, its global list
// of clients grows for ever.
func TestNoGoPluginBrokerReattachOrGlobalList(t *testing.T) {
	for path, p := range all(t) {
		for _, file := range p.GoFiles {
			text, err := os.ReadFile(filepath.Join(p.Dir, file))
			if err != nil {
				t.Fatal(err)
			}
			if found := banned.FindString(string(text)); found != "" {
				t.Errorf("%s/%s uses %s of go-plugin", path, file, found)
			}
		}
	}
}

// TestBanCatches: the ban is one.
func TestBanCatches(t *testing.T) {
	for _, line := range []string{
		"Reattach: &plugin.ReattachConfig{}", "defer plugin.CleanupClients()", "Managed: true,", "GRPCBrokerMultiplex: true", "id := broker.NextId()",
		"func (p) GRPCServer(b *plugin.GRPCBroker, s *grpc.Server) error {", "ReattachFunc: f",
	} {
		if !banned.MatchString(line) {
			t.Errorf("%q is not caught", line)
		}
	}
	if line := "func (p servicePlugin) GRPCServer(_ *plugin.GRPCBroker, s *grpc.Server) error { return p.register(s) }"; banned.MatchString(line) {
		t.Errorf("%q is caught: the broker has no name there", line)
	}
}

// byBan are the traps whose countermeasure is that a part of go-plugin is not used.
var byBan = map[string]bool{"T9": true, "T10": true, "T11": true}

// Every trap has a row in docs/traps.md, and a test that bears its number, or is banned; every test with a number is in its row. That
// tests exist is held for all documents.
func TestTrapsHaveTheirTests(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "docs", "traps.md"))
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]string{}
	for _, m := range row.FindAllStringSubmatch(string(text), -1) {
		rows[m[1]] = m[2]
	}
	if len(rows) != 16 {
		t.Errorf("docs/traps.md has %d traps", len(rows))
	}
	for i := range 16 {
		id := fmt.Sprint("T", i+1)
		want := "`TestTrap" + id + "[A-Z]"
		if byBan[id] {
			want = "`TestNoGoPluginBrokerReattachOrGlobalList`"
		}
		if !regexp.MustCompile(want).MatchString(rows[id]) {
			t.Errorf("docs/traps.md names no test of %s: %q", id, rows[id])
		}
	}
	number := regexp.MustCompile(`^TestTrap(T[0-9]+)`)
	_, tests := declared(t)
	for _, name := range regexp.MustCompile(`\bFuzz[A-Z]\w*`).FindAllString(string(text), -1) {
		if !tests[name] {
			t.Errorf("docs/traps.md names %s, which does not exist", name)
		}
	}
	for name := range tests {
		if m := number.FindStringSubmatch(name); m != nil && !strings.Contains(rows[m[1]], "`"+name+"`") {
			t.Errorf("%s is not in row %s of docs/traps.md", name, m[1])
		}
	}
}
