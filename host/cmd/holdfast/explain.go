package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"holdfast/host/agent/control"
	"holdfast/registry"
)

// writeWaits says of each wait what is waited for, and what that means to a person.
func writeWaits(to io.Writer, waits []control.Wait) error {
	var errs []error
	inOrder := func(x, y control.Wait) int { return cmp.Or(cmp.Compare(depth(x), depth(y)), x.Since.Compare(y.Since)) }
	for _, w := range slices.SortedStableFunc(slices.Values(waits), inOrder) {
		errs = append(errs, sheetOf(to).wait(w))
	}
	return errors.Join(errs...)
}

// depth orders waits: what others wait for comes first.
func depth(w control.Wait) int {
	return slices.Index([]registry.Step{registry.StepPlugin, registry.StepTurn, registry.StepClaim}, w.Step)
}

// writeTrouble says what is wrong with a mount of a volume in use.
func writeTrouble(to io.Writer, alloc, job, request string, t *control.Trouble) error {
	if t == nil {
		return nil
	}
	s := sheetOf(to)
	b := &block{sheet: s}
	b.say("Alloc", ofJob(alloc, job))
	b.say("Request", request)
	b.say("Found", t.Found)
	b.say("Since", s.since(t.Since))
	return b.write("TROUBLE: "+t.Help.What, t.Help)
}

// writeGrowth says what an expansion waits for.
func writeGrowth(to io.Writer, t *control.Trouble) error { return writeSaid(to, "PENDING", t) }

// writeUnusable says why a volume cannot be used.
func writeUnusable(to io.Writer, t *control.Trouble) error { return writeSaid(to, "UNCERTAIN", t) }

func writeSaid(to io.Writer, head string, t *control.Trouble) error {
	if t == nil {
		return nil
	}
	s := sheetOf(to)
	b := &block{sheet: s}
	b.say("Plugin says", t.Found)
	b.say("Since", s.since(t.Since))
	return b.write(head+": "+t.Help.What, t.Help)
}

// writeUnhealthy says what a volume's plugin says is wrong with it.
func writeUnhealthy(to io.Writer, list []control.Trouble) error {
	var errs []error
	for _, t := range list {
		s := sheetOf(to)
		b := &block{sheet: s}
		b.say("Plugin says", t.Found)
		b.say("Since", s.since(t.Since))
		errs = append(errs, b.write("UNHEALTHY: "+t.Help.What, t.Help))
	}
	return errors.Join(errs...)
}

// wait is one block: the step, who is concerned, what was said, and help.
func (s *sheet) wait(w control.Wait) error {
	b := &block{sheet: s}
	b.say("Alloc", ofJob(string(w.Alloc), w.Job))
	b.say("Step", step(w.Wait))
	b.say("Since", s.since(w.Since))
	switch w.Step {
	case registry.StepClaim:
		b.holders(w)
	case registry.StepTurn:
		b.under(w)
	}
	if w.RPC == "" {
		b.say("Reason", w.Detail)
	} else {
		b.say("Plugin says", said(w.Wait))
	}
	b.say("Tries", s.tried(w.Wait))
	b.plugin(w)
	return b.write("WAITING: "+w.Help.What, w.Help)
}

func ofJob(alloc, job string) string {
	switch {
	case alloc == "":
		return ""
	case job == "":
		return short(alloc)
	}
	return fmt.Sprintf("%s of job %s", short(alloc), job)
}

// step names the step with what it is.
func step(w registry.Wait) string {
	switch {
	case w.RPC != "" && w.Step != "":
		return fmt.Sprintf("%s: %s of %s", w.Step, w.RPC, w.For)
	case w.RPC != "":
		return fmt.Sprintf("%s of %s", w.RPC, w.For)
	case w.Step == registry.StepClaim:
		return "claim: the right to use the volume"
	case w.Step == registry.StepTurn:
		return "turn: one thing at a time happens to a volume"
	case w.For != "":
		return fmt.Sprintf("%s: %s", w.Step, w.For)
	}
	return string(w.Step)
}

func said(w registry.Wait) string {
	switch {
	case w.Code != "":
		return w.Code + ": " + w.Detail
	case w.Detail != "":
		return "no answer: " + w.Detail
	}
	return "nothing yet"
}

// since is a moment, and how long ago it was.
func (s *sheet) since(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return fmt.Sprintf("%s, %s ago", when(t), span(s.now.Sub(t)))
}

// tried says how often, and when again.
func (s *sheet) tried(w registry.Wait) string {
	var parts []string
	if w.Attempt > 0 {
		parts = append(parts, fmt.Sprintf("%d so far", w.Attempt))
	}
	switch ahead := w.Next.Sub(s.now); {
	case w.Next.IsZero() && w.RPC != "" && w.Code+w.Detail != "":
		parts = append(parts, "the next soon")
	case w.Next.IsZero() && w.RPC != "":
		parts = append(parts, "the last has no answer yet")
	case w.Next.IsZero():
	case ahead < time.Second:
		parts = append(parts, "the next now")
	default:
		parts = append(parts, "the next in "+span(ahead))
	}
	return strings.Join(parts, ", ")
}

// block is names and texts below a headline.
type block struct {
	*sheet
	rows [][2]string
}

