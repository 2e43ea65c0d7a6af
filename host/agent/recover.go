package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

// Recovery says what an agent does with tasks that are missing in its ledger, although an earlier agent has started
// them.
type Recovery string

const (
	RecoverNone  Recovery = ""      // refuse to start
	RecoverAdopt Recovery = "adopt" // restore their records and run them
	RecoverStop  Recovery = "stop"  // restore their records and stop them, users of volumes before plugins
)

// ParseRecovery parses the name of a Recovery.
func ParseRecovery(s string) (Recovery, error) {
	r := Recovery(s)
	if r != RecoverNone && r != RecoverAdopt && r != RecoverStop {
		return "", registry.Invalid("%q: use %s or %s", s, RecoverAdopt, RecoverStop)
	}
	return r, nil
}

// lostAlloc is an alloc whose copied record is newer than the ledger, or an alloc with tasks but without any record.
type lostAlloc struct {
	id       host.AllocID
	copy     *allocCopy
	copyErr  error                               // why copy is nil
	handles  map[host.TaskName]taskdriver.Handle // of the last attempts
	running  []string                            // descriptions of running tasks
	parents  []string                            // pids of parent processes
	outdated bool                                // the ledger says that the alloc has not ended
}

// matters reports whether an agent that does not know the record would do harm.
func (l *lostAlloc) matters() bool {
	return len(l.running) > 0 || l.outdated || l.copy != nil && !l.copy.Alloc.State.Ended()
}

// findLost returns the allocs whose record in the ledger is missing, or older than the copy in the alloc's directory.
func (a *Agent) findLost(ctx context.Context) ([]*lostAlloc, error) {
	parents, err := a.config.Parents(a.config.StateDir)
	if err != nil {
		return nil, fmt.Errorf("list running tasks: %w", err)
	}
	parentsOf := map[host.AllocID][]taskdriver.Parent{}
	for _, p := range parents { // this includes allocs whose directory was removed
		if id, ours := allocOf(a.config.StateDir, p); ours {
			parentsOf[id] = append(parentsOf[id], p)
		}
	}
	entries, err := os.ReadDir(allocsDir(a.config.StateDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list alloc directories: %w", err)
	}
	for _, e := range entries {
		if id := host.AllocID(e.Name()); parentsOf[id] == nil {
			parentsOf[id] = []taskdriver.Parent{}
		}
	}
	var out []*lostAlloc
	for _, id := range slices.Sorted(maps.Keys(parentsOf)) {
		l := &lostAlloc{id: id}
		recorded := a.record(id)
		l.copy, l.copyErr = readCopy(a.dirs(id).copy(), id)
		if recorded != nil && (l.copy == nil || l.copy.Alloc.Rev <= recorded.Rev) {
			continue
		}
		l.outdated = recorded != nil && !recorded.State.Ended()
		if err := a.findHandles(ctx, l); err != nil {
			return nil, err
		}
		l.addParents(parentsOf[id])
		if len(l.running) > 0 || l.copy != nil {
			out = append(out, l)
		}
	}
	return out, nil
}

// findHandles finds the last started attempt of each task in the alloc's directory, and which of them still run.
func (a *Agent) findHandles(ctx context.Context, l *lostAlloc) error {
	l.handles = map[host.TaskName]taskdriver.Handle{}
	entries, err := os.ReadDir(a.dirs(l.id).tasks())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("list the tasks of alloc %s: %w", l.id, err)
	}
	for _, e := range entries {
		name := host.TaskName(e.Name())
		h, found, err := a.config.Find(ctx, a.dirs(l.id).task(name))
		if err != nil {
			return fmt.Errorf("task %q of alloc %s: %w", name, l.id, err)
		}
		if !found {
			continue
		}
		l.handles[name] = h
		d := a.drivers[h.Driver]
		if d == nil {
			return registry.Errorf(registry.ErrUnsupported, "task %q of alloc %s: this agent has no driver %q", name,
				l.id, h.Driver)
		}
		alive, err := d.Adopt(ctx, h)
		if err != nil {
			return fmt.Errorf("task %q of alloc %s: %w", name, l.id, err)
		}
		if alive {
			l.running = append(l.running, fmt.Sprintf("task %q has pid %d", name, h.TaskPID))
		}
	}
	return nil
}

// addParents adds the pids of the parents, and a running task for each parent whose task's directory was removed.
func (l *lostAlloc) addParents(parents []taskdriver.Parent) {
	for _, p := range parents {
		l.parents = append(l.parents, strconv.Itoa(p.PID))
		name := host.TaskName(filepath.Base(p.Dir))
		if _, found := l.handles[name]; !found {
			l.running = append(l.running, fmt.Sprintf("the parent process of task %q has pid %d", name, p.PID))
		}
	}
}

