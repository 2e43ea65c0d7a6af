package agent

import (
	"cmp"
	"maps"
	"slices"

	"holdfast/host"
	"holdfast/internal/mount"
)

// keptEnded is how many ended allocs of a job are kept with their logs, for people to look at.
const keptEnded = 10

// reconcile makes what runs what the jobs say: it stops what is not wanted or was changed, places what is missing, and runs whatever has
// no runner. Run calls it, on one goroutine.
func (a *Agent) reconcile(run func(host.AllocID)) {
	a.writing.Lock()
	defer a.writing.Unlock()
	if a.Shortage() != "" {
		a.noteShortage(a.room()) // what waited may have been done, or not be wanted any more
	}
	byJob := map[string][]*AllocRecord{}
	for _, r := range a.Allocs() {
		byJob[r.Job] = append(byJob[r.Job], r)
	}
	for _, id := range a.jobOrder(byJob) {
		a.reconcileJob(a.jobs[id], byJob[id])
	}
	for _, r := range a.Allocs() {
		if al := a.allocs[r.ID]; !al.started && !r.State.Ended() && a.broken() == nil {
			al.started = true
			run(r.ID)
		}
	}
}

// jobOrder lists the jobs as they were submitted, plugins first, then those that are gone but have allocs.
func (a *Agent) jobOrder(byJob map[string][]*AllocRecord) []string {
	ids := map[string]int{}
	for id, j := range a.jobs {
		ids[id] = 1
		for _, g := range j.Job.Groups {
			if len(pluginsOf(g)) > 0 {
				ids[id] = 0
			}
		}
	}
	for id := range byJob {
		if _, known := ids[id]; !known {
			ids[id] = 2
		}
	}
	return slices.SortedFunc(maps.Keys(ids), func(x, y string) int {
		if ids[x] != ids[y] {
			return ids[x] - ids[y]
		}
		if j, k := a.jobs[x], a.jobs[y]; j != nil && k != nil && !j.Submitted.Equal(k.Submitted) {
			return j.Submitted.Compare(k.Submitted)
		}
		return cmp.Compare(x, y)
	})
}

// reconcileJob does so for one job; nil: it is gone, and these allocs are left.
func (a *Agent) reconcileJob(job *JobRecord, allocs []*AllocRecord) {
	want := job.wanted()
	if !a.draining.Load() { // otherwise TakeDown stops them, in its order over all jobs
		a.stopUnwanted(allocs, want)
		if len(want) > 0 {
			a.keep(job, allocs, want)
			a.placeMissing(job, allocs, want)
		}
	}
	a.prune(job, allocs, want)
	a.forgetTakenDown(job, allocs)
}

// wanted is the digest of each slot that the job wants filled.
func (j *JobRecord) wanted() map[slot]string {
	want := map[slot]string{}
	if j == nil || j.Stopped {
		return want
	}
	for _, g := range j.Job.Groups {
		d := digest(j, g)
		for i := range uint64(g.Count) {
			want[slot{g.Name, i}] = d
		}
	}
	return want
}

// stopUnwanted stops what has no slot any more, users before plugins: those of a higher rank when those of the lower ones have ended.
func (a *Agent) stopUnwanted(allocs []*AllocRecord, want map[slot]string) {
	unwanted := slices.DeleteFunc(slices.Clone(allocs), func(r *AllocRecord) bool {
		return r.State.Ended() || want[r.slot()] == r.Digest && !r.Stop
	})
	lowest := lastRank
	for _, r := range unwanted {
		lowest = min(lowest, r.rank())
		if job := a.jobs[r.Job]; job != nil && job.TakeDown {
			lowest = min(lowest, a.takeDownRank())
		}
	}
	for _, r := range unwanted {
		if r.rank() == lowest {
			_ = a.stopLocked(r.ID)
		}
	}
}

// keep makes allocs of unchanged groups those of the job's last submission: how they end is how it has done.
func (a *Agent) keep(job *JobRecord, allocs []*AllocRecord, want map[slot]string) {
	for _, r := range allocs {
		if !r.State.Ended() && r.Version != job.Version && want[r.slot()] == r.Digest {
			_ = a.updateLocked(r.ID, func(r *AllocRecord) { r.Version = job.Version })
			a.kept = append(a.kept, r.ID)
		}
	}
}

