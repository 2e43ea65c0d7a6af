package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"holdfast/host/agent/control"
	"holdfast/registry"
)

// now is the clock of relative times in notices. Tests replace it.
var now = time.Now

// notice is a headline with named facts: what an alloc waits for, or what is wrong with a volume.
type notice struct{ rows [][2]string }

// add adds a fact. An empty name continues the fact above. Empty texts are left out.
func (n *notice) add(name, text string) {
	if text = strings.TrimSpace(clean(text)); text != "" {
		n.rows = append(n.rows, [2]string{name, text})
	}
}

// write writes the headline, the facts, and the advice. Commands stand alone at the end of their lines, to be copied.
func (n *notice) write(to io.Writer, head string, h control.Help) error {
	n.add("Meaning", h.Means)
	n.add("Next", h.Then)
	fmt.Fprintln(to, "\n"+clean(head))
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	for _, r := range n.rows {
		fmt.Fprintf(w, "  %s\t%s\n", r[0], r[1])
	}
	name := "Commands"
	for _, d := range h.Do {
		fmt.Fprintf(w, "  %s\t%s:  %s\n", name, d.Why, clean(d.Command))
		name = ""
	}
	return w.Flush()
}

// writeWaits writes a notice for each wait. A wait that others depend on comes first.
func writeWaits(to io.Writer, waits []control.Wait) error {
	order := []registry.Step{registry.StepPlugin, registry.StepTurn, registry.StepClaim}
	var errs []error
	for _, w := range slices.SortedStableFunc(slices.Values(waits), func(x, y control.Wait) int {
		return cmp.Or(cmp.Compare(slices.Index(order, x.Step), slices.Index(order, y.Step)), x.Since.Compare(y.Since))
	}) {
		errs = append(errs, writeWait(to, w))
	}
	return errors.Join(errs...)
}

func writeWait(to io.Writer, w control.Wait) error {
	n := &notice{}
	n.add("Alloc", allocName(string(w.Alloc), w.Job))
	n.add("Step", step(w.Wait))
	n.add("Since", since(w.Since))
	switch w.Step {
	case registry.StepClaim:
		n.holders(w)
	case registry.StepTurn:
		n.running(w)
	}
	if w.RPC == "" {
		n.add("Reason", w.Detail)
	} else {
		n.add("Plugin error", pluginError(w.Wait))
	}
	n.add("Attempts", attempts(w.Wait))
	n.plugin(w)
	return n.write(to, "WAITING: "+w.Help.What, w.Help)
}

// writeTrouble writes what is wrong with a mount of a volume in use.
func writeTrouble(to io.Writer, alloc, job, request string, t *control.Trouble) error {
	if t == nil {
		return nil
	}
	n := &notice{}
	n.add("Alloc", allocName(alloc, job))
	n.add("Request", request)
	n.add("Found", t.Found)
	n.add("Since", since(t.Since))
	return n.write(to, "TROUBLE: "+t.Help.What, t.Help)
}

// writeReported writes what a plugin reported about a volume. The head is "PENDING", "UNCERTAIN" or "UNHEALTHY".
func writeReported(to io.Writer, head string, list ...*control.Trouble) error {
	var errs []error
	for _, t := range list {
		if t != nil {
			n := &notice{}
			n.add("Reported", t.Found)
			n.add("Since", since(t.Since))
			errs = append(errs, n.write(to, head+": "+t.Help.What, t.Help))
		}
	}
	return errors.Join(errs...)
}

func allocName(alloc, job string) string {
	switch {
	case alloc == "":
		return ""
	case job == "":
		return short(alloc)
	}
	return fmt.Sprintf("%s of job %s", short(alloc), job)
}

func step(w registry.Wait) string {
	switch {
	case w.RPC != "" && w.Step != "":
		return fmt.Sprintf("%s: %s of %s", w.Step, w.RPC, w.For)
	case w.RPC != "":
		return fmt.Sprintf("%s of %s", w.RPC, w.For)
	case w.Step == registry.StepTurn:
		return "turn: a volume has one operation at a time"
	case w.For != "":
		return fmt.Sprintf("%s: %s", w.Step, w.For)
	}
	return string(w.Step)
}

