package agent

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"holdfast/hooks"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

// jobRest, groupRest and taskRest have the supported attributes of a job, group or task, as decoded from Rest.
type jobRest struct {
	Name string                         `json:"name"`
	Meta []map[string]taskdriver.Scalar `json:"meta"`
}

type groupRest struct {
	Restart []restartBlock                 `json:"restart"`
	Meta    []map[string]taskdriver.Scalar `json:"meta"`
}

type taskRest struct {
	Restart     []restartBlock                 `json:"restart"`
	Meta        []map[string]taskdriver.Scalar `json:"meta"`
	User        string                         `json:"user"`
	KillTimeout duration                       `json:"kill_timeout"`
	Leader      bool                           `json:"leader"`
	Template    []templateBlock                `json:"template"`
	Lifecycle   []struct {
		Hook    string `json:"hook"`
		Sidecar bool   `json:"sidecar"`
	} `json:"lifecycle"`
	Logs []struct {
		Files *number `json:"max_files"`
		Size  *number `json:"max_file_size"` // in MiB
	} `json:"logs"` // for each of the two streams
	Resources []struct {
		CPU       *number `json:"cpu"` // MHz
		Cores     *number `json:"cores"`
		Memory    *number `json:"memory"` // MiB
		MemoryMax *number `json:"memory_max"`
	} `json:"resources"`
}

// restartBlock is a restart block of a group or task.
type restartBlock struct {
	Attempts *number      `json:"attempts"`
	Interval *duration    `json:"interval"`
	Delay    *duration    `json:"delay"`
	Mode     *restartMode `json:"mode"`
}

// number is a JSON number, or a string that holds one, because HCL converts freely.
type number int

func (n *number) UnmarshalJSON(b []byte) error {
	var s json.Number
	if err := json.Unmarshal(b, &s); err != nil {
		return err
	}
	i, err := s.Int64()
	*n = number(i)
	return err
}

// duration is a string such as "30s", or a number of nanoseconds.
type duration time.Duration

func (d *duration) UnmarshalJSON(b []byte) error {
	var v any
	if err := json.Unmarshal(b, &v); err != nil {
		return err
	}
	if ns, ok := v.(float64); ok {
		*d = duration(ns)
		return nil
	}
	text, _ := v.(string)
	t, err := time.ParseDuration(text)
	if err != nil {
		return registry.Invalid("%s is not a duration; write it as in \"30s\"", b)
	}
	*d = duration(t)
	return nil
}

// taskSpec is a task with its decoded attributes.
type taskSpec struct {
	hooks.Task
	user      string
	grace     time.Duration
	policy    restartPolicy
	leader    bool
	prestart  bool // starts before the others, which wait for its end unless it is a sidecar
	sidecar   bool // is stopped when the others have ended
	groupMeta map[string]string
	meta      map[string]string
	logFiles  int   // 0: the driver's default
	logSize   int64 // 0: the driver's default
	resources taskdriver.Resources
	templates []fileTemplate
}

// newTaskSpec decodes a task's attributes. It adds what is wrong with them to p.
func newTaskSpec(jobType string, g hooks.Group, t hooks.Task, p *Problems) taskSpec {
	s := taskSpec{Task: t}
	var rest taskRest
	if err := s.decode(jobType, g, &rest); err != nil {
		p.add(t, "", err)
	}
	for i, b := range rest.Template {
		tpl, err := newTemplate(b)
		if err != nil {
			p.add(t, templatePlace(i), err)
			tpl = fileTemplate{}
		}
		s.templates = append(s.templates, tpl)
	}
	return s
}

// decode sets all attributes but the templates, which rest gets. Its errors do not name the task.
func (s *taskSpec) decode(jobType string, g hooks.Group, rest *taskRest) error {
	var group groupRest
	err := taskdriver.Decode("group "+g.Name, g.Rest, &group)
	if err == nil {
		err = taskdriver.Decode("attributes", s.Rest, rest)
	}
	if err == nil {
		s.policy, err = defaultPolicy(jobType).with(slices.Concat(group.Restart, rest.Restart))
	}
	if err != nil {
		return err
	}
	s.groupMeta, s.meta = mergeMeta(group.Meta), mergeMeta(rest.Meta)
	s.user, s.grace, s.leader = rest.User, time.Duration(rest.KillTimeout), rest.Leader
	if s.grace <= 0 {
		s.grace = taskdriver.DefaultKillGrace
	}
	for _, l := range rest.Lifecycle {
		if l.Hook != "prestart" && l.Hook != "poststart" {
			return registry.Errorf(registry.ErrUnsupported,
				"unsupported lifecycle hook %q; use prestart or poststart", l.Hook)
		}
		s.prestart, s.sidecar = s.prestart || l.Hook == "prestart", l.Sidecar
	}
	for _, l := range rest.Logs {
		if l.Files != nil && *l.Files < 1 || l.Size != nil && (*l.Size < 1 || *l.Size > 1<<20) {
			return registry.Invalid("logs: max_files must be at least 1, and max_file_size 1 to %d MiB", 1<<20)
		}
		if l.Files != nil {
			s.logFiles = int(*l.Files)
		}
		if l.Size != nil {
			s.logSize = int64(*l.Size) << 20
		}
	}
	s.resources, err = rest.limits()
	return err
}

