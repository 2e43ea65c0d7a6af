package agent

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"holdfast/host"
	"holdfast/internal/mount"
)

// maxEnded is the number of ended allocs of a job that keep their records and logs.
const maxEnded = 10

// reconcile stops allocs that the jobs do not want, places missing ones, and runs each alloc that has no runner.
// Only Run calls it.
func (a *Agent) reconcile(run func(host.AllocID, *alloc)) {
	a.writing.Lock()
	defer a.writing.Unlock()
	if a.Shortage() != "" {
		a.setShortage(a.checkSpace()) // the shortage may be over, or nothing may wait any more
	}
	a.endPauses()
	byJob := map[string][]*AllocRecord{}
	for _, r := range a.Allocs() {
		byJob[r.Job] = append(byJob[r.Job], r)
	}
	for _, id := range a.jobOrder(byJob) {
		a.reconcileJob(a.jobs[id], byJob[id])
	}
	for _, r := range a.Allocs() {
		mayRun := !r.State.Ended() && (r.State != AllocPending || a.drainKnown.Load())
		if al := a.allocs[r.ID]; !al.started && mayRun && a.failure() == nil {
			al.started = true
			run(r.ID, al)
		}
	}
}

// jobOrder lists jobs with plugins first, then others, each in the order of submission, then removed jobs that have
// allocs.
func (a *Agent) jobOrder(byJob map[string][]*AllocRecord) []string {
	order := map[string]int{}
	for id, j := range a.jobs {
		order[id] = 1
		for _, g := range j.Job.Groups {
			if len(pluginsOf(g)) > 0 {
				order[id] = 0
			}
		}
	}
	for id := range byJob {
		if _, known := order[id]; !known {
			order[id] = 2
		}
	}
	submitted := func(id string) time.Time {
		if j := a.jobs[id]; j != nil {
			return j.Submitted
		}
		return time.Time{}
	}
	return slices.SortedFunc(maps.Keys(order), func(x, y string) int {
		return cmp.Or(order[x]-order[y], submitted(x).Compare(submitted(y)), cmp.Compare(x, y))
	})
}

// reconcileJob reconciles the allocs of one job. The job is nil if it was removed. reconcileJob ignores the errors of
// commits: on a full disk a later reconcile repeats the change, and any other error ends Run. The caller holds
// a.writing.
func (a *Agent) reconcileJob(job *JobRecord, allocs []*AllocRecord) {
	want := job.wantedNow()
	if a.drainKnown.Load() && !a.stopsAll() { // else stopRanks stops all allocs
		if stop := a.unwanted(job, allocs, want); len(stop) > 0 {
			_ = a.stopAllLocked(stop, func() {})
		}
		if len(want) > 0 {
			a.updateVersions(job, allocs, want)
			a.placeMissing(job, allocs, want)
		}
		a.placeRolled(job, allocs)
	}
	a.prune(job, allocs, want)
	a.removeDiscarded(job, allocs)
}

// wanted returns the group digest of each slot that the job wants filled.
func (j *JobRecord) wanted() map[slot]string {
	want := map[slot]string{}
	if j == nil || j.Stopped {
		return want
	}
	for _, g := range j.Job.Groups {
		d := groupDigest(j, g)
		for i := range uint64(g.Count) {
			want[slot{g.Name, i}] = d
		}
	}
	return want
}

// unwanted lists the allocs to stop now. Of the allocs that the job does not want, it lists those of the lowest rank,
// so a rank is stopped when all lower ones have ended. Jobs with Discard are stopped together: the lowest rank is that
// of all their allocs. unwanted leaves the plugin allocs of a roll to stepRoll.
func (a *Agent) unwanted(job *JobRecord, allocs []*AllocRecord, want map[slot]string) (ids []host.AllocID) {
	var leaving []*AllocRecord // those being stopped included
	for _, r := range allocs {
		kept := want[r.slot()] == r.Digest || job.isNewInRoll(r) || job.isReplacedInRoll(r)
		if !r.State.Ended() && (r.Stop || !kept) {
			leaving = append(leaving, r)
		}
	}
	lowest := lastRank
	for _, r := range leaving {
		lowest = min(lowest, r.rank())
	}
	if job != nil && job.Discard {
		lowest = min(lowest, a.lowestDiscardedRank())
	}
	for _, r := range leaving {
		if r.rank() == lowest && !r.Stop {
			ids = append(ids, r.ID)
		}
	}
	return ids
}

