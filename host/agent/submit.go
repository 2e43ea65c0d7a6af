package agent

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/registry"
)

// newID mints an id of 128 random bits, in the form of a UUID.
func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// Check says whether this agent can run the job, and what of it is not acted on.
func (a *Agent) Check(j *hooks.Job) (warnings []string, err error) {
	if warnings, err = unheeded(j); err != nil {
		return nil, err
	}
	for _, g := range a.overridden(j).Groups {
		for _, t := range g.Tasks {
			if a.drivers[t.Driver] == nil {
				return nil, registry.Errorf(registry.ErrUnsupported, "task %q: this agent has no driver %q; it has %s: change the task, or start holdfast with --driver",
					t.Name, t.Driver, a.DriverNames())
			}
			if _, err := readTask(j.Type, g, t); err != nil {
				return nil, err
			}
		}
	}
	return warnings, nil
}

// DriverNames lists the drivers there are.
func (a *Agent) DriverNames() string {
	return strings.Join(slices.Sorted(maps.Keys(a.drivers)), ", ")
}

// overridden is the job with the agent's own choice of a driver, if there is one.
func (a *Agent) overridden(j *hooks.Job) *hooks.Job {
	if a.config.Override == "" {
		return j
	}
	out := *j
	out.Groups = slices.Clone(j.Groups)
	for i := range out.Groups {
		out.Groups[i].Tasks = slices.Clone(out.Groups[i].Tasks)
		for k := range out.Groups[i].Tasks {
			out.Groups[i].Tasks[k].Driver = a.config.Override
		}
	}
	return &out
}

// Submit has a job run, or replaces the one of that id: unchanged groups go on. It returns when that is written down.
func (a *Agent) Submit(j *hooks.Job, src Source) (*JobRecord, error) {
	warnings, err := a.Check(j)
	if err != nil {
		return nil, err
	}
	j = a.overridden(j)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.draining {
		return nil, registry.Errorf(registry.ErrUnavailable, "this agent is taking everything down")
	}
	r := &JobRecord{Job: *j, Source: src, Version: 1, Submitted: time.Now().UTC(), Warnings: warnings}
	if was := a.jobs[j.ID]; was != nil {
		r.Version = was.Version + 1
	}
	if err := a.ledger.put(jobsBucket, j.ID, r); err != nil {
		return nil, a.fail(err)
	}
	a.jobs[j.ID] = r
	a.announce()
	a.kick()
	return r, nil
}

// StopOptions say how a job is stopped.
type StopOptions struct {
	Purge bool // forget the job, and its allocs once they have ended
	Force bool // even if it runs a plugin whose volumes others hold
}

// StopJob has a job end. A plugin whose volumes are held by allocs of other jobs is kept, unless forced: without it they could not be
// given back.
func (a *Agent) StopJob(ctx context.Context, id string, s Volumes, o StopOptions) error {
	job := a.job(id)
	if job == nil {
		return registry.Errorf(registry.ErrNotFound, "there is no job %q (see holdfast job status)", id)
	}
	if !o.Force {
		if err := a.unheld(ctx, job, s); err != nil {
			return err
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	next := *a.jobs[id]
	next.Stopped = true
	if err := a.ledger.put(jobsBucket, id, &next); err != nil {
		return a.fail(err)
	}
	a.jobs[id] = &next
	if o.Purge {
		if err := a.ledger.remove(jobsBucket, id); err != nil {
			return a.fail(err)
		}
		delete(a.jobs, id)
	}
	a.announce()
	a.kick()
	return nil
}

func (a *Agent) job(id string) *JobRecord {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.jobs[id]
}

// unheld is nil if no alloc of another job holds a volume of the job's plugins.
func (a *Agent) unheld(ctx context.Context, job *JobRecord, s Volumes) error {
	for _, g := range job.Job.Groups {
		for _, plugin := range pluginsOf(g) {
			list, _, err := s.Volumes(ctx, host.VolumeQuery{Plugin: plugin})
			if err != nil {
				return fmt.Errorf("ask who uses plugin %q: %w", plugin, err)
			}
			if err := a.othersHold(job.Job.ID, plugin, list); err != nil {
				return err
			}
		}
	}
	return nil
}

func (a *Agent) othersHold(job string, plugin host.PluginID, list []host.VolumeStatus) error {
	for _, v := range list {
		for _, h := range v.Holders {
			r := a.record(h.Claim.Alloc)
			if r != nil && r.Job == job {
				continue
			}
			who := fmt.Sprintf("alloc %s", short(h.Claim.Alloc))
			if r != nil {
				who += fmt.Sprintf(" of job %q", r.Job)
			}
			return registry.Errorf(registry.ErrConflict, "%s holds volume %s of plugin %q, and could not give it back without the plugin; stop it first, or use --force",
				who, v.VolumeName(), plugin)
		}
	}
	return nil
}

// slot is a place of a job that one alloc at a time may fill.
type slot struct {
	group string
	index uint64
}

// place is the record of a new alloc for a slot.
func place(j *JobRecord, g hooks.Group, index uint64) *AllocRecord {
	var rest jobRest
	_ = readJSON("job", j.Job.Rest, &rest) // was read when it was submitted
	name := rest.Name
	if name == "" {
		name = j.Job.ID
	}
	r := &AllocRecord{
		ID: host.AllocID(newID()), Job: j.Job.ID, JobName: name, JobType: j.Job.Type, JobMeta: merged(rest.Meta),
		Namespace: string(namespaceOf(string(j.Job.Namespace))), TextDigest: j.Job.Digest, Group: g, Digest: digest(j, g), Version: j.Version,
		Index: index, State: AllocPending, Created: time.Now().UTC(), Tasks: map[host.TaskName]*TaskRecord{},
	}
	for _, t := range g.Tasks {
		r.Tasks[t.Name] = &TaskRecord{State: TaskPending, Since: r.Created}
	}
	return r
}

func namespaceOf(s string) registry.Namespace {
	if s == "" {
		return registry.DefaultNamespace
	}
	return registry.Namespace(s)
}

// digest of all that an alloc of the group depends on, but for the count.
func digest(j *JobRecord, g hooks.Group) string {
	g.Count = 0
	text, err := encode([]any{j.Job.Type, namespaceOf(string(j.Job.Namespace)), g})
	if err != nil {
		panic(err) // it came from JSON
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}