// stopLocked has an alloc end. a.writing is held.
func (a *Agent) stopLocked(id host.AllocID) error {
	al := a.allocs[id]
	if al.record.Stop || al.record.State.Ended() {
		return nil
	}
	err := a.updateLocked(id, func(r *AllocRecord) {
		r.Stop = true
		if r.State != AllocReleasing {
			r.State = AllocStopping
		}
	})
	if err == nil {
		close(al.stop)
	}
	return err
}

// placeMissing fills slots in which nothing is and nothing has ended by itself.
func (a *Agent) placeMissing(job *JobRecord, allocs []*AllocRecord, want map[slot]string) {
	taken := map[slot]bool{}
	for _, r := range allocs {
		if !r.State.Ended() || want[r.slot()] == r.Digest && job.settledBy(r) {
			taken[r.slot()] = true
		}
	}
	var placed []*AllocRecord
	var entries []entry
	for _, g := range job.Job.Groups {
		for i := range uint64(g.Count) {
			if taken[slot{g.Name, i}] {
				continue
			}
			r := place(job, g, i)
			r.note("", "is placed: group %q, index %d of job %q", g.Name, i, job.Job.ID)
			placed, entries = append(placed, r), append(entries, entry{allocsBucket, string(r.ID), r})
		}
	}
	if len(placed) == 0 {
		return
	}
	err := a.room()
	a.noteShortage(err)
	if err != nil {
		return
	}
	_ = a.commit(func() {
		a.publish(placed, nil)
		for _, r := range placed {
			a.say(r.Notes)
		}
	}, entries...)
}

// settledBy says whether an ended alloc of an unchanged group keeps its slot: it has done what it was for, or has failed and the job was not
// submitted again since.
func (j *JobRecord) settledBy(r *AllocRecord) bool {
	return r.State == AllocComplete && r.batch() && r.Version >= j.Fresh || r.State != AllocStopped && r.Version == j.Version
}

// Standing is how many allocs the job wants, and whether an alloc is one of them: it fills its slot, or has ended and is not run again.
func (j *JobRecord) Standing() (wanted int, stands func(*AllocRecord) bool) {
	want := j.wanted()
	return len(want), func(r *AllocRecord) bool {
		switch {
		case r.Job != j.Job.ID || want[r.slot()] != r.Digest:
			return false
		case r.State.Ended():
			return j.settledBy(r)
		}
		return !r.Stop
	}
}

// prune removes what ended allocs wrote, but for those that ended last, and forgets them. One that settles a slot is remembered for as long as
// the slot is wanted, or the slot would be filled again.
func (a *Agent) prune(job *JobRecord, allocs []*AllocRecord, want map[slot]string) {
	ended := slices.DeleteFunc(slices.Clone(allocs), func(r *AllocRecord) bool { return !r.State.Ended() })
	slices.SortStableFunc(ended, func(x, y *AllocRecord) int { return x.Ended.Compare(y.Ended) })
	if job != nil {
		ended = ended[:max(0, len(ended)-keptEnded)]
	}
	var entries []entry
	var summaries []*AllocRecord
	var gone []host.AllocID
	for _, r := range ended {
		settles := want[r.slot()] == r.Digest && job.settledBy(r)
		if settles && r.Pruned {
			continue
		}
		al := a.allocs[r.ID]
		al.saving.Lock() // a copy of the record that is being written would stay behind
		err := mount.RemoveTree(a.dirs(r.ID).root)
		al.saving.Unlock()
		if err != nil {
			a.log.Warn("what an ended alloc wrote cannot be removed", "alloc", r.ID, "error", err)
			continue
		}
		if settles {
			r = r.summary()
			a.saveSummary(r)
			summaries, entries = append(summaries, r), append(entries, entry{allocsBucket, string(r.ID), r})
		} else {
			gone, entries = append(gone, r.ID), append(entries, entry{allocsBucket, string(r.ID), nil})
		}
	}
	if len(entries) > 0 {
		_ = a.commit(func() { a.publish(summaries, gone) }, entries...)
	}
}