// say adds a text; an empty name goes on with the one before. Nothing is said of what is empty.
func (b *block) say(name, text string) {
	if text = strings.TrimSpace(clean(text)); text != "" {
		b.rows = append(b.rows, [2]string{name, text})
	}
}

// holders says who has the volume, and what they wait for themselves.
func (b *block) holders(w control.Wait) {
	name := "Held by"
	for _, h := range w.Holders {
		text := fmt.Sprintf("alloc %s, as %s", ofJob(h.Alloc, h.Job), h.Access)
		if h.ReadOnly {
			text += ", read-only"
		}
		if !h.Since.IsZero() {
			text += ", since " + b.since(h.Since)
		}
		b.say(name, text+"; it is "+cmp.Or(h.State, "not this agent's"))
		b.other(w, h.Alloc)
		name = ""
	}
}

// other says what another alloc waits for.
func (b *block) other(w control.Wait, alloc string) {
	for _, o := range w.Others {
		if string(o.Alloc) == alloc {
			b.say("", o.String())
		}
	}
}

// under says what else is under way for the volume.
func (b *block) under(w control.Wait) {
	name := "Under way"
	for _, o := range w.Others {
		if o.Step != registry.StepTurn {
			b.say(name, fmt.Sprintf("for alloc %s: %s, since %s", ofJob(string(o.Alloc), o.Job), o.String(), b.since(o.Since)))
			name = ""
		}
	}
	if name != "" {
		b.say(name, w.For)
	}
	if w.Open != nil && name != "" {
		b.say("", fmt.Sprintf("%s, since %s", w.Open.RPC, b.since(w.Open.Since)))
	}
}

// plugin says what there is of a plugin that is waited for, or that is not healthy.
func (b *block) plugin(w control.Wait) {
	p := w.Plugin
	if p == nil || w.Step == registry.StepClaim || w.Step == registry.StepTurn {
		return
	}
	sick := slices.ContainsFunc(p.Instances, func(i control.Instance) bool { return i.Health != string(registry.Healthy) })
	if w.Step != registry.StepPlugin && !sick && len(p.Instances) > 0 {
		return
	}
	name := "Plugin"
	for _, text := range b.instances(p) {
		b.say(name, text)
		name = ""
	}
	for _, t := range p.Tasks {
		if t.Restart != nil {
			why := strings.TrimSuffix(fmt.Sprintf("%s: %s", t.Restart.Cause, t.Restart.Detail), ": ")
			b.say(name, fmt.Sprintf("task %s of alloc %s: its restart is asked for: %s", t.Task, short(t.Alloc), why))
		} else if len(p.Instances) == 0 {
			b.say(name, fmt.Sprintf("task %s of alloc %s of job %s: %s, attempt %d", t.Task, short(t.Alloc), t.Job, t.Phase, t.Attempt))
		}
		name = ""
	}
}

// instances says how each task of a plugin does; the roles of one task do alike.
func (b *block) instances(p *control.Plugin) (texts []string) {
	roles := map[string]string{}
	for _, i := range p.Instances {
		cause := i.Cause
		if i.Detail != "" {
			cause += ": " + i.Detail
		}
		text := fmt.Sprintf("task %s of alloc %s: %s since %s: %s", i.Task, short(i.Alloc), i.Health, b.since(i.Since), cause)
		if roles[text] == "" {
			texts = append(texts, text)
		} else {
			roles[text] += ", "
		}
		roles[text] += i.Role
	}
	for at, text := range texts {
		texts[at] = roles[text] + ", " + text
	}
	return texts
}

// write writes the headline, what was said, and the help.
func (b *block) write(head string, h control.Help) error {
	b.say("Means", h.Means)
	b.say("By itself", h.Then)
	_, err := fmt.Fprintln(b, "\n"+clean(head))
	label := 0
	for _, r := range b.rows {
		label = max(label, length(r[0]))
	}
	for _, r := range b.rows {
		err = errors.Join(err, b.line(label, r[0], r[1]))
	}
	return errors.Join(err, b.do(label, h.Do))
}

// line is one name and text, wrapped.
func (b *block) line(label int, name, text string) error {
	var errs []error
	for _, part := range wrap(text, b.width-label-2*gap) {
		_, err := fmt.Fprintf(b, "  %-*s  %s\n", label, name, part)
		errs, name = append(errs, err), ""
	}
	return errors.Join(errs...)
}

// do lists what may be typed: beside why, or below it where the sheet is narrow. Commands are never broken.
func (b *block) do(label int, list []control.Do) error {
	why, command := 0, 0
	for _, d := range list {
		why, command = max(why, length(d.Why)+1), max(command, length(d.Command))
	}
	narrow := label+why+command+3*gap > b.width
	name := "To do"
	var errs []error
	for _, d := range list {
		var err error
		if narrow {
			_, err = fmt.Fprintf(b, "  %-*s  %s:\n  %-*s    %s\n", label, name, d.Why, label, "", clean(d.Command))
		} else {
			_, err = fmt.Fprintf(b, "  %-*s  %-*s  %s\n", label, name, why, d.Why+":", clean(d.Command))
		}
		errs, name = append(errs, err), ""
	}
	return errors.Join(errs...)
}
