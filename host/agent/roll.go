package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/internal/display"
	"holdfast/registry"
)

// Roll is the replacement of the plugin allocs of a job, from one version of the job to the next. Until the new allocs
// are healthy, JobRecord.Next has the new version, and the job itself is unchanged.
type Roll struct {
	Version uint64    `json:"version"` // the version that the roll leads to
	Began   time.Time `json:"began"`
	Ended   time.Time `json:"ended,omitzero"`   // when the agent began to stop the last old alloc, or the roll failed
	Failed  string    `json:"failed,omitempty"` // why the job keeps its version
	Drain   bool      `json:"drain,omitempty"`  // allocs that use mounts of old plugin processes are restarted
	Force   bool      `json:"force,omitempty"`  // old allocs are stopped even if calls run or mounts exist
	Jobs    []string  `json:"jobs,omitempty"`   // jobs that are rolled together: all take their next version, or none
}

// rollOpen reports whether the job has a roll that is in progress, or that failed and still has allocs to stop.
func (j *JobRecord) rollOpen() bool { return !j.Stopped && j.Roll != nil && j.Roll.Ended.IsZero() }

// rollSlots returns the slots whose plugin allocs the next version of the job replaces, with their new digests.
func (j *JobRecord) rollSlots() map[slot]string {
	out := map[slot]string{}
	if j == nil || j.Next == nil {
		return out
	}
	old, oldGroups, newGroups := j.wanted(), pluginGroups(j), pluginGroups(j.Next)
	for s, digest := range j.Next.wanted() {
		if old[s] != "" && old[s] != digest && runsAll(newGroups[s.group], pluginsOf(oldGroups[s.group])) {
			out[s] = digest
		}
	}
	return out
}

// runsAll reports whether a group runs all of the given plugins. It is false if none are given.
func runsAll(g hooks.Group, plugins []host.PluginID) bool {
	runs := pluginsOf(g)
	return len(plugins) > 0 && !slices.ContainsFunc(plugins, func(id host.PluginID) bool {
		return !slices.Contains(runs, id)
	})
}

// pluginGroups returns the groups of a job that run plugins, by name.
func pluginGroups(j *JobRecord) map[string]hooks.Group {
	out := map[string]hooks.Group{}
	for _, g := range j.Job.Groups {
		if len(pluginsOf(g)) > 0 {
			out[g.Name] = g
		}
	}
	return out
}

// stopsFirst reports whether a new alloc of the group starts only after the end of the old one. A plugin that uses
// volumes itself could not claim them twice.
func stopsFirst(g hooks.Group) bool {
	return len(g.Sealed) > 0 || slices.ContainsFunc(g.Tasks, func(t hooks.Task) bool {
		return t.Roll == hooks.RollStopFirst
	})
}

// wantedNow returns the slots of wanted, except those whose old alloc a roll has to stop first.
func (j *JobRecord) wantedNow() map[slot]string {
	want := j.wanted()
	if j == nil || j.Next == nil {
		return want
	}
	groups := pluginGroups(j.Next)
	for s := range j.rollSlots() {
		if stopsFirst(groups[s.group]) {
			delete(want, s)
		}
	}
	return want
}

// isNewInRoll reports whether the alloc is a new alloc of the job's roll.
func (j *JobRecord) isNewInRoll(r *AllocRecord) bool {
	return j != nil && j.Next != nil && r.Job == j.Job.ID && r.Version == j.Next.Version &&
		j.rollSlots()[r.slot()] == r.Digest
}

// isReplacedInRoll reports whether a roll replaces this plugin alloc, and keeps it until nothing needs it. In the
// alloc's slot, the job wants another digest, of a group that runs all plugins of the alloc.
func (j *JobRecord) isReplacedInRoll(r *AllocRecord) bool {
	if j == nil || !j.rollOpen() || r.Job != j.Job.ID || r.State.Ended() || j.isNewInRoll(r) {
		return false
	}
	digest, wanted := j.wantedNow()[r.slot()]
	return wanted && digest != r.Digest && runsAll(pluginGroups(j)[r.Group.Name], r.Plugins())
}

// restartable reports whether a task of the alloc may be started again. Tasks of a plugin alloc that a roll starts or
// replaces are not started again, because their end decides the roll.
func (a *Agent) restartable(r *AllocRecord) bool {
	job := a.job(r.Job)
	return !job.isNewInRoll(r) && !job.isReplacedInRoll(r)
}

