package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/hashicorp/go-hclog"
	"github.com/spf13/cobra"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/host/agent/control"
	"holdfast/host/agent/taskdriver"
	"holdfast/internal/mount"
	"holdfast/registry"
)

// verdict is the result of validate for a file.
type verdict struct {
	File        string           `json:"file"`
	Kind        string           `json:"kind,omitempty"` // "job" or "volume"; empty if the file cannot be read
	Valid       bool             `json:"valid"`
	Error       string           `json:"error,omitempty"` // an error without a position in the file
	Diagnostics host.Diagnostics `json:"diagnostics"`
	Warnings    []string         `json:"warnings,omitempty"` // of the agent: attributes of a job that have no effect
}

func newValidate(p *program) *cobra.Command {
	v, a := &variables{}, &agentFlags{}
	c := &cobra.Command{
		Use: "validate FILE...", Short: "Check job and volume files",
		Long: `Check job and volume files (- is standard input). Variables may be left without
a value. No agent is needed. The exit code is 1 if a file is invalid.`,
		RunE: func(c *cobra.Command, args []string) error {
			files, err := v.readFiles(args) // not in repeatable: a signal ends the command even if the read waits
			if err != nil {
				return err
			}
			return repeatable(func(ctx context.Context, _ *cobra.Command, _ []string) error {
				verdicts, err := validate(ctx, a, files, p.logger("error"))
				if err != nil {
					return err
				}
				return writeVerdicts(p, verdicts)
			})(c, args)
		},
	}
	v.flags(c)
	c.Flags().StringVar(&a.shim, "shim", "", "shim binary (default holdfast-shim beside this program or in PATH)")
	return c
}

// validate starts a shim with an empty state and parses the files.
func validate(ctx context.Context, a *agentFlags, files []file, log hclog.Logger) (out []verdict, err error) {
	binary, err := findShim(a.shim)
	if err != nil {
		return nil, err
	}
	drivers, err := a.drivers()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "holdfast-")
	if err != nil {
		return nil, err
	}
	dir = realPath(dir)
	h, err := host.Open(ctx, host.Config{StateDir: dir, RunDir: dir + "/run", Shim: binary, File: readForJob,
		Logger: log})
	if err == nil {
		for _, f := range files {
			out = append(out, validateFile(ctx, h, drivers, f))
		}
		err = errors.Join(context.Cause(ctx), h.Close())
	}
	err = errors.Join(err, removeSelfMounts(hooks.Layout{State: dir, Run: dir + "/run"}))
	return out, errors.Join(err, mount.RemoveTree(dir))
}

func validateFile(ctx context.Context, h *host.Host, drivers []taskdriver.Driver, f file) verdict {
	if f.err != nil {
		return verdict{File: f.Name, Error: f.err.Error(), Diagnostics: host.Diagnostics{}}
	}
	src := host.Source{Name: f.Name, Text: f.Text}
	o := control.ParseOptions(f.Source)
	o.Validate = true
	v := verdict{File: f.Name, Kind: "job"}
	var err error
	if f.volume {
		v.Kind = "volume"
		_, v.Diagnostics, err = h.ParseVolume(ctx, src, o)
	} else {
		var job *hooks.Job
		job, v.Diagnostics, err = h.Parse(ctx, src, o)
		if err == nil {
			v.Warnings, err = agent.Check(job, drivers, false)
		}
		if hasUnset(job) {
			err = v.Diagnostics.Err() // the agent's error may come from a value that is still unknown
		}
		v.addProblems(err)
	}
	v.Valid = err == nil
	if err != nil && v.Diagnostics.Err() == nil {
		v.Error = err.Error()
	}
	if v.Diagnostics == nil {
		v.Diagnostics = host.Diagnostics{}
	}
	return v
}

// addProblems adds the problems that the agent has found. A problem without a position is put at the start of the file.
func (v *verdict) addProblems(err error) {
	found, is := errors.AsType[*agent.Problems](err)
	if !is {
		return
	}
	for _, p := range found.List {
		at := p.At
		if at.Line == 0 {
			at = registry.Position{Line: 1, Column: 1}
		}
		v.Diagnostics = append(v.Diagnostics, host.Diagnostic{Severity: registry.SeverityError, Summary: p.Err.Error(),
			File: v.File, Start: at, End: at})
	}
}

// hasUnset reports whether the job may depend on a variable without a value. Such a variable becomes null.
func hasUnset(job *hooks.Job) bool {
	if job == nil {
		return false
	}
	parts := []json.RawMessage{job.Rest}
	for _, g := range job.Groups {
		parts = append(parts, g.Rest)
		for _, t := range g.Tasks {
			parts = append(parts, t.Config, t.Rest)
		}
	}
	return slices.ContainsFunc(parts, hasNull)
}

// hasNull reports whether a JSON text has the value null.
func hasNull(text json.RawMessage) bool {
	for d := json.NewDecoder(bytes.NewReader(text)); ; {
		token, err := d.Token()
		if token == nil || err != nil { // the token of null is nil
			return err == nil
		}
	}
}

func writeVerdicts(p *program, verdicts []verdict) error {
	var invalid error
	if slices.ContainsFunc(verdicts, func(v verdict) bool { return !v.Valid }) {
		invalid = errReported
	}
	if p.json {
		return errors.Join(writeJSON(p.out, verdicts), invalid)
	}
	for _, v := range verdicts {
		for _, d := range v.Diagnostics {
			fmt.Fprintln(p.out, d)
		}
		for _, w := range v.Warnings {
			fmt.Fprintf(p.out, "%s: warning: %s\n", v.File, w)
		}
		switch {
		case v.Error != "" && v.Kind == "":
			fmt.Fprintln(p.out, v.Error) // the error names the file
		case v.Error != "":
			fmt.Fprintf(p.out, "%s: %s\n", v.File, v.Error)
		case v.Valid:
			fmt.Fprintf(p.out, "%s: valid %s file\n", v.File, v.Kind)
		}
	}
	return invalid
}