// lowestDiscardedRank returns the lowest rank among those allocs of jobs with Discard that have not ended.
func (a *Agent) lowestDiscardedRank() int {
	lowest := lastRank + 1
	for _, al := range a.allocs {
		if job := a.jobs[al.record.Job]; job != nil && job.Discard && !al.record.State.Ended() {
			lowest = min(lowest, al.record.rank())
		}
	}
	return lowest
}

// updateVersions moves allocs of unchanged groups to the last version of the job. An alloc that is ending keeps its
// version, because the last version was submitted to run again what ends now.
func (a *Agent) updateVersions(job *JobRecord, allocs []*AllocRecord, want map[slot]string) {
	for _, r := range allocs {
		if r.Version != job.Version && want[r.slot()] == r.Digest && !r.State.Ended() && !r.ending() {
			_ = a.updateLocked(r.ID, func(r *AllocRecord) { r.Version = job.Version })
		}
	}
}

// ending reports whether the alloc ends whatever its tasks do: it was stopped, or has failed, or its leader or all its
// tasks but the sidecars have ended.
func (r *AllocRecord) ending() bool {
	if r.Stop || r.Failed != "" || r.State == AllocReleasing {
		return true
	}
	mainEnded := true
	for _, t := range r.Group.Tasks {
		spec, rec := newTaskSpec(r.JobType, r.Group, t, &Problems{}), r.Tasks[t.Name]
		dead := rec.State == TaskDead
		if rec.Failed || dead && spec.leader {
			return true
		}
		mainEnded = mainEnded && (dead || spec.sidecar)
	}
	return mainEnded
}

// stopLocked orders an alloc to end. The caller holds a.writing.
func (a *Agent) stopLocked(id host.AllocID) error {
	if r := a.allocs[id].record; r.Stop || r.State.Ended() {
		return nil
	}
	return a.stopAllLocked([]host.AllocID{id}, func() {})
}

// stopAllLocked orders the allocs to end, and writes more entries, in one commit. The caller leaves out
// allocs that have ended or are being stopped already. The caller holds a.writing.
func (a *Agent) stopAllLocked(ids []host.AllocID, publish func(), entries ...entry) error {
	err := a.updateAll(ids, func(r *AllocRecord) {
		r.Stop = true
		if r.State != AllocReleasing {
			r.State = AllocStopping
		}
		for _, t := range r.Group.Tasks {
			if r.Tasks[t.Name].State == TaskRunning {
				r.note(t.Name, noteStopping)
			}
		}
	}, publish, entries...)
	if err != nil {
		return err
	}
	for _, id := range ids {
		close(a.allocs[id].stop)
	}
	return nil
}

// placeMissing creates allocs for empty slots.
func (a *Agent) placeMissing(job *JobRecord, allocs []*AllocRecord, want map[slot]string) {
	taken := map[slot]bool{}
	for _, r := range allocs {
		if !r.State.Ended() || want[r.slot()] == r.Digest && job.keepsSlot(r) {
			taken[r.slot()] = true
		}
	}
	a.place(job, func(s slot) bool { return want[s] != "" && !taken[s] && !a.isPaused(job.Job.ID, s) })
}

// placeRolled creates the new allocs of a roll. Depending on the group, a new alloc starts beside the old one or after
// its end.
func (a *Agent) placeRolled(job *JobRecord, allocs []*AllocRecord) {
	rolling := job.rollSlots()
	if len(rolling) == 0 {
		return
	}
	groups := pluginGroups(job.Next)
	taken := map[slot]bool{}
	for _, r := range allocs {
		if job.isNewInRoll(r) || !r.State.Ended() && stopsFirst(groups[r.Group.Name]) {
			taken[r.slot()] = true
		}
	}
	a.place(job.Next, func(s slot) bool { return rolling[s] != "" && !taken[s] })
}

// place creates allocs for the slots of a job for which empty returns true.
func (a *Agent) place(job *JobRecord, empty func(slot) bool) {
	placed, entries := a.newAllocs(job, empty)
	if len(placed) == 0 {
		return
	}
	err := a.checkSpace()
	a.setShortage(err)
	if err != nil {
		return
	}
	_ = a.commit(func() { a.publishNew(placed) }, entries...)
}

// publishNew shows new allocs to readers. The caller holds a.mu.
func (a *Agent) publishNew(placed []*AllocRecord) {
	a.publish(placed, nil)
	for _, r := range placed {
		a.addNotes(r.Notes)
	}
}

