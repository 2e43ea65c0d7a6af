package agent

import (
	"maps"
	"slices"

	"holdfast/host"
	"holdfast/internal/mnt"
)

// keptEnded is how many ended allocs of a job are kept for people to look at.
const keptEnded = 10

// reconcile makes what runs what the jobs say: it stops what is not wanted or was changed, places what is missing, and runs whatever has
// no runner. It is called by one goroutine.
func (a *Agent) reconcile(run func(host.AllocID)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, id := range a.jobOrder() {
		a.reconcileJob(id)
	}
	for _, r := range a.recordsLocked() {
		if al := a.allocs[r.ID]; !al.started && !r.State.Ended() && a.failed == nil {
			al.started = true
			run(r.ID)
		}
	}
}

// jobOrder lists the jobs as they were submitted, plugins first, then those that are gone but have allocs.
func (a *Agent) jobOrder() []string {
	ids := map[string]int{}
	for id, j := range a.jobs {
		ids[id] = 1
		for _, g := range j.Job.Groups {
			if len(pluginsOf(g)) > 0 {
				ids[id] = 0
			}
		}
	}
	for _, al := range a.allocs {
		if _, known := ids[al.record.Job]; !known {
			ids[al.record.Job] = 2
		}
	}
	return slices.SortedFunc(maps.Keys(ids), func(x, y string) int {
		if ids[x] != ids[y] {
			return ids[x] - ids[y]
		}
		if j, k := a.jobs[x], a.jobs[y]; j != nil && k != nil && !j.Submitted.Equal(k.Submitted) {
			return j.Submitted.Compare(k.Submitted)
		}
		return compareText(x, y)
	})
}

// reconcileJob does so for one job.
func (a *Agent) reconcileJob(id string) {
	job, allocs := a.jobs[id], a.allocsOf(id)
	want := map[slot]string{} // slot to digest
	if job != nil && !job.Stopped && !a.draining {
		for _, g := range job.Job.Groups {
			d := digest(job, g)
			for i := range uint64(g.Count) {
				want[slot{g.Name, i}] = d
			}
		}
	}
	if !a.draining { // otherwise TakeDown stops them, in its order over all jobs
		a.stopUnwanted(allocs, want)
	}
	if len(want) > 0 {
		a.keep(job, allocs, want)
		a.placeMissing(job, allocs, want)
	}
	a.prune(allocs, job == nil)
}

func (a *Agent) allocsOf(job string) (out []*AllocRecord) {
	for _, r := range a.recordsLocked() {
		if r.Job == job {
			out = append(out, r)
		}
	}
	return out
}

// stopUnwanted stops what has no slot any more, users before plugins: those of a higher rank when those of the lower ones have ended.
func (a *Agent) stopUnwanted(allocs []*AllocRecord, want map[slot]string) {
	unwanted := slices.DeleteFunc(slices.Clone(allocs), func(r *AllocRecord) bool {
		return r.State.Ended() || want[slot{r.Group.Name, r.Index}] == r.Digest && !r.Stop
	})
	lowest := lastRank
	for _, r := range unwanted {
		lowest = min(lowest, r.rank())
	}
	for _, r := range unwanted {
		if r.rank() == lowest {
			a.stopLocked(r.ID)
		}
	}
}

// keep makes allocs of unchanged groups those of the job's last submission: how they end is how it has done.
func (a *Agent) keep(job *JobRecord, allocs []*AllocRecord, want map[slot]string) {
	for _, r := range allocs {
		if !r.State.Ended() && r.Version != job.Version && want[slot{r.Group.Name, r.Index}] == r.Digest {
			_ = a.updateLocked(r.ID, func(r *AllocRecord) { r.Version = job.Version })
		}
	}
}

// stopLocked has an alloc end. a.mu is held.
func (a *Agent) stopLocked(id host.AllocID) {
	al := a.allocs[id]
	if al.record.Stop || al.record.State.Ended() {
		return
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
}

// placeMissing fills slots in which nothing is and nothing has ended by itself.
func (a *Agent) placeMissing(job *JobRecord, allocs []*AllocRecord, want map[slot]string) {
	for _, g := range job.Job.Groups {
		for i := range uint64(g.Count) {
			d := want[slot{g.Name, i}]
			taken := slices.ContainsFunc(allocs, func(r *AllocRecord) bool {
				if r.Group.Name != g.Name || r.Index != i {
					return false
				}
				return !r.State.Ended() || r.Digest == d && r.settled(job.Version)
			})
			if taken {
				continue
			}
			r := place(job, g, i)
			r.note("", "is placed: group %q, index %d of job %q", g.Name, i, job.Job.ID)
			if err := a.ledger.put(allocsBucket, string(r.ID), r); err != nil {
				_ = a.fail(err)
				return
			}
			a.allocs[r.ID] = newAlloc(r)
			a.say(r.Notes)
			a.announce()
		}
	}
}

// settled says whether an ended alloc keeps its slot: it has done what it was for, or has failed and nobody has submitted the job again.
func (r *AllocRecord) settled(version uint64) bool {
	return r.State == AllocComplete && r.batch() || r.State != AllocStopped && r.Version == version
}

// prune forgets the oldest of the ended allocs, and what they wrote.
func (a *Agent) prune(allocs []*AllocRecord, all bool) {
	ended := slices.DeleteFunc(slices.Clone(allocs), func(r *AllocRecord) bool { return !r.State.Ended() })
	keep := keptEnded
	if all {
		keep = 0
	}
	for _, r := range ended[:max(0, len(ended)-keep)] {
		if err := mnt.RemoveTree(a.dirs(r.ID).root); err != nil {
			a.log.Warn("what an ended alloc wrote cannot be removed", "alloc", r.ID, "error", err)
			continue
		}
		if err := a.ledger.remove(allocsBucket, string(r.ID)); err != nil {
			_ = a.fail(err)
			return
		}
		delete(a.allocs, r.ID)
		a.announce()
	}
}
