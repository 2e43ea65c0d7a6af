package main

import (
	"fmt"
	"io"

	"holdfast/internal/csifake/journal"
)

// mostEvidence is the number of violations of a rule that are printed for one journal.
const mostEvidence = 5

// judged is a journal with its verdicts.
type judged struct {
	name     string
	lines    []journal.Line
	verdicts []journal.Verdict // for the same rules in each journal
}

// writeVerdicts prints a line for each rule with the calls that break it, and a summary. A rule is kept if a journal
// exercises it and no journal breaks it.
func writeVerdicts(out io.Writer, all []judged) (broken bool) {
	count := map[string]int{}
	for i := range all[0].verdicts {
		calls, violations, result := 0, 0, "kept"
		for _, j := range all {
			calls += j.verdicts[i].Calls
			violations += len(j.verdicts[i].Broken)
		}
		switch {
		case violations > 0:
			result, broken = "BROKEN", true
		case calls == 0:
			result = "not exercised"
		}
		count[result]++
		rule := all[0].verdicts[i].Rule
		fmt.Fprintf(out, "%-13s %-3s %s (%d calls)\n", result, rule.ID, rule.Text, calls)
		for _, j := range all {
			writeEvidence(out, j, j.verdicts[i].Broken)
		}
	}
	fmt.Fprintf(out, "%d rules kept, %d broken, %d not exercised\n",
		count["kept"], count["BROKEN"], count["not exercised"])
	return broken
}

func writeEvidence(out io.Writer, j judged, violations []journal.Violation) {
	for i, v := range violations {
		if i == mostEvidence {
			fmt.Fprintf(out, "    %s: and %d more\n", j.name, len(violations)-i)
			return
		}
		fmt.Fprintf(out, "    %s: %s\n", j.name, v.Text)
		if v.Line > 0 && v.Line <= len(j.lines) {
			l := j.lines[v.Line-1]
			fmt.Fprintf(out, "        line %d: %s call %d of %s: %s %q\n", v.Line, l.Wall.Format("15:04:05.000"),
				l.Call, l.Instance, l.RPC, l.Volume+l.Name)
		}
	}
}

// writeRules prints the rules as the table in docs/cosanity.md.
func writeRules(out io.Writer) {
	fmt.Fprintln(out, "| rule | section of the specification | what an orchestrator does |")
	fmt.Fprintln(out, "|---|---|---|")
	for _, v := range journal.Judge(nil, journal.Options{}) {
		section := v.Section
		if section == "" {
			section = "(none)"
		}
		fmt.Fprintf(out, "| %s | %s | %s |\n", v.Rule.ID, section, v.Rule.Text)
	}
}