func (l *lostAlloc) String() string {
	if l.copy == nil {
		return fmt.Sprintf("alloc %s (%s)", short(l.id), strings.Join(l.running, ", "))
	}
	r := l.copy.Alloc
	facts := slices.Clone(l.running)
	if len(facts) == 0 {
		facts = append(facts, "no running task")
	}
	for _, p := range r.Plugins() {
		facts = append(facts, fmt.Sprintf("plugin %q", p))
	}
	for _, v := range r.Group.Volumes {
		facts = append(facts, fmt.Sprintf("volume %q", v))
	}
	return fmt.Sprintf("alloc %s of job %s (%s)", short(l.id), r.Job, strings.Join(facts, ", "))
}

// recoverLost refuses or recovers lost allocs, as configured.
func (a *Agent) recoverLost(ctx context.Context) error {
	all, err := a.findLost(ctx)
	if err != nil || len(all) == 0 {
		return err
	}
	matter := slices.DeleteFunc(slices.Clone(all), func(l *lostAlloc) bool { return !l.matters() })
	if len(matter) == 0 && a.config.Recover == RecoverNone {
		a.log.Warn("agent.db has no records of some ended allocs; --recover=adopt restores them", "allocs", len(all),
			"directory", allocsDir(a.config.StateDir))
		return nil
	}
	if err := a.checkRecorded(matter); err != nil {
		return err
	}
	var names []string
	for _, l := range matter {
		names = append(names, l.String())
	}
	list := strings.Join(names, "; ")
	if a.config.Recover == RecoverNone {
		return registry.Errorf(registry.ErrConflict,
			"%s is outdated or empty. It has no current records of these allocs: %s. Nothing was changed. "+
				"To adopt them: holdfast agent --recover=adopt. To stop them, users of volumes before plugins: "+
				"holdfast agent --recover=stop. Or restore the newest agent.db",
			ledgerPath(a.config.StateDir), list)
	}
	a.log.Warn("recovering allocs that agent.db does not know", "recover", a.config.Recover, "allocs", list)
	return a.restore(all)
}

// checkRecorded returns an error if running tasks have a record neither in the ledger nor in the alloc's directory.
// The shim would unpublish the volumes that they use.
func (a *Agent) checkRecorded(lost []*lostAlloc) error {
	var names, files, pids []string
	for _, l := range lost {
		if l.copy != nil {
			continue
		}
		name := l.String()
		if !errors.Is(l.copyErr, fs.ErrNotExist) {
			name += fmt.Sprintf(": %v", l.copyErr)
		}
		names, files, pids = append(names, name), append(files, a.dirs(l.id).copy()), append(pids, l.parents...)
	}
	if len(names) == 0 {
		return nil
	}
	return registry.Errorf(registry.ErrConflict,
		"running tasks have no record, and may use volumes: %s. Nothing was changed. "+
			"Restore %s, or these files, from a backup: %s. Or stop these tasks, users of volumes before plugins, "+
			"with kill -TERM %s, and start the agent again, which releases their volumes",
		strings.Join(names, "; "), ledgerPath(a.config.StateDir), strings.Join(files, ", "), strings.Join(pids, " "))
}

// recoverLostVolumes is for the case that the shim's records are gone while running allocs use volumes. It returns an
// error (RecoverNone), keeps these allocs with a note (RecoverAdopt), or also discards their jobs (RecoverStop). A shim
// without its records would not release the volumes, and could give them to other allocs.
func (a *Agent) recoverLostVolumes(ctx context.Context) error {
	path := hooks.Layout{State: a.config.StateDir}.Database()
	info, err := os.Stat(path)
	if gone := errors.Is(err, fs.ErrNotExist) || err == nil && info.Size() == 0; !gone {
		return nil // if the database is unusable, the shim reports it
	}
	var users []*AllocRecord
	var names []string
	for _, r := range a.Allocs() {
		if r.State.Ended() || !r.UsesVolumes() {
			continue
		}
		for _, t := range r.Group.Tasks {
			running, err := a.isRunning(ctx, r, t.Name)
			if err != nil {
				return err
			}
			if running {
				users, names = append(users, r), append(names, a.describeAlloc(r.ID))
				break
			}
		}
	}
	if len(users) == 0 {
		return nil
	}
	const repair = "register the volumes again (holdfast volume register), stop their users, " +
		"then run holdfast doctor --repair, which unmounts them"
	list := strings.Join(names, "; ")
	if a.config.Recover == RecoverNone {
		return registry.Errorf(registry.ErrConflict,
			"%s is gone or empty, but running allocs use volumes that were recorded there: %s. Nothing was changed. "+
				"Restore the file. Or continue without it: "+
				"holdfast agent --recover=adopt keeps these allocs and their mounts, "+
				"--recover=stop stops them and keeps their mounts; then %s", path, list, repair)
	}
	a.log.Warn("the shim's records are lost; the mounts of these allocs stay", "recover", a.config.Recover, "allocs",
		list, "todo", repair)
	for _, r := range users {
		err := a.update(r.ID, func(r *AllocRecord) {
			r.note("", "shim.db, which recorded its volumes, was lost: %s", repair)
		})
		if err != nil {
			return err
		}
	}
	if a.config.Recover == RecoverStop {
		return a.discardJobs(users)
	}
	return nil
}