// commitJobs replaces job records. The caller holds a.writing.
func (a *Agent) commitJobs(jobs ...*JobRecord) error {
	var entries []entry
	for _, j := range jobs {
		entries = append(entries, entry{jobsBucket, j.Job.ID, j})
	}
	err := a.commit(func() {
		for _, j := range jobs {
			a.jobs[j.Job.ID] = j
		}
	}, entries...)
	if err == nil {
		a.wakeRun()
	}
	return err
}

// rollInterval is the time between two checks of what still needs old plugin allocs.
const rollInterval = 500 * time.Millisecond

// followRolls decides the rolls of all jobs until ctx ends.
func (a *Agent) followRolls(ctx context.Context, s Storage) {
	logged := map[string]string{} // last error by job
	for ctx.Err() == nil {
		a.mu.Lock()
		changed := a.changed
		var open []*JobRecord
		for _, j := range a.jobs {
			if j.rollOpen() {
				open = append(open, j)
			}
		}
		a.mu.Unlock()
		if len(open) == 0 || a.stopsAll() {
			select {
			case <-changed:
			case <-ctx.Done():
			}
			continue
		}
		for _, job := range open {
			text := ""
			if err := a.stepRoll(ctx, s, job); err != nil && ctx.Err() == nil {
				text = err.Error()
			}
			id := job.Job.ID
			if text != "" && text != logged[id] {
				a.log.Warn("cannot continue the roll of a job's plugins yet", "job", id, "error", text)
			}
			logged[id] = text
		}
		sleep(ctx, rollInterval, nil)
	}
}

// stepRoll does what is possible now in the roll of one job. First it makes healthy wanted tasks active. If they are
// active already, it decides whether the job takes its next version. In a later step it stops old allocs that nothing
// needs any more, and records the end of the roll. was is the record that the caller read before.
func (a *Agent) stepRoll(ctx context.Context, s Storage, was *JobRecord) error {
	id := was.Job.ID
	job := a.job(id)
	if job == nil || !job.rollOpen() {
		return nil // purged, or stopped and submitted again
	}
	var plugins []host.PluginID
	for _, r := range a.Allocs() {
		if (r.Job == id || slices.Contains(job.Roll.Jobs, r.Job)) && !r.State.Ended() {
			plugins = append(plugins, r.Plugins()...)
		}
	}
	tasks, err := listPluginTasks(ctx, s, plugins)
	if err != nil {
		return err
	}
	if preferred, err := a.preferWanted(ctx, s, job, tasks); preferred || err != nil {
		return err // tasks is outdated now
	}
	a.writing.Lock()
	defer a.writing.Unlock()
	if job = a.jobs[id]; job == nil || !job.rollOpen() || a.stopsAll() {
		return nil
	}
	// Old allocs are stopped in a later step than that of the decision: a call that was sent before the new instances
	// were active may only now begin.
	if job.Next == nil && was.Next != nil {
		return nil // the step of another job has just made the decision
	}
	if job.Next != nil {
		if decided, err := a.decideRoll(job, tasks); err != nil || decided {
			return err
		}
	}
	remain, err := a.stopReplaced(job, tasks)
	if err != nil || remain || job.Next != nil {
		return err
	}
	next, roll := *job, *job.Roll
	roll.Ended, next.Roll = time.Now().UTC(), &roll
	return a.commitJobs(&next)
}

// preferWanted makes healthy wanted tasks active if a replaced task is active now. A replaced task may be active after
// a failed roll. It may also have been registered last because the shim's records were lost. Mounts stay with the
// processes that serve them. preferWanted reports whether it has changed anything.
func (a *Agent) preferWanted(
	ctx context.Context, s Storage, job *JobRecord, tasks pluginTasks,
) (preferred bool, err error) {
	replaced := map[slot][]host.PluginID{} // with an active task in a replaced alloc
	for _, r := range a.Allocs() {
		for _, t := range r.Group.Tasks {
			if job.isReplacedInRoll(r) && tasks[r.taskKey(t.Name)].Active {
				replaced[r.slot()] = append(replaced[r.slot()], t.Plugin)
			}
		}
	}
	wanted := job.wantedNow()
	for _, r := range a.Allocs() {
		if r.Job != job.Job.ID || r.State.Ended() || r.Stop || wanted[r.slot()] != r.Digest {
			continue
		}
		for _, t := range r.Group.Tasks {
			k := r.taskKey(t.Name)
			use := tasks[k]
			if !slices.Contains(replaced[r.slot()], t.Plugin) || !use.Healthy || use.Active {
				continue
			}
			err := s.PreferTask(ctx, k, use.Attempt)
			switch {
			case err == nil:
				preferred = true
			case !errors.Is(err, registry.ErrUnsupported): // an older shim does not support it
				return preferred, fmt.Errorf("prefer the wanted instance of plugin %s: %w", t.Plugin, err)
			}
		}
	}
	return preferred, nil
}

