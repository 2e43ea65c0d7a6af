package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"holdfast/hooks"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

// jobRest, groupRest and taskRest are what the agent reads of the parts of a job that travel as JSON.
type jobRest struct {
	Name string             `json:"name"`
	Meta []map[string]value `json:"meta"`
}

type groupRest struct {
	Restart []restartBlock     `json:"restart"`
	Meta    []map[string]value `json:"meta"`
}

type taskRest struct {
	Restart     []restartBlock     `json:"restart"`
	Meta        []map[string]value `json:"meta"`
	User        string             `json:"user"`
	KillTimeout duration           `json:"kill_timeout"`
	Leader      bool               `json:"leader"`
	Lifecycle   []lifecycle        `json:"lifecycle"`
	Logs        []logsBlock        `json:"logs"`
}

// logsBlock bounds what is kept of each of a task's two streams.
type logsBlock struct {
	Files *number `json:"max_files"`
	Size  *number `json:"max_file_size"` // in MiB
}

// lifecycle says when in an alloc's life a task runs.
type lifecycle struct {
	Hook    string `json:"hook"`
	Sidecar bool   `json:"sidecar"`
}

// taskConfig is the config block of the drivers that there are.
type taskConfig struct {
	Command string  `json:"command"`
	Args    []value `json:"args"`
	WorkDir string  `json:"work_dir"`
}

// value is a scalar as text.
type value string

func (v *value) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err == nil {
		*v = value(s)
		return nil
	}
	if text := string(b); !strings.ContainsAny(text[:1], "{[") && text != "null" {
		*v = value(text)
		return nil
	}
	return registry.Invalid("%s is no text", b)
}

// taskSpec is a task as the agent runs it.
type taskSpec struct {
	hooks.Task
	config    taskConfig
	user      string
	grace     time.Duration
	policy    Policy
	leader    bool
	prestart  bool // runs, or if it is a sidecar starts, before the others
	sidecar   bool // ends with the others
	groupMeta map[string]string
	meta      map[string]string
	logFiles  int   // 0: the driver's default
	logSize   int64 // the same
}

// readTask reads what the agent acts on. The record is only asked for the job and the group.
func readTask(jobType string, g hooks.Group, t hooks.Task) (taskSpec, error) {
	s := taskSpec{Task: t}
	var group groupRest
	var rest taskRest
	err := readJSON("group "+g.Name, g.Rest, &group)
	if err == nil {
		err = readJSON("task "+string(t.Name), t.Rest, &rest)
	}
	if err == nil {
		err = readJSON(fmt.Sprintf("task %q: config", t.Name), t.Config, &s.config)
	}
	if err == nil {
		s.policy, err = defaultPolicy(jobType).with(slices.Concat(group.Restart, rest.Restart))
	}
	if err != nil {
		return s, err
	}
	s.groupMeta, s.meta = merged(group.Meta), merged(rest.Meta)
	s.user, s.grace, s.leader = rest.User, time.Duration(rest.KillTimeout), rest.Leader
	if s.grace <= 0 {
		s.grace = taskdriver.DefaultKillGrace
	}
	for _, l := range rest.Lifecycle {
		switch l.Hook {
		case "prestart":
			s.prestart = true
		case "poststart":
		default:
			return s, registry.Errorf(registry.ErrUnsupported, "task %q: lifecycle hook %q is not supported; prestart and poststart are", t.Name, l.Hook)
		}
		s.sidecar = l.Sidecar
	}
	for _, l := range rest.Logs {
		if l.Files != nil && *l.Files < 1 || l.Size != nil && (*l.Size < 1 || *l.Size > 1<<20) {
			return s, registry.Invalid("task %q: logs: max_files is 1 or more, and max_file_size, in MiB, 1 to %d", t.Name, 1<<20)
		}
		if l.Files != nil {
			s.logFiles = int(*l.Files)
		}
		if l.Size != nil {
			s.logSize = int64(*l.Size) << 20
		}
	}
	if s.config.Command == "" {
		return s, registry.Invalid("task %q: config has no command; the drivers of this agent need config { command = ... }", t.Name)
	}
	return s, nil
}

func readJSON(what string, text json.RawMessage, into any) error {
	if len(text) == 0 {
		return nil
	}
	err := json.Unmarshal(text, into)
	if e, is := errors.AsType[*json.UnmarshalTypeError](err); is {
		want := "a text"
		if e.Type.Kind() == reflect.Slice {
			want = "a list, [ ... ]"
		}
		return registry.Invalid("%s: %s cannot be a JSON %s; write %s", what, e.Field, e.Value, want)
	}
	if err != nil {
		return registry.Invalid("%s: %w", what, err)
	}
	return nil
}

func merged(blocks []map[string]value) map[string]string {
	out := map[string]string{}
	for _, b := range blocks {
		for name, v := range b {
			out[name] = string(v)
		}
	}
	return out
}

// refused are blocks without which a job would not do what it is written for; ignored ones lose something that people should know of.
var (
	refused = []string{"periodic", "parameterized", "multiregion", "artifact", "template", "vault", "dispatch_payload", "secret", "schedule"}
	ignored = []string{
		"constraint", "affinity", "spread", "network", "service", "resources", "update", "migrate", "reschedule", "scaling", "consul", "identity",
		"ephemeral_disk", "disconnect", "kill_signal", "shutdown_delay", "volume",
	}
)

// unheeded lists what of the job the agent does not act on; it refuses what the job cannot do without.
func unheeded(j *hooks.Job) (warnings []string, err error) {
	found := map[string]bool{}
	level := func(where string, rest json.RawMessage) error {
		var blocks map[string]json.RawMessage
		if err := readJSON(where, rest, &blocks); err != nil {
			return err
		}
		for _, name := range refused {
			if _, has := blocks[name]; has {
				return registry.Errorf(registry.ErrUnsupported, "%s: this orchestrator cannot do %s; remove the block", where, name)
			}
		}
		for _, name := range ignored {
			if _, has := blocks[name]; has {
				found[name] = true
			}
		}
		return nil
	}
	if err := level("job "+j.ID, j.Rest); err != nil {
		return nil, err
	}
	for _, g := range j.Groups {
		if err := level("group "+g.Name, g.Rest); err != nil {
			return nil, err
		}
		for _, t := range g.Tasks {
			if err := level("task "+string(t.Name), t.Rest); err != nil {
				return nil, err
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(found)) {
		warnings = append(warnings, fmt.Sprintf("%s is not acted on by this orchestrator", name))
	}
	return warnings, nil
}
