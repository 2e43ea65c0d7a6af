package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

// DriverNames lists the drivers of this agent.
func (a *Agent) DriverNames() string { return strings.Join(slices.Sorted(maps.Keys(a.drivers)), ", ") }

// Check reports whether this agent can run the job. It returns a warning for each attribute that it ignores.
func (a *Agent) Check(j *hooks.Job) (warnings []string, err error) {
	return Check(a.withOverride(j), slices.Collect(maps.Values(a.drivers)), true)
}

// Check reports whether an agent with these drivers can run the job. It returns a warning for each attribute that has
// no effect, even if it returns an error.
//
// With tryLimits, drivers try whether they can limit resources: tasks get cgroups below that of this process.
func Check(j *hooks.Job, drivers []taskdriver.Driver, tryLimits bool) (warnings []string, err error) {
	warnings, found := unsupportedBlocks(j)
	byName := map[string]taskdriver.Driver{}
	for _, d := range drivers {
		byName[d.Name()] = d
	}
	for _, g := range j.Groups {
		for _, t := range g.Tasks {
			d, spec := byName[t.Driver], found.checkAttributes(j.Type, g, t)
			if d == nil {
				found.add(t, "", registry.Errorf(registry.ErrUnsupported,
					"this agent has no driver %q, only %s; change the task, or start holdfast with --driver", t.Driver,
					strings.Join(slices.Sorted(maps.Keys(byName)), ", ")))
				continue
			}
			warnings = append(warnings, found.checkTask(spec, d, tryLimits)...)
		}
	}
	return warnings, found.err()
}