// limits returns the limits of the resources block.
func (r taskRest) limits() (l taskdriver.Resources, err error) {
	for _, b := range r.Resources {
		for _, v := range []struct {
			name  string
			value *number
			to    *int64
		}{
			{"cpu", b.CPU, &l.CPU}, {"cores", b.Cores, &l.Cores}, {"memory", b.Memory, &l.Memory},
			{"memory_max", b.MemoryMax, &l.MemoryMax},
		} {
			if v.value == nil {
				continue
			}
			if *v.value < 1 || *v.value > 1<<30 {
				return l, registry.Invalid("resources: %s = %d: use 1 to %d", v.name, *v.value, 1<<30)
			}
			*v.to = int64(*v.value)
		}
	}
	return l, l.Check()
}

func mergeMeta(blocks []map[string]taskdriver.Scalar) map[string]string {
	out := map[string]string{}
	for _, b := range blocks {
		for name, v := range b {
			out[name] = string(v)
		}
	}
	return out
}

// A job with a block of unsupportedNames is refused, because it could not do its work. A job with a block of
// ignoredNames runs, with a warning.
var (
	unsupportedNames = []string{
		"periodic", "parameterized", "multiregion", "artifact", "vault", "dispatch_payload", "secret", "schedule",
	}
	ignoredNames = []string{
		"constraint", "affinity", "spread", "network", "service", "update", "migrate", "reschedule", "scaling",
		"consul", "identity", "ephemeral_disk", "disconnect", "kill_signal", "shutdown_delay", "volume",
	}
)

// unsupportedBlocks returns a warning for each ignored block of the job, and a problem for each unsupported one.
func unsupportedBlocks(j *hooks.Job) (warnings []string, problems *Problems) {
	found := map[string]bool{}
	problems = &Problems{}
	check := func(where string, at registry.Position, rest json.RawMessage) {
		var blocks map[string]json.RawMessage
		if err := taskdriver.Decode(where, rest, &blocks); err != nil {
			problems.List = append(problems.List, Problem{at, err})
		}
		for _, name := range unsupportedNames {
			if _, has := blocks[name]; has {
				err := registry.Errorf(registry.ErrUnsupported, "%s: unsupported block %s; remove it", where, name)
				problems.List = append(problems.List, Problem{at, err})
			}
		}
		for _, name := range ignoredNames {
			if _, has := blocks[name]; has {
				found[name] = true
			}
		}
		for _, name := range ignoredOfTemplates(blocks["template"]) {
			found[name] = true
		}
	}
	check("job "+j.ID, registry.Position{}, j.Rest)
	for _, g := range j.Groups {
		check("group "+g.Name, registry.Position{}, g.Rest)
		for _, t := range g.Tasks {
			check("task "+string(t.Name), t.Places[""], t.Rest)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(found)) {
		warnings = append(warnings, fmt.Sprintf("unsupported attribute %s is ignored", name))
	}
	return warnings, problems
}

// restartPolicy decides whether and when a task that ended is restarted: Attempts times within Interval, each time
// after Delay. After that, mode fail gives up, and mode delay waits for the end of the interval.
type restartPolicy struct {
	Attempts int
	Interval time.Duration
	Delay    time.Duration
	Mode     restartMode
}

// restartMode says what happens when the attempts are used up.
type restartMode string

const (
	modeFail  restartMode = "fail"
	modeDelay restartMode = "delay"
)

// Restarts counts restarts within an interval.
type Restarts struct {
	Since time.Time `json:"since,omitzero"` // start of the interval
	Count int       `json:"count,omitempty"`
	Total int       `json:"total,omitempty"` // in all intervals
}

// defaultPolicy returns the default restart policy of Nomad for the type of job.
func defaultPolicy(jobType string) restartPolicy {
	if isBatch(jobType) {
		return restartPolicy{Attempts: 3, Interval: 24 * time.Hour, Delay: 15 * time.Second, Mode: modeFail}
	}
	return restartPolicy{Attempts: 2, Interval: 30 * time.Minute, Delay: 15 * time.Second, Mode: modeFail}
}

// with returns the policy, changed by the attributes that the blocks set.
func (p restartPolicy) with(blocks []restartBlock) (restartPolicy, error) {
	for _, b := range blocks {
		if b.Attempts != nil {
			p.Attempts = int(*b.Attempts)
		}
		if b.Interval != nil {
			p.Interval = time.Duration(*b.Interval)
		}
		if b.Delay != nil {
			p.Delay = time.Duration(*b.Delay)
		}
		if b.Mode != nil {
			p.Mode = *b.Mode
		}
	}
	switch {
	case p.Mode != modeFail && p.Mode != modeDelay:
		return p, registry.Invalid("unknown restart mode %q; use %q or %q", p.Mode, modeFail, modeDelay)
	case p.Attempts < 0 || p.Interval < 0 || p.Delay < 0:
		return p, registry.Invalid("restart: attempts, interval and delay must not be negative")
	}
	return p, nil
}

// next decides what follows an attempt that has failed. If again is false, why is the reason.
func (p restartPolicy) next(r Restarts, now time.Time) (after Restarts, delay time.Duration, again bool, why string) {
	if r.Since.IsZero() || now.Before(r.Since) || now.Sub(r.Since) >= p.Interval {
		r.Since, r.Count = now, 0
	}
	switch {
	case r.Count < p.Attempts:
		r.Count, r.Total = r.Count+1, r.Total+1
		return r, p.Delay, true, ""
	case p.Mode == modeDelay && p.Attempts > 0:
		left := r.Since.Add(p.Interval).Sub(now) // of the interval
		r.Since, r.Count, r.Total = now.Add(left), 1, r.Total+1
		return r, max(left, p.Delay), true, ""
	case p.Attempts == 0:
		return r, 0, false, "the restart policy allows no restart"
	}
	return r, 0, false, fmt.Sprintf("the restart policy allows %d restarts within %v", p.Attempts, p.Interval)
}