// newAllocs makes the records of allocs for the slots of a job for which empty returns true. They are newer than all
// others, even if the clock was set back: a roll needs to know which alloc of a slot is the old one.
func (a *Agent) newAllocs(job *JobRecord, empty func(slot) bool) (placed []*AllocRecord, entries []entry) {
	var last time.Time
	if all := a.Allocs(); len(all) > 0 {
		last = all[len(all)-1].Created
	}
	for _, g := range job.Job.Groups {
		for i := range uint64(g.Count) {
			if !empty(slot{g.Name, i}) {
				continue
			}
			r := newAllocRecord(job, g, i)
			if r.Created.Before(last) {
				r.Created = last.Add(time.Nanosecond)
			}
			r.note("", "placed: group %q, index %d of job %q", g.Name, i, job.Job.ID)
			placed, entries = append(placed, r), append(entries, entry{allocsBucket, string(r.ID), r})
		}
	}
	return placed, entries
}

// keepsSlot reports whether an ended alloc of an unchanged group keeps its slot. It does if it is a batch alloc that
// completed in version RunOnce or later, or any alloc that completed or failed in the current version of the job.
func (j *JobRecord) keepsSlot(r *AllocRecord) bool {
	return r.State == AllocComplete && r.batch() && r.Version >= j.RunOnce ||
		r.State != AllocStopped && r.Version == j.Version
}

// refillsSlot reports whether another alloc of the same group will follow an alloc that ends, so that its volumes are
// kept. One follows if the alloc was stopped, and this or the next version of the job wants the same slot with an
// unchanged group. A roll does not count as a change of the group.
func (j *JobRecord) refillsSlot(r *AllocRecord) bool {
	ended := *r
	ended.State, _ = r.outcome()
	for ; j != nil && !j.Stopped && r.Stop; j = j.Next {
		for _, g := range j.Job.Groups {
			if g.Name == r.Group.Name && r.Index < uint64(g.Count) && !j.keepsSlot(&ended) &&
				digestOf(j.Job.Type, j.Job.Namespace, g, 0) == digestOf(r.JobType, r.Namespace, r.Group, 0) {
				return true
			}
		}
	}
	return false
}

// Slots returns the number of slots that the job wants filled, and a function that reports whether an alloc fills one.
func (j *JobRecord) Slots() (wanted int, filledBy func(*AllocRecord) bool) {
	want := j.wanted()
	return len(want), func(r *AllocRecord) bool {
		switch {
		case r.Job != j.Job.ID || want[r.slot()] != r.Digest:
			return false
		case r.State.Ended():
			return j.keepsSlot(r)
		}
		return !r.Stop
	}
}

// prune removes the files and records of ended allocs, except for the last maxEnded of a job that was not removed. If
// the job still wants a slot that an ended alloc keeps, prune leaves a summary of the alloc. Without the summary, the
// slot would be filled again.
func (a *Agent) prune(job *JobRecord, allocs []*AllocRecord, want map[slot]string) {
	ended := slices.DeleteFunc(slices.Clone(allocs), func(r *AllocRecord) bool { return !r.State.Ended() })
	slices.SortStableFunc(ended, func(x, y *AllocRecord) int { return x.Ended.Compare(y.Ended) })
	if job != nil {
		ended = ended[:max(0, len(ended)-maxEnded)]
	}
	var entries []entry
	var summaries []*AllocRecord
	var gone []host.AllocID
	for _, r := range ended {
		keeps := want[r.slot()] == r.Digest && job.keepsSlot(r)
		if keeps && r.Pruned {
			continue
		}
		if err := mount.RemoveTree(a.dirs(r.ID).root); err != nil {
			a.log.Warn("cannot remove the directory of an ended alloc", "alloc", r.ID, "error", err)
			continue
		}
		if keeps {
			r = r.summary()
			a.logCopyError(r.ID, a.saveSummary(r))
			summaries, entries = append(summaries, r), append(entries, entry{allocsBucket, string(r.ID), r})
		} else {
			gone, entries = append(gone, r.ID), append(entries, entry{allocsBucket, string(r.ID), nil})
		}
	}
	if len(entries) > 0 {
		_ = a.commit(func() { a.publish(summaries, gone) }, entries...)
	}
}

// removeDiscarded removes a job with Discard when its allocs have ended.
func (a *Agent) removeDiscarded(job *JobRecord, allocs []*AllocRecord) {
	if job == nil || !job.Discard || len(unended(allocs, lastRank)) > 0 {
		return
	}
	if a.commit(func() { delete(a.jobs, job.Job.ID) }, entry{jobsBucket, job.Job.ID, nil}) == nil {
		a.wakeRun() // reconcile removes its ended allocs next
	}
}
