package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/host/agent/control"
	"holdfast/registry"
)

// inspectError means that the inspection or repair itself failed.
type inspectError struct{ error }

func (e inspectError) Unwrap() error { return e.error }

func newDoctor(p *program) *cobra.Command {
	repair, shim := false, ""
	c := &cobra.Command{
		Use: "doctor", Short: "Find and repair inconsistencies",
		Long: `Compare the records with the mount table, the directories, and the volume lists
of plugins. Without a running agent the shim binary inspects the state, and no
plugin is called. --repair carries out exactly the repairs that are printed. A
mount in use is never unmounted.

Exit codes:
  0  no inconsistencies found
  1  inconsistencies found
  2  usage error
  3  no agent answers at --address, and its state directory is in use by
     another process or not given; or this user may not use the socket
  4  inspection or repair failed
  5  no inconsistencies found, but the inspection is incomplete: see the
     "unseen" findings, or "unexamined" with --json

Parts that the configuration excludes (list_volumes = false) are "skipped",
which does not make the inspection incomplete.`,
		RunE: repeatable(func(ctx context.Context, _ *cobra.Command, _ []string) error {
			d, err := openDoctor(ctx, p, shim)
			if err != nil {
				return inspectError{err}
			}
			return d.run(ctx, p, repair)
		}),
	}
	c.Flags().BoolVar(&repair, "repair", false, "carry out the repairs that are printed")
	c.Flags().StringVar(&shim, "shim", "",
		"shim binary to use if no agent is running (default holdfast-shim beside this program or in PATH)")
	return c
}

// doctor inspects and repairs through an agent or a shim binary.
type doctor struct {
	call func(context.Context, control.DoctorRequest) (host.Diagnosis, error)
	name string // of the agent or binary, for the output
	// limit says how long plugins may take, for the progress messages; empty: no plugin is asked
	limit string
}

// openDoctor returns the doctor of the agent. If no agent runs with this state directory, it returns that of the shim
// binary.
func openDoctor(ctx context.Context, p *program, shim string) (doctor, error) {
	client, state := p.client(), p.stateDir()
	self, err := client.Self(ctx)
	switch {
	case err == nil && (p.state == "" || self.StateDir == state):
		return doctor{client.Doctor, "the agent at " + self.StateDir, "; plugins have 20s to list their volumes"}, nil
	case err == nil: // the agent has another state directory
	case !errors.Is(err, control.ErrNoAgent), errors.Is(err, os.ErrPermission):
		return doctor{}, err
	case p.address != "" && p.state == "": // the state directory is not known
		return doctor{}, err
	case p.address != "":
		if _, running := host.LockHolder(state); running { // the address is wrong
			return doctor{}, err
		}
	}
	binary, err := findShim(shim)
	if err != nil {
		return doctor{}, fmt.Errorf("no agent answers at %s, and the shim is needed to inspect %s: %w",
			p.socket(), state, err)
	}
	call := func(ctx context.Context, r control.DoctorRequest) (host.Diagnosis, error) {
		found, err := runShimDoctor(ctx, binary.Path, state, p.findRunDir(state, exists), r)
		if f, wrong := agent.ExamineLedger(state); err == nil && wrong {
			found.Findings = append([]host.Finding{f}, found.Findings...)
		}
		return found, err
	}
	return doctor{call, fmt.Sprintf("%s, in %s (no agent answers at %s)", binary.Path, state, p.socket()), ""}, nil
}

// runShimDoctor runs the shim binary as a doctor.
func runShimDoctor(ctx context.Context, shim, state, sockets string, r control.DoctorRequest) (
	found host.Diagnosis, err error) {
	args := []string{"-doctor", "-json", "-state", state, "-run", sockets}
	if r.Repair {
		args = append(args, "-repair", "-digest", r.Digest)
	}
	cmd, explain := shimCommand(ctx, shim, args)
	out, err := cmd.Output()
	exit, is := errors.AsType[*exec.ExitError](err)
	if err != nil && !(is && exit.ExitCode() == exitFailed) { // exitFailed means that there are findings
		return found, explain(err)
	}
	if err := json.Unmarshal(out, &found); err != nil {
		return found, fmt.Errorf("%s is not a shim: %w; set --shim", shim, err)
	}
	return found, nil
}

// run inspects, then repairs if repair is set, and prints the results. The error determines the exit code.
func (d doctor) run(ctx context.Context, p *program, repair bool) error {
	found, err := d.await(ctx, p, control.DoctorRequest{})
	if err != nil {
		return inspectError{err}
	}
	if !p.json {
		writeDiagnosis(p.out, d.name, found)
	}
	if repair && found.Digest != "" {
		if found, err = d.await(ctx, p, control.DoctorRequest{Repair: true, Digest: found.Digest}); err != nil {
			return inspectError{fmt.Errorf("repair: %w", err)}
		}
		if !p.json {
			writeRepair(p.out, found)
		}
	}
	if p.json {
		if err := writeJSON(p.out, jsonDiagnosis(found)); err != nil {
			return inspectError{err}
		}
	}
	switch {
	case !found.Clean():
		return errReported
	case len(found.Unexamined()) > 0:
		return errIncomplete
	}
	return nil
}

