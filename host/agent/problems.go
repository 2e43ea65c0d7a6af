package agent

import (
	"fmt"
	"strings"

	"holdfast/hooks"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

// Problems are all errors that Check has found in a job.
type Problems struct {
	File string // of the job; may be empty
	List []Problem
}

// Problem is an error in a job.
type Problem struct {
	At  registry.Position // in the text; zero: not known
	Err error
}

// Error returns a line for each problem.
func (p *Problems) Error() string {
	var lines []string
	for _, one := range p.List {
		text := one.Err.Error()
		switch {
		case one.At.Line > 0 && p.File != "":
			text = fmt.Sprintf("%s:%d: %s", p.File, one.At.Line, text)
		case one.At.Line > 0:
			text = fmt.Sprintf("line %d: %s", one.At.Line, text)
		}
		lines = append(lines, text)
	}
	return strings.Join(lines, "\n")
}

// Unwrap returns the errors.
func (p *Problems) Unwrap() (list []error) {
	for _, one := range p.List {
		list = append(list, one.Err)
	}
	return list
}

// add adds a problem of a task. Its position is that of the task's Places entry, or else the beginning of the task.
func (p *Problems) add(t hooks.Task, place string, err error) {
	at, found := t.Places[place]
	if !found {
		at = t.Places[""]
	}
	p.List = append(p.List, Problem{at, fmt.Errorf("task %q: %w", t.Name, err)})
}

// err returns p as an error, or nil if there are no problems.
func (p *Problems) err() error {
	if len(p.List) == 0 {
		return nil
	}
	return p
}

// checkAttributes adds the problems that the attributes of a task have with any driver.
func (p *Problems) checkAttributes(jobType string, g hooks.Group, t hooks.Task) taskSpec {
	s := newTaskSpec(jobType, g, t, p)
	if err := checkVariables(t.Env); err != nil {
		p.add(t, "", fmt.Errorf("env: %w", err))
	}
	for _, meta := range []map[string]string{s.groupMeta, s.meta} {
		if err := checkVariables(metaEnv(meta)); err != nil {
			p.add(t, "", fmt.Errorf("meta: %w", err))
		}
	}
	return s
}

// checkTask adds the problems that the attributes of a task have with its driver.
func (p *Problems) checkTask(s taskSpec, d taskdriver.Driver, tryLimits bool) (warnings []string) {
	t := s.Task
	ignored, err := d.Configure(&taskdriver.Task{Resources: s.resources, TryLimits: tryLimits}, t.Config)
	for _, w := range ignored {
		warnings = append(warnings, fmt.Sprintf("task %q: %s", t.Name, w))
	}
	if err != nil {
		for _, e := range taskdriver.EachError(err) {
			p.add(t, "config", e)
		}
		return warnings
	}
	for i, tpl := range s.templates {
		if f, fixed := tpl.fixedFile(); fixed {
			if _, err := d.Configure(&taskdriver.Task{Files: []taskdriver.File{f}}, t.Config); err != nil {
				p.add(t, templatePlace(i), err)
			}
		}
	}
	return warnings
}

func templatePlace(i int) string { return fmt.Sprintf("template.%d", i) }