// withOverride returns the job with Config.Override, if set, as the driver of each task.
func (a *Agent) withOverride(j *hooks.Job) *hooks.Job {
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

// SubmitOptions are the options of Submit.
type SubmitOptions struct {
	Force bool // even if the change stops a plugin whose mounts other allocs use
	Rerun bool // run completed batch allocs again
}

// Submit adds a job, or replaces the job with that ID. It returns when the job and its allocs are recorded. The
// allocs start later.
//
// Allocs of unchanged groups continue. Completed batch allocs of unchanged groups run again only if the job was
// stopped or with Rerun. Without Force, Submit refuses a change that stops a plugin whose mounts other allocs use.
func (a *Agent) Submit(
	ctx context.Context, j *hooks.Job, src Source, s Lister, o SubmitOptions,
) (*JobRecord, error) {
	warnings, err := a.Check(j)
	if p, is := errors.AsType[*Problems](err); is {
		p.File = src.Name
	}
	if err != nil {
		return nil, err
	}
	j = a.withOverride(j)
	if !o.Force {
		if err := a.checkMountsSurvive(ctx, j, s); err != nil {
			return nil, err
		}
	}
	a.writing.Lock()
	defer a.writing.Unlock()
	if err := a.acceptsWork(); err != nil {
		return nil, err
	}
	was := a.jobs[j.ID]
	r := &JobRecord{
		Job: *j, Source: src, Version: a.lastVersion(was, j.ID) + 1, Submitted: time.Now().UTC(), Warnings: warnings,
		digests: &sync.Map{},
	}
	r.RunOnce = r.Version
	if was != nil {
		r.Rolled = was.Rolled
		if !was.Stopped && !o.Rerun {
			r.RunOnce = was.RunOnce
		}
	}
	r = a.rollOrReplace(was, r)
	var placed []*AllocRecord
	entries := []entry{{jobsBucket, j.ID, r}}
	for _, al := range a.allocsOf(j.ID) {
		if !al.State.Ended() && al.ending() { // write what setDead has not: updateVersions of the next agent needs it
			entries = append(entries, entry{allocsBucket, string(al.ID), al})
		}
	}
	if len(a.allocsOf(j.ID)) == 0 { // one commit for all; otherwise reconcileJob places the allocs
		var more []entry
		placed, more = a.newAllocs(r, func(s slot) bool { return !a.isPaused(j.ID, s) })
		entries = append(entries, more...)
	}
	if err := a.commit(func() { a.jobs[j.ID] = r; a.publishNew(placed) }, entries...); err != nil {
		return nil, err
	}
	a.reconcileJob(r, a.allocsOf(j.ID))
	a.wakeRun()
	return r, nil
}

// FailedPlugins counts the plugin tasks that have failed for good: the job still wants them, but the agent does not
// start them again.
func (a *Agent) FailedPlugins() map[host.PluginID]int {
	failed, allocs := map[host.PluginID]int{}, a.Allocs()
	for _, job := range a.Jobs() {
		groups := pluginGroups(job)
		if len(groups) == 0 {
			continue
		}
		_, fills := job.Slots()
		for _, r := range allocs {
			if r.State == AllocFailed && fills(r) {
				for _, id := range pluginsOf(groups[r.Group.Name]) { // the record of an old alloc may have no tasks
					failed[id]++
				}
			}
		}
	}
	return failed
}

// allocsOf returns the allocs of a job.
func (a *Agent) allocsOf(job string) []*AllocRecord {
	return slices.DeleteFunc(slices.Clone(a.Allocs()), func(r *AllocRecord) bool { return r.Job != job })
}

// lastVersion returns the last version of a job. A purged job may still have allocs, whose versions count too.
func (a *Agent) lastVersion(was *JobRecord, id string) (last uint64) {
	for ; was != nil; was = was.Next {
		last = max(last, was.Version)
	}
	for _, r := range a.Allocs() {
		if r.Job == id {
			last = max(last, r.Version)
		}
	}
	return last
}

// StopOptions are the options of StopJob.
type StopOptions struct {
	Purge bool // remove the job, and its allocs when they have ended
	Force bool // even if allocs hold volumes of its plugins
}

// StopJob stops a job. Without Force it refuses to stop a plugin while allocs of other jobs hold volumes of the plugin,
// because these could not be released.
func (a *Agent) StopJob(ctx context.Context, id string, s Lister, o StopOptions) error {
	job, err := a.Job(id)
	if err != nil {
		return err
	}
	if !o.Force {
		if err := a.checkNoVolumeHeld(ctx, job, s); err != nil {
			return err
		}
	}
	a.writing.Lock()
	defer a.writing.Unlock()
	if job = a.jobs[id]; job == nil {
		return nil // purged by a concurrent call
	}
	next := job.stopped()
	publish, write := func() { a.jobs[id] = next }, entry{jobsBucket, id, next}
	if o.Purge {
		publish, write.value = func() { delete(a.jobs, id) }, nil
	}
	var stop []host.AllocID
	if !a.stopsAll() { // else stopRanks stops all allocs
		stop = a.unwanted(next, a.allocsOf(id), nil)
	}
	if err := a.stopAllLocked(stop, publish, write); err != nil {
		return err
	}
	a.wakeRun()
	return nil
}

// stopped returns the record of the job after a stop, which ends its roll.
func (j *JobRecord) stopped() *JobRecord {
	next := *j
	next.Stopped, next.Next = true, nil
	if j.rollOpen() {
		roll := *j.Roll
		roll.Ended = time.Now().UTC()
		if j.Next != nil {
			roll.Failed = "the job was stopped before the new allocs were healthy"
		}
		next.Roll = &roll
	}
	return &next
}

// job returns the current record of a job, or nil.
func (a *Agent) job(id string) *JobRecord {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.jobs[id]
}

// checkNoVolumeHeld returns an error if an alloc of another job holds a volume of the job's plugins.
func (a *Agent) checkNoVolumeHeld(ctx context.Context, job *JobRecord, s Lister) error {
	var plugins []host.PluginID
	for _, g := range job.Job.Groups {
		plugins = append(plugins, pluginsOf(g)...)
	}
	return a.checkHolders(ctx, plugins, s, "the volume cannot be released without the plugin",
		func(_ host.VolumeStatus, h registry.Holder) bool {
			r := a.record(h.Claim.Alloc)
			return r == nil || r.Job != job.Job.ID
		})
}

// acceptsWork returns an error if the agent is shutting down, its node is drained, or its disk has no space for new
// records.
func (a *Agent) acceptsWork() error {
	if a.shuttingDown.Load() {
		return registry.Errorf(registry.ErrUnavailable, "this agent is shutting down and stops all jobs")
	}
	if drain := a.DescribeDrain(); drain != "" {
		return registry.Errorf(registry.ErrUnavailable, "%s", drain)
	}
	return a.checkSpace()
}

// checkMountsSurvive returns an error if the new version of a job would break mounts in use. It would if it stops a
// plugin's task without a replacement while another alloc uses the plugin's volumes, or if it replaces a task that
// serves FUSE mounts and has roll = "stop_first".
func (a *Agent) checkMountsSurvive(ctx context.Context, j *hooks.Job, s Lister) error {
	next, rolling := &JobRecord{Job: *j}, map[slot]string{}
	if was := a.job(j.ID); was != nil && !was.Stopped {
		next.Rolled = was.Rolled
		roll := *was
		roll.Next = next
		if err := a.checkStopFirst(ctx, &roll, s); err != nil {
			return err
		}
		rolling = roll.rollSlots()
		next.Roll = was.Roll // the roll keeps old allocs as long as they are needed
	}
	want := next.wanted()
	ends := func(r *AllocRecord) bool {
		return r.Job == j.ID && want[r.slot()] != r.Digest && rolling[r.slot()] == "" && !next.isReplacedInRoll(r)
	}
	var plugins []host.PluginID
	for _, r := range a.Allocs() {
		if ends(r) && !r.State.Ended() && !r.Stop {
			plugins = append(plugins, r.Plugins()...)
		}
	}
	return a.checkHolders(ctx, plugins, s, "its mount could die, because the change stops a task of the plugin",
		func(v host.VolumeStatus, h registry.Holder) bool {
			r := a.record(h.Claim.Alloc)
			return (r == nil || !ends(r)) && (h.Publish != "" || v.Staging.State != "")
		})
}

// checkHolders returns an error if a volume of the plugins has a holder on this node for which matters returns true.
// Holders on other nodes of a cluster use plugin instances of their own.
func (a *Agent) checkHolders(ctx context.Context, plugins []host.PluginID, s Lister, consequence string,
	matters func(host.VolumeStatus, registry.Holder) bool,
) error {
	slices.Sort(plugins)
	for _, plugin := range slices.Compact(plugins) {
		list, _, err := s.Volumes(ctx, host.VolumeQuery{Plugin: plugin})
		if err != nil {
			return fmt.Errorf("list the volumes of plugin %q: %w", plugin, err)
		}
		for _, v := range list {
			for _, h := range v.Holders {
				if a.otherNode(h.Claim) == "" && matters(v, h) {
					return registry.Errorf(registry.ErrConflict,
						"%s holds volume %s of plugin %q: %s; stop that first, or use --force",
						a.describeAlloc(h.Claim.Alloc), v.VolumeName(), plugin, consequence)
				}
			}
		}
	}
	return nil
}

// otherNode returns the node of a claim if it is another node, else "".
func (a *Agent) otherNode(c registry.Claim) host.NodeName {
	if string(c.Node) == a.node.Name {
		return ""
	}
	return c.Node
}

// describeAlloc returns an alloc's ID and job, for messages. It names the containers that an engine mount is for.
func (a *Agent) describeAlloc(id host.AllocID) string {
	for _, m := range a.EngineMounts() {
		if m.Alloc == id {
			return m.containers()
		}
	}
	name := "alloc " + short(id)
	if r := a.record(id); r != nil {
		name += " of job " + r.Job
	}
	return name
}

// DescribeWaits returns one line about what an alloc waits for. It also names the jobs that hold a volume; the shim
// knows only their allocs.
func (a *Agent) DescribeWaits(ctx context.Context, s Lister, list []registry.Wait) string {
	texts := make([]string, len(list))
	for i, w := range list {
		texts[i] = w.String()
		if held := a.holders(ctx, s, w); held != "" {
			texts[i] = fmt.Sprintf("volume %s is held by %s", w.Volume, held)
		}
	}
	return strings.Join(texts, "; ")
}

// holders describes the allocs that hold the volume that w waits to claim. It is empty if they are not known.
func (a *Agent) holders(ctx context.Context, s Lister, w registry.Wait) string {
	if w.Step != registry.StepClaim {
		return ""
	}
	list, _, _ := s.Volumes(ctx, host.VolumeQuery{Name: w.Volume}) // empty after an error
	var names []string
	for _, v := range list {
		if v.VolumeName() != w.Volume {
			continue
		}
		for _, h := range v.Holders {
			if h.Claim.Alloc == w.Alloc {
				continue
			}
			name := a.describeAlloc(h.Claim.Alloc)
			if node := a.otherNode(h.Claim); node != "" {
				name += " on node " + string(node)
			}
			names = append(names, name)
		}
	}
	return strings.Join(names, " and ")
}

// StopAll stops all allocs: users of volumes first, and plugins once the volumes are released. Jobs are kept, and the
// next agent runs them again. Run must be running. If ctx ends first, the error names the allocs that have not ended.
func (a *Agent) StopAll(ctx context.Context) error {
	a.shuttingDown.Store(true)
	return a.stopRanks(ctx, lastRank)
}

// StopUsers is StopAll for allocs without a plugin.
func (a *Agent) StopUsers(ctx context.Context) error {
	a.shuttingDown.Store(true)
	return a.stopRanks(ctx, 0)
}

// stopRanks stops the allocs of each rank up to last, and waits for their end before it stops those of the next rank.
func (a *Agent) stopRanks(ctx context.Context, last int) error {
	for rank := range last + 1 {
		err := a.stopRank(ctx, rank)
		if err == nil {
			err = a.Await(ctx, func(all []*AllocRecord) bool { return len(unended(all, rank)) == 0 })
		}
		if err != nil {
			return a.remainingError(err)
		}
	}
	return nil
}

// KillAll stops all allocs at once. Tasks get no grace, and KillAll does not wait for volumes. The error names the
// allocs that still hold volumes.
func (a *Agent) KillAll(ctx context.Context) error {
	a.shuttingDown.Store(true)
	a.endGrace()
	for rank := range lastRank + 1 {
		if err := a.stopRank(ctx, rank); err != nil {
			return a.remainingError(err)
		}
	}
	active := func(r *AllocRecord) bool { return !r.State.Ended() && r.State != AllocReleasing }
	return a.remainingError(a.Await(ctx, func(all []*AllocRecord) bool { return !slices.ContainsFunc(all, active) }))
}

func (a *Agent) stopRank(ctx context.Context, rank int) error {
	return a.retryWhileFull(ctx, func() error {
		a.writing.Lock()
		defer a.writing.Unlock()
		for _, r := range a.Allocs() {
			if r.rank() == rank {
				if err := a.stopLocked(r.ID); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// remainingError adds to err the allocs that have not ended. It returns nil if err is nil and all have ended.
func (a *Agent) remainingError(err error) error {
	var names []string
	for _, r := range unended(a.Allocs(), lastRank) {
		text := fmt.Sprintf("%s is %s", a.describeAlloc(r.ID), r.State)
		if why := r.Why(); why != "" {
			text += ": " + why
		}
		names = append(names, text)
	}
	switch {
	case len(names) == 0:
		return err
	case err == nil:
		return registry.Errorf(registry.ErrUncertain, "shutdown incomplete: %s", strings.Join(names, "; "))
	}
	return fmt.Errorf("shutdown incomplete: %s: %w", strings.Join(names, "; "), err)
}