// jsonDiagnosis returns a diagnosis in the form that --json prints. Empty lists become [].
func jsonDiagnosis(d host.Diagnosis) any {
	unexamined := []string{}
	for _, f := range d.Unexamined() {
		unexamined = append(unexamined, f.Detail)
	}
	d.Findings = append([]host.Finding{}, d.Findings...)
	return struct {
		host.Diagnosis
		Unexamined []string `json:"unexamined"`
	}{d, unexamined}
}

// reportInterval is the interval between progress messages.
const reportInterval = 5 * time.Second

// await makes the call. Meanwhile it prints every few seconds what is still running.
func (d doctor) await(ctx context.Context, p *program, r control.DoctorRequest) (host.Diagnosis, error) {
	started, running := time.Now(), "inspecting"
	if r.Repair {
		running = "repairing"
	}
	stop := every(ctx, reportInterval, func(context.Context) {
		took := time.Since(started).Round(time.Second)
		if p.json {
			writeJSONLine(p.errs, waitLine{running + d.limit, took.Seconds()})
			return
		}
		fmt.Fprintf(p.errs, "still %s after %v%s\n", running, took, d.limit)
	})
	defer stop()
	return d.call(ctx, r)
}

// repairs describes the actions of a repair.
var repairs = map[registry.FindingAction]string{
	registry.ActNothing: "none",
	registry.ActMark:    "mark the record as uncertain; Holdfast repeats or undoes the call",
	registry.ActAdopt:   "record it; the plugin unstages and detaches it",
	registry.ActUndo:    "unstage and detach it through its plugin",
	registry.ActUnmount: "unmount it if it is unused",
	registry.ActRemove:  "remove the directory",
}

func repairText(a registry.FindingAction) string {
	if text, known := repairs[a]; known {
		return text
	}
	return string(a) // an action of a newer shim
}

// writeDiagnosis writes a block for each finding.
func writeDiagnosis(to io.Writer, from string, d host.Diagnosis) {
	fmt.Fprintf(to, "inspected by: %s\n", clean(from))
	if len(d.Findings) == 0 {
		fmt.Fprintln(to, "no inconsistencies found")
		return
	}
	for _, f := range d.Findings {
		fmt.Fprintf(to, "\n%s\n", clean(strings.TrimSpace(string(f.Kind)+"  "+placeText(f))))
		for _, line := range [][2]string{{"found", f.Detail}, {"volume", volumeText(f)}, {"alloc", allocText(f)},
			{"repair", repairText(f.Action)}, {"advice", f.Advice}} {
			if line[1] != "" {
				fmt.Fprintf(to, "  %-7s %s\n", line[0], clean(line[1]))
			}
		}
	}
	fmt.Fprintln(to)
	switch {
	case d.CleanAndComplete():
		fmt.Fprintln(to, "no inconsistencies found")
		return
	case d.Clean():
		fmt.Fprintln(to, "inspection incomplete: no inconsistencies in the inspected parts")
	}
	if d.Digest == "" {
		fmt.Fprintln(to, "no automatic repair available")
		return
	}
	fmt.Fprintln(to, "to repair: holdfast doctor --repair")
}

// placeText returns the path or the volume of a finding.
func placeText(f host.Finding) string {
	switch {
	case f.Path != "":
		return f.Path
	case f.Name.ID != "":
		return "volume " + f.Name.String()
	case f.Volume.External != "":
		return "volume " + f.Volume.String()
	}
	return ""
}

// volumeText names the volume of a finding.
func volumeText(f host.Finding) string {
	switch {
	case f.Name.ID != "":
		return fmt.Sprintf("%s (plugin %s, external ID %s)", f.Name, f.Volume.Plugin, f.Volume.External)
	case f.Volume.External != "":
		return fmt.Sprintf("unknown (plugin %s, external ID %s)", f.Volume.Plugin, f.Volume.External)
	}
	return ""
}

// allocText names the alloc of a finding, and its request.
func allocText(f host.Finding) string {
	if f.Alloc == "" {
		return ""
	}
	return fmt.Sprintf("%s (request %q)", f.Alloc, f.Request)
}

// writeRepair writes the result of each repair, one per line.
func writeRepair(to io.Writer, d host.Diagnosis) {
	fmt.Fprintln(to, "\nresults:")
	t := newTable("FINDING", "ACTION", "WHERE", "RESULT")
	for _, f := range d.Findings {
		if f.Action == registry.ActNothing {
			continue
		}
		t.add(f.Kind, f.Action, placeText(f), f.Result)
	}
	_ = t.write(to, "nothing")
	switch {
	case d.CleanAndComplete():
		fmt.Fprintln(to, "all inconsistencies repaired")
	case d.Clean():
		fmt.Fprintln(to, "inspection incomplete: all inconsistencies in the inspected parts repaired")
	default:
		fmt.Fprintln(to, "some inconsistencies remain; run holdfast doctor again")
	}
}
