package agent

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
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
	KillTimeout json.RawMessage                `json:"kill_timeout"`
	Leader      bool                           `json:"leader"`
	Template    []templateBlock                `json:"template"`
	Lifecycle   []struct {
		Hook    string `json:"hook"`
		Sidecar bool   `json:"sidecar"`
	} `json:"lifecycle"`
	Logs []struct {
		Files json.RawMessage `json:"max_files"`
		Size  json.RawMessage `json:"max_file_size"` // in MiB
	} `json:"logs"` // for each of the two streams
	Resources []struct {
		CPU       json.RawMessage `json:"cpu"` // MHz
		Cores     json.RawMessage `json:"cores"`
		Memory    json.RawMessage `json:"memory"` // MiB
		MemoryMax json.RawMessage `json:"memory_max"`
	} `json:"resources"`
}

// restartBlock is a restart block of a group or task.
type restartBlock struct {
	Attempts json.RawMessage `json:"attempts"`
	Interval json.RawMessage `json:"interval"`
	Delay    json.RawMessage `json:"delay"`
	Mode     *restartMode    `json:"mode"`
}

// maxNumber is the largest number of an attribute.
const maxNumber = 1 << 30

// attributes reads attributes as JSON, and collects the errors. HCL converts freely, so a number may be a string.
type attributes struct{ errs []error }

// add adds an error, unless it is nil.
func (a *attributes) add(err error) {
	if err != nil {
		a.errs = append(a.errs, taskdriver.EachError(err)...)
	}
}

// number returns a whole number of at least least, or unset if text is empty or null.
func (a *attributes) number(name string, text json.RawMessage, unset, least int64) int64 {
	var s json.Number
	err := json.Unmarshal(text, &s)
	if err == nil && s == "" || len(text) == 0 {
		return unset
	}
	n, parseErr := s.Int64()
	if err != nil || parseErr != nil || n < least || n > maxNumber {
		a.add(registry.Invalid("%s = %s: use a whole number from %d to %d", name, text, least, maxNumber))
		return unset
	}
	return n
}

// duration returns a duration such as "30s" or a number of nanoseconds, or unset if text is empty or null.
func (a *attributes) duration(name string, text json.RawMessage, unset time.Duration) time.Duration {
	var v any
	if len(text) == 0 || json.Unmarshal(text, &v) != nil || v == nil {
		return unset
	}
	var d time.Duration
	var err error
	if s, is := v.(string); is {
		d, err = time.ParseDuration(s)
	} else {
		err = json.Unmarshal(text, &d)
	}
	if err != nil || d < 0 {
		a.add(registry.Invalid("%s = %s: write a duration as in \"30s\", from \"0s\" to \"%.0fh\"", name, text,
			time.Duration(math.MaxInt64).Truncate(time.Hour).Hours()))
		return unset
	}
	return d
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
	ends      bool // is expected to end: a task of a batch job, or a lifecycle task. A sidecar is not
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
	for _, err := range s.decode(jobType, g, &rest) {
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
func (s *taskSpec) decode(jobType string, g hooks.Group, rest *taskRest) []error {
	var a attributes
	var group groupRest
	a.add(taskdriver.Decode("group "+g.Name, g.Rest, &group))
	a.add(taskdriver.Decode("attributes", s.Rest, rest))
	s.policy = defaultPolicy(jobType).with(slices.Concat(group.Restart, rest.Restart), &a)
	s.groupMeta, s.meta = mergeMeta(group.Meta), mergeMeta(rest.Meta)
	s.user, s.leader = rest.User, rest.Leader
	s.grace = a.duration("kill_timeout", rest.KillTimeout, taskdriver.DefaultKillGrace)
	s.ends = isBatch(jobType)
	for _, l := range rest.Lifecycle {
		if l.Hook != "prestart" && l.Hook != "poststart" {
			a.add(registry.Errorf(registry.ErrUnsupported,
				"unsupported lifecycle hook %q; use prestart or poststart", l.Hook))
		}
		s.prestart, s.sidecar, s.ends = s.prestart || l.Hook == "prestart", l.Sidecar, !l.Sidecar
	}
	for _, l := range rest.Logs {
		s.logFiles = int(a.number("logs: max_files", l.Files, int64(s.logFiles), 1))
		s.logSize = a.number("logs: max_file_size", l.Size, s.logSize>>20, 1) << 20
	}
	for _, b := range rest.Resources {
		l := &s.resources
		l.CPU = a.number("resources: cpu", b.CPU, l.CPU, 1)
		l.Cores = a.number("resources: cores", b.Cores, l.Cores, 1)
		l.Memory = a.number("resources: memory", b.Memory, l.Memory, 1)
		l.MemoryMax = a.number("resources: memory_max", b.MemoryMax, l.MemoryMax, 1)
	}
	a.add(s.resources.Check())
	return a.errs
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

// unsupportedBlocks returns a warning for each ignored block of the job, also for each ignored attribute of a block of
// taskRest, and a problem for each unsupported one.
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
		for _, name := range taskdriver.Unknown[taskRest]("", rest) {
			if strings.Contains(name, ".") || slices.Contains(ignoredNames, name) {
				found[name] = true
			}
		}
	}
	check("job "+j.ID, registry.Position{}, j.Rest)
	var rest jobRest
	err := taskdriver.Decode("job "+j.ID, j.Rest, &rest)
	if err == nil {
		err = checkVariables(metaEnv(mergeMeta(rest.Meta)))
	}
	if err != nil {
		problems.List = append(problems.List, Problem{Err: err})
	}
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
func (p restartPolicy) with(blocks []restartBlock, a *attributes) restartPolicy {
	for _, b := range blocks {
		p.Attempts = int(a.number("restart: attempts", b.Attempts, int64(p.Attempts), 0))
		p.Interval = a.duration("restart: interval", b.Interval, p.Interval)
		p.Delay = a.duration("restart: delay", b.Delay, p.Delay)
		if b.Mode != nil {
			p.Mode = *b.Mode
		}
	}
	if p.Mode != modeFail && p.Mode != modeDelay {
		a.add(registry.Invalid("unknown restart mode %q; use %q or %q", p.Mode, modeFail, modeDelay))
	}
	return p
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
		intervalEnd := r.Since.Add(p.Interval)
		r.Since, r.Count, r.Total = intervalEnd, 1, r.Total+1
		return r, max(intervalEnd.Sub(now), p.Delay), true, ""
	case p.Attempts == 0:
		return r, 0, false, "the restart policy allows no restart"
	}
	return r, 0, false, fmt.Sprintf("the restart policy allows %d restarts within %v", p.Attempts, p.Interval)
}
