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

// SubmitOptions say how a job is submitted.
type SubmitOptions struct {
	Force bool // even if a plugin's task ends by it whose mounts others use
	Rerun bool // run batch allocs again that are complete
}

// Submit has a job run, or replaces the one of that id: unchanged groups go on. It returns when
// the job and its allocs are stored; they start afterwards.
// Batch allocs of unchanged groups that are complete are run again only if the job was stopped, or if asked for.
// Unless forced, it refuses a change that ends a plugin's task while other allocs use the plugin's mounts, which may end too.
func (a *Agent) Submit(ctx context.Context, j *hooks.Job, src Source, s Volumes, o SubmitOptions) (*JobRecord, error) {
	warnings, err := a.Check(j)
	if err != nil {
		return nil, err
	}
	j = a.overridden(j)
	if !o.Force {
		if err := a.unmounted(ctx, &JobRecord{Job: *j}, s); err != nil {
			return nil, err
		}
	}
	a.writing.Lock()
	defer a.writing.Unlock()
	if a.draining.Load() {
		return nil, registry.Errorf(registry.ErrUnavailable, "this agent is taking everything down")
	}
	if err := a.room(); err != nil {
		return nil, err
	}
	was := a.jobs[j.ID]
	r := &JobRecord{Job: *j, Source: src, Version: a.lastVersion(was, j.ID) + 1, Submitted: time.Now().UTC(), Warnings: warnings}
	if r.Fresh = r.Version; was != nil && !was.Stopped && !o.Rerun {
		r.Fresh = was.Fresh
	}
	if err := a.commit(func() { a.jobs[j.ID] = r }, entry{jobsBucket, j.ID, r}); err != nil {
		return nil, err
	}
	a.reconcileJob(r, a.allocsOf(j.ID))
	a.kick()
	return r, nil
}

// allocsOf returns the job's allocs.
func (a *Agent) allocsOf(id string) []*AllocRecord {
	return slices.DeleteFunc(slices.Clone(a.Allocs()), func(r *AllocRecord) bool { return r.Job != id })
}

// lastVersion is that of the job, or of what is left of it if it was purged: no version is used twice while its allocs are known.
func (a *Agent) lastVersion(was *JobRecord, id string) (last uint64) {
	if was != nil {
		return was.Version
	}
	for _, r := range a.Allocs() {
		if r.Job == id {
			last = max(last, r.Version)
		}
	}
	return last
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
	a.writing.Lock()
	defer a.writing.Unlock()
	if job = a.jobs[id]; job == nil {
		return nil // somebody else has purged it meanwhile
	}
	next := *job
	next.Stopped = true
	publish, write := func() { a.jobs[id] = &next }, entry{jobsBucket, id, &next}
	if o.Purge {
		publish, write.value = func() { delete(a.jobs, id) }, nil
	}
	if err := a.commit(publish, write); err != nil {
		return err
	}
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
	var plugins []host.PluginID
	for _, g := range job.Job.Groups {
		plugins = append(plugins, pluginsOf(g)...)
	}
	consequence := "could not give it back without the plugin"
	return a.notUsed(ctx, plugins, s, consequence, func(_ host.VolumeStatus, h registry.Holder) bool {
		r := a.record(h.Claim.Alloc)
		return r == nil || r.Job != job.Job.ID
	})
}

// unmounted is nil if no alloc that stays uses a mount of a plugin whose task ends when the job is replaced by this one.
func (a *Agent) unmounted(ctx context.Context, job *JobRecord, s Volumes) error {
	want := job.wanted()
	ends := func(r *AllocRecord) bool { return r.Job == job.Job.ID && want[r.slot()] != r.Digest }
	var plugins []host.PluginID
	for _, r := range a.Allocs() {
		if ends(r) && !r.State.Ended() && !r.Stop {
			plugins = append(plugins, r.Plugins()...)
		}
	}
	consequence := "could lose its mount, as the change stops a task of the plugin"
	return a.notUsed(ctx, plugins, s, consequence, func(v host.VolumeStatus, h registry.Holder) bool {
		r := a.record(h.Claim.Alloc)
		return (r == nil || !ends(r)) && (h.Publish != "" || v.Placement.Stage != "")
	})
}

// notUsed is nil if no alloc uses a volume of the plugins in a way that matters.
func (a *Agent) notUsed(ctx context.Context, plugins []host.PluginID, s Volumes, consequence string, matters useFilter) error {
	slices.Sort(plugins)
	for _, plugin := range slices.Compact(plugins) {
		list, _, err := s.Volumes(ctx, host.VolumeQuery{Plugin: plugin})
		if err != nil {
			return fmt.Errorf("ask who uses plugin %q: %w", plugin, err)
		}
		if err := a.usedBy(plugin, list, consequence, matters); err != nil {
			return err
		}
	}
	return nil
}

// useFilter says whether a use of a volume keeps its plugin from being stopped.
type useFilter func(host.VolumeStatus, registry.Holder) bool

func (a *Agent) usedBy(plugin host.PluginID, list []host.VolumeStatus, consequence string, matters useFilter) error {
	for _, v := range list {
		for _, h := range v.Holders {
			if !matters(v, h) {
				continue
			}
			r := a.record(h.Claim.Alloc)
			who := fmt.Sprintf("alloc %s", short(h.Claim.Alloc))
			if r != nil {
				who += fmt.Sprintf(" of job %q", r.Job)
			}
			return registry.Errorf(registry.ErrConflict, "%s holds volume %s of plugin %q, and %s; stop it first, or use --force",
				who, v.VolumeName(), plugin, consequence)
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