// decideRoll gives the job its next version once all new plugin allocs are healthy, its own and those of the jobs that
// are rolled with it. If one of them has failed, all these jobs keep their version. decided is false if it is too
// early.
func (a *Agent) decideRoll(job *JobRecord, tasks pluginTasks) (decided bool, err error) {
	together := []*JobRecord{job}
	for _, id := range job.Roll.Jobs {
		other := a.jobs[id]
		if id != job.Job.ID && other != nil && other.rollOpen() && other.Next != nil &&
			slices.Equal(other.Roll.Jobs, job.Roll.Jobs) {
			together = append(together, other)
		}
	}
	allHealthy, failed := true, ""
	for _, j := range together {
		healthy, why := a.newAllocsHealthy(j, tasks)
		allHealthy, failed = allHealthy && healthy, cmp.Or(failed, why)
	}
	if failed == "" && !allHealthy {
		return false, nil
	}
	var next []*JobRecord
	for _, j := range together {
		rec, roll := *j.Next, *j.Roll
		if failed != "" {
			rec, roll.Failed = *j, failed
			rec.Next = nil
		}
		rec.Roll = &roll
		next = append(next, &rec)
	}
	return true, a.commitJobs(next...)
}

// newAllocsHealthy reports whether all new plugin allocs of the job's roll are healthy. failed says why one of them has
// failed.
func (a *Agent) newAllocsHealthy(job *JobRecord, tasks pluginTasks) (healthy bool, failed string) {
	newest := map[slot]*AllocRecord{}
	for _, r := range a.Allocs() {
		if job.isNewInRoll(r) {
			newest[r.slot()] = r
		}
	}
	healthy = true
	for s := range job.rollSlots() {
		r := newest[s]
		switch {
		case r == nil:
			healthy = false
			continue
		case r.State.Ended() || r.Failed != "":
			return false, fmt.Sprintf("%s: %s", a.describeAlloc(r.ID), cmp.Or(r.Reason, r.Failed, string(r.State)))
		}
		for _, t := range r.Group.Tasks {
			healthy = healthy && (len(t.Sealed) == 0 || tasks[r.taskKey(t.Name)].Healthy)
		}
	}
	return healthy, ""
}

// stopReplaced stops the replaced plugin allocs of the job that nothing needs any more. For the others it records why
// they are kept, and with Roll.Drain it stops the users of their mounts. It ends the pause of each slot
// (pausedSlot) whose volume no replaced alloc serves any more. remain reports whether it has kept any replaced alloc.
func (a *Agent) stopReplaced(job *JobRecord, tasks pluginTasks) (remain bool, err error) {
	served := map[registry.VolumeName]bool{}
	for _, r := range a.Allocs() {
		if r.Stop || !job.isReplacedInRoll(r) {
			continue
		}
		for _, v := range servedVolumes(r, tasks) {
			served[v.Volume] = true
		}
		why := a.whyNeeded(job, r, tasks)
		if why == "" {
			if err := a.stopLocked(r.ID); err != nil {
				return true, err
			}
			continue
		}
		remain = true
		if r.Reason != why {
			if err := a.updateLocked(r.ID, func(r *AllocRecord) { r.Reason = why; r.note("", "%s", why) }); err != nil {
				return true, err
			}
		}
		if job.Roll.Drain && a.isOld(job, r) {
			if err := a.restartUsers(job, r, tasks); err != nil {
				return true, err
			}
		}
	}
	for p := range a.paused {
		if p.by == job.Job.ID && !served[p.volume] {
			a.setPaused(p, false)
			a.wakeRun()
		}
	}
	return remain, nil
}

// isOld reports whether r, which a roll replaces, is older than the alloc that the job wants in its slot. If it is not,
// r was itself the new alloc of an earlier roll, which has failed or was superseded by another roll.
func (a *Agent) isOld(job *JobRecord, r *AllocRecord) bool {
	digest := job.wantedNow()[r.slot()]
	return slices.ContainsFunc(a.Allocs(), func(other *AllocRecord) bool {
		return other.Job == r.Job && other.slot() == r.slot() && other.Digest == digest &&
			!other.Created.Before(r.Created)
	})
}