// discardJobs sets Discard for the jobs of the allocs.
func (a *Agent) discardJobs(allocs []*AllocRecord) error {
	a.writing.Lock()
	defer a.writing.Unlock()
	jobs := map[string]*JobRecord{}
	a.addDiscarded(jobs, allocs)
	return a.commit(func() { maps.Copy(a.jobs, jobs) }, jobEntries(jobs)...)
}

// addDiscarded adds the jobs of the allocs, with Discard set, to jobs. If a job was purged, it adds a minimal one.
func (a *Agent) addDiscarded(jobs map[string]*JobRecord, allocs []*AllocRecord) {
	for _, r := range allocs {
		next := JobRecord{Job: hooks.Job{ID: r.Job, Type: r.JobType}, Version: r.Version, Submitted: r.Created}
		if job := cmp.Or(jobs[r.Job], a.jobs[r.Job]); job != nil {
			next = *job
		}
		next.Stopped, next.Discard = true, true
		jobs[r.Job] = &next
	}
}

func jobEntries(jobs map[string]*JobRecord) (entries []entry) {
	for id, job := range jobs {
		entries = append(entries, entry{jobsBucket, id, job})
	}
	return entries
}

// restore writes the records of lost allocs and of their jobs, and takes over the node ID of the newest copy.
func (a *Agent) restore(all []*lostAlloc) error {
	a.writing.Lock()
	defer a.writing.Unlock()
	newest := slices.MaxFunc(all, bySaved)
	var records []*AllocRecord
	for _, l := range all {
		records = append(records, l.recoveredRecord())
	}
	jobs := a.lostJobs(all)
	if a.config.Recover == RecoverStop {
		a.addDiscarded(jobs, records)
	}
	entries := append(jobEntries(jobs), entry{metaBucket, nodeKey, newest.copy.Node.ID})
	for _, r := range records {
		entries = append(entries, entry{allocsBucket, string(r.ID), r})
	}
	return a.commit(func() {
		a.node.ID = newest.copy.Node.ID
		maps.Copy(a.jobs, jobs)
		for _, r := range records {
			delete(a.allocs, r.ID) // publish then makes new channels, which fit the recovered record
		}
		a.publish(records, nil)
	}, entries...)
}

func bySaved(x, y *lostAlloc) int { return x.copy.Saved.Compare(y.copy.Saved) }

// lostJobs returns the jobs of lost allocs, from the newest copies or from the ledger. A job that the newest copy lacks
// was purged.
func (a *Agent) lostJobs(all []*lostAlloc) map[string]*JobRecord {
	out := map[string]*JobRecord{}
	for _, l := range slices.SortedFunc(slices.Values(all), bySaved) {
		if l.copy.Alloc.Pruned {
			continue // a summary is saved without its job
		}
		delete(out, l.copy.Alloc.Job)
		if l.copy.Job != nil {
			out[l.copy.Job.Job.ID] = l.copy.Job
		}
	}
	for id, job := range out { // a record in the ledger may be newer, but only the copy may know of a stop
		if recorded := a.jobs[id]; recorded != nil && recorded.Version >= job.Version {
			next := *recorded
			next.Stopped = recorded.Stopped || recorded.Version == job.Version && job.Stopped
			out[id] = &next
		}
	}
	return out
}

// recoveredRecord returns the copied record. It adds handles that the record lacks, but none of an attempt before the
// recorded one.
func (l *lostAlloc) recoveredRecord() *AllocRecord {
	r := l.copy.Alloc.clone()
	for name, t := range r.Tasks {
		h, found := l.handles[name]
		if !found || t.State == TaskDead || t.Handle != nil && t.Handle.ID == h.ID {
			continue
		}
		number, ours := strings.CutPrefix(h.ID, attemptPrefix(l.id, name))
		attempt, err := strconv.ParseUint(number, 10, 64)
		if !ours || err != nil || attempt < t.Attempt {
			continue
		}
		// The kernel counts the start times of processes in hundredths of a second.
		started := host.BootTime{Boot: h.Boot, At: time.Duration(h.TaskStart) * (time.Second / 100)}
		t.State, t.Attempt, t.Handle, t.Started, t.Reason = TaskRunning, attempt, &h, started, ""
	}
	r.Rev++
	if !r.State.Ended() {
		r.note("", "recovered: it had no current record in agent.db")
	}
	return r
}