func pluginError(w registry.Wait) string {
	switch {
	case w.Code != "":
		return w.Code + ": " + w.Detail
	case w.Detail != "":
		return "no answer: " + w.Detail
	}
	return "none yet"
}

// since formats a time and how long ago it was.
func since(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return fmt.Sprintf("%s, %v ago", when(t), max(0, now().Sub(t).Round(time.Second)))
}

// attempts says how often a step was tried, and when the next try is.
func attempts(w registry.Wait) string {
	var parts []string
	if w.Attempt > 0 {
		parts = append(parts, fmt.Sprint(w.Attempt))
	}
	switch ahead := w.Next.Sub(now()); {
	case w.Next.IsZero() && w.RPC != "" && w.Code+w.Detail != "":
		parts = append(parts, "next soon")
	case w.Next.IsZero() && w.RPC != "":
		parts = append(parts, "the last one is running")
	case w.Next.IsZero():
	case ahead < time.Second:
		parts = append(parts, "next now")
	default:
		parts = append(parts, fmt.Sprintf("next in %v", ahead.Round(time.Second)))
	}
	return strings.Join(parts, ", ")
}

// holders adds the allocs that hold the volume, each with what it waits for itself.
func (n *notice) holders(w control.Wait) {
	name := "Held by"
	for _, h := range w.Holders {
		text := fmt.Sprintf("alloc %s, %s", allocName(h.Alloc, h.Job), h.Access)
		if h.ReadOnly {
			text += ", read-only"
		}
		if !h.Since.IsZero() {
			text += ", since " + since(h.Since)
		}
		n.add(name, text+", "+cmp.Or(h.State, "unknown to this agent"))
		for _, o := range w.Others {
			if string(o.Alloc) == h.Alloc {
				n.add("", o.String())
			}
		}
		name = ""
	}
}

// running adds the other operations of the volume.
func (n *notice) running(w control.Wait) {
	name := "Running"
	for _, o := range w.Others {
		if o.Step != registry.StepTurn {
			n.add(name, fmt.Sprintf("for alloc %s: %s, since %s", allocName(string(o.Alloc), o.Job), o.String(),
				since(o.Since)))
			name = ""
		}
	}
	if name == "" {
		return
	}
	n.add(name, w.For)
	if w.Open != nil {
		n.add("", fmt.Sprintf("%s, since %s", w.Open.RPC, since(w.Open.Since)))
	}
}

// plugin adds the instances and tasks of a plugin that is waited for, or that is unhealthy.
func (n *notice) plugin(w control.Wait) {
	p := w.Plugin
	if p == nil || w.Step == registry.StepClaim || w.Step == registry.StepTurn {
		return
	}
	unhealthy := func(i control.Instance) bool { return i.Health != string(registry.Healthy) }
	if w.Step != registry.StepPlugin && len(p.Instances) > 0 && !slices.ContainsFunc(p.Instances, unhealthy) {
		return
	}
	name := "Plugin"
	for _, i := range p.Instances {
		cause := i.Cause
		if i.Detail != "" {
			cause += ": " + i.Detail
		}
		n.add(name, fmt.Sprintf("%s, task %s of alloc %s: %s since %s: %s", i.Role, i.Task, short(i.Alloc), i.Health,
			since(i.Since), cause))
		name = ""
	}
	for _, t := range p.Tasks {
		if t.Restart != nil {
			why := strings.TrimSuffix(fmt.Sprintf("%s: %s", t.Restart.Cause, t.Restart.Detail), ": ")
			n.add(name, fmt.Sprintf("task %s of alloc %s: restart requested: %s", t.Task, short(t.Alloc), why))
		} else if len(p.Instances) == 0 {
			n.add(name, fmt.Sprintf("task %s of alloc %s of job %s: %s, attempt %d", t.Task, short(t.Alloc), t.Job,
				t.Phase, t.Attempt))
		}
		name = ""
	}
}