// servedVolumes returns the volumes with mounts that are served by processes of the alloc.
func servedVolumes(r *AllocRecord, tasks pluginTasks) (volumes []registry.ServedVolume) {
	for _, t := range r.Group.Tasks {
		volumes = append(volumes, tasks[r.taskKey(t.Name)].Volumes...)
	}
	return volumes
}

// pausedSlot is a slot that gets no alloc while an old plugin process serves a volume, so that the next alloc mounts
// the volume with the new process.
type pausedSlot struct {
	by     string // job whose plugins are replaced
	volume registry.VolumeName
	job    string
	slot   slot
}

func (a *Agent) setPaused(p pausedSlot, paused bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if paused {
		a.paused[p] = true
	} else {
		delete(a.paused, p)
	}
}

// DescribePaused returns why paused slots of the job get no alloc; empty if none is paused.
func (a *Agent) DescribePaused(job string) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	for p := range a.paused {
		if p.job == job {
			return fmt.Sprintf("an old plugin process of job %s still serves volume %s", p.by, p.volume)
		}
	}
	return ""
}

// isPaused reports whether a slot is paused. The caller holds a.writing.
func (a *Agent) isPaused(job string, s slot) bool {
	for p := range a.paused {
		if p.job == job && p.slot == s {
			return true
		}
	}
	return false
}

// endPauses ends the pauses of each roll that has ended, or whose job was stopped or removed. The caller holds
// a.writing.
func (a *Agent) endPauses() {
	for p := range a.paused {
		if by := a.jobs[p.by]; by == nil || !by.rollOpen() {
			a.setPaused(p, false)
		}
	}
}

// slowRoll is the duration after which the reason for keeping an old alloc also says how to stop it.
const slowRoll = 5 * time.Minute

// whyNeeded returns why a replaced alloc is still needed, or "" if it is not. In a failed roll, calls do not keep the
// active new alloc, because new calls would keep it for ever. When it is stopped, its calls are cut off and sent again.
// With Roll.Force neither calls nor mounts keep an alloc.
func (a *Agent) whyNeeded(job *JobRecord, r *AllocRecord, tasks pluginTasks) (why string) {
	old := a.isOld(job, r)
	for _, t := range r.Group.Tasks {
		use := tasks[r.taskKey(t.Name)]
		switch {
		case use.Active && old:
			return fmt.Sprintf("kept: no newer instance of plugin %s is healthy", t.Plugin)
		case use.Active || job.Roll.Force: // calls keep nothing
			continue
		case len(use.Open) > 0:
			c := use.Open[0]
			why = fmt.Sprintf("kept until %s of volume %s, sent at %s, has ended", c.RPC, c.Volume,
				c.Since.UTC().Format(time.RFC3339))
		case use.Calls > 0:
			why = "kept until its calls have ended"
		default:
			continue
		}
		if time.Since(job.Roll.Began) > slowRoll {
			why += "; to stop it now: " + display.Command("holdfast plugin roll --force", string(t.Plugin))
		}
	}
	if list := servedVolumes(r, tasks); why == "" && len(list) > 0 && !job.Roll.Force {
		why = "kept: its process serves " + a.describeServed(list)
	}
	return why
}

// restartUsers stops the allocs that use mounts of the alloc's processes. New allocs take their slots once the mounts
// are gone. It does not stop plugin allocs, because their own processes may serve mounts.
func (a *Agent) restartUsers(job *JobRecord, r *AllocRecord, tasks pluginTasks) error {
	for _, v := range servedVolumes(r, tasks) {
		for _, id := range v.Allocs {
			user := a.record(id)
			if user == nil || user.Stop || user.State.Ended() || len(user.Plugins()) > 0 {
				continue
			}
			err := a.updateLocked(id, func(u *AllocRecord) {
				u.note("", "restarted: alloc %s of job %s, which serves volume %s, is replaced", short(r.ID), r.Job,
					v.Volume)
			})
			if err == nil {
				err = a.stopLocked(id)
			}
			if err != nil {
				return err
			}
			a.setPaused(pausedSlot{job.Job.ID, v.Volume, user.Job, user.slot()}, true)
		}
	}
	return nil
}
