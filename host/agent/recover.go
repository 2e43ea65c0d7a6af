package agent

import (
	"context"
	"encoding/json"
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

// Recovery is what an agent does with allocs that an earlier agent started and its own records do not know.
type Recovery string

const (
	RecoverNone  Recovery = ""      // refuse to start
	RecoverAdopt Recovery = "adopt" // restore their records and run them
	RecoverStop  Recovery = "stop"  // restore their records and stop them, users of volumes before plugins
)

// allocFile is agent/allocs/ID/alloc.json: a copy of an alloc's record and its job's, for an agent that lost its ledger.
type allocFile struct {
	Saved time.Time    `json:"saved"`
	Node  Node         `json:"node"`
	Alloc *AllocRecord `json:"alloc"`
	Job   *JobRecord   `json:"job,omitempty"` // nil: purged
}

func (d dirs) file() string { return filepath.Join(d.root, "alloc.json") }

// saveAlloc writes the alloc's file. It is not synced: only living tasks need it, and they do not survive the kernel.
func (a *Agent) saveAlloc(id host.AllocID) error {
	a.mu.Lock()
	al := a.allocs[id]
	a.mu.Unlock()
	if al == nil {
		return nil
	}
	al.saving.Lock()
	defer al.saving.Unlock()
	a.mu.Lock()
	f := allocFile{Saved: time.Now().UTC(), Node: a.node, Alloc: al.record, Job: a.jobs[al.record.Job]}
	a.mu.Unlock()
	return writeAllocFile(a.dirs(id).file(), f)
}

func writeAllocFile(path string, f allocFile) error {
	text, err := encode(f)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", text, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// saveChange saves what has changed after the first copy was written. It may fail: the ledger has it.
func (a *Agent) saveChange(id host.AllocID) { a.noteCopy(id, a.saveAlloc(id)) }

// noteCopy logs the first failure to write a copy, and then none before one has succeeded.
func (a *Agent) noteCopy(id host.AllocID, err error) {
	switch {
	case errors.Is(err, fs.ErrNotExist): // the alloc's directory is removed
	case err == nil:
		a.copyFails.Store(false)
	case !a.copyFails.Swap(true):
		a.log.Warn("the copy of an alloc's record cannot be written; only the first such failure is logged", "alloc", id, "error", err)
	}
}

// saveSummary keeps an alloc's slot settled after its directory is removed, also for an agent that loses its ledger.
func (a *Agent) saveSummary(r *AllocRecord) {
	d := a.dirs(r.ID)
	err := os.MkdirAll(d.root, 0o700)
	if err == nil {
		err = writeAllocFile(d.file(), allocFile{Saved: time.Now().UTC(), Node: a.node, Alloc: r})
	}
	a.noteCopy(r.ID, err)
}

// lostAlloc is an alloc whose file is newer than the ledger.
type lostAlloc struct {
	id       host.AllocID
	file     *allocFile
	handles  map[host.TaskName]taskdriver.Handle // of the last attempts
	running  []string                            // for people
	parents  []string                            // process ids: SIGTERM to one of them stops a task
	damaged  error                               // why file is nil
	outdated bool                                // the ledger has an older record, of a time before the alloc ended
}

// matters says whether an agent without the record would do harm.
func (l *lostAlloc) matters() bool {
	return len(l.running) > 0 || l.outdated || l.file != nil && !l.file.Alloc.State.Ended()
}

// lost finds the allocs that the ledger does not know, or knows only as they were before.
func (a *Agent) lost(ctx context.Context) ([]*lostAlloc, error) {
	root := allocsDir(a.config.StateDir)
	parents, err := a.config.Parents(a.config.StateDir)
	if err != nil {
		return nil, fmt.Errorf("look for tasks that run: %w", err)
	}
	ids := map[host.AllocID][]taskdriver.Parent{}
	for _, p := range parents { // also of an alloc whose directory was removed
		if id, ours := allocOf(a.config.StateDir, p); ours {
			ids[id] = append(ids[id], p)
		}
	}
	entries, err := os.ReadDir(root)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("look for allocs: %w", err)
	}
	for _, e := range entries {
		if id := host.AllocID(e.Name()); ids[id] == nil {
			ids[id] = []taskdriver.Parent{}
		}
	}
	var out []*lostAlloc
	for _, id := range slices.Sorted(maps.Keys(ids)) {
		l := &lostAlloc{id: id}
		known := a.record(l.id)
		l.file, l.damaged = readAllocFile(a.dirs(l.id).file(), l.id)
		if known != nil && (l.file == nil || l.file.Alloc.Rev <= known.Rev) {
			continue
		}
		l.outdated = known != nil && !known.State.Ended()
		if err := a.findHandles(ctx, l); err != nil {
			return nil, err
		}
		l.addParents(ids[id])
		if len(l.running) > 0 || l.file != nil {
			out = append(out, l)
		}
	}
	return out, nil
}

func readAllocFile(path string, id host.AllocID) (*allocFile, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	f := &allocFile{}
	if err := json.Unmarshal(text, f); err != nil {
		return nil, registry.Errorf(registry.ErrDamaged, "%s: %w", path, err)
	}
	if f.Alloc == nil || f.Alloc.ID != id {
		return nil, registry.Errorf(registry.ErrDamaged, "%s is not the record of alloc %s", path, id)
	}
	for name, t := range f.Alloc.Tasks {
		if t == nil {
			return nil, registry.Errorf(registry.ErrDamaged, "%s says nothing of task %q", path, name)
		}
	}
	for _, t := range f.Alloc.Group.Tasks {
		if f.Alloc.Tasks[t.Name] == nil {
			return nil, registry.Errorf(registry.ErrDamaged, "%s does not know task %q", path, t.Name)
		}
	}
	return f, nil
}

// findHandles asks the directories of the alloc's tasks what was started last, and whether it runs.
func (a *Agent) findHandles(ctx context.Context, l *lostAlloc) error {
	l.handles = map[host.TaskName]taskdriver.Handle{}
	entries, err := os.ReadDir(a.dirs(l.id).tasks())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("look for tasks of alloc %s: %w", l.id, err)
	}
	names := map[host.TaskName]bool{}
	for _, e := range entries {
		names[host.TaskName(e.Name())] = true
	}
	if l.file != nil {
		for name := range l.file.Alloc.Tasks {
			names[name] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
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
			return registry.Errorf(registry.ErrUnsupported,
				"task %q of alloc %s: this agent has no driver %q", name, l.id, h.Driver)
		}
		alive, err := d.Adopt(ctx, h)
		if err != nil {
			return fmt.Errorf("task %q of alloc %s: %w", name, l.id, err)
		}
		if alive {
			l.running = append(l.running, fmt.Sprintf("task %q is process %d", name, h.TaskPID))
		}
	}
	return nil
}

// addParents adds tasks whose directories were removed while they run.
func (l *lostAlloc) addParents(parents []taskdriver.Parent) {
	for _, p := range parents {
		l.parents = append(l.parents, strconv.Itoa(p.PID))
		name := host.TaskName(filepath.Base(p.Dir))
		if _, found := l.handles[name]; !found {
			l.running = append(l.running, fmt.Sprintf("task %q is run by process %d", name, p.PID))
		}
	}
}

func (l *lostAlloc) String() string {
	if l.file == nil {
		return fmt.Sprintf("alloc %s (%s)", short(l.id), strings.Join(l.running, ", "))
	}
	r := l.file.Alloc
	facts := slices.Clone(l.running)
	if len(facts) == 0 {
		facts = append(facts, "no task of it runs")
	}
	for _, p := range r.Plugins() {
		facts = append(facts, fmt.Sprintf("plugin %q", p))
	}
	for _, v := range r.Group.Volumes {
		facts = append(facts, fmt.Sprintf("volume %q", v))
	}
	return fmt.Sprintf("alloc %s of job %q (%s)", short(l.id), r.Job, strings.Join(facts, ", "))
}

// recoverLost does with lost allocs what the configuration says. Without any it does nothing.
func (a *Agent) recoverLost(ctx context.Context) error {
	all, err := a.lost(ctx)
	if err != nil || len(all) == 0 {
		return err
	}
	missed := slices.DeleteFunc(slices.Clone(all), func(l *lostAlloc) bool { return !l.matters() })
	if len(missed) == 0 && a.config.Recover == RecoverNone {
		a.log.Warn("agent.db does not know allocs that have ended; --recover=adopt restores their records", "allocs", len(all),
			"directory", filepath.Dir(a.dirs("x").root))
		return nil
	}
	if err := a.unrecorded(missed); err != nil {
		return err
	}
	var names []string
	for _, l := range missed {
		names = append(names, l.String())
	}
	list := strings.Join(names, "; ")
	if a.config.Recover == RecoverNone {
		return registry.Errorf(registry.ErrConflict,
			"%s is older than what runs, or was emptied. It does not know these allocs: %s. Nothing was changed. "+
				"To go on with them: holdfast agent --recover=adopt. To stop them first, users of volumes before plugins: "+
				"holdfast agent --recover=stop. Or put the right agent.db in its place",
			a.ledgerPath(), list)
	}
	a.log.Warn("allocs that agent.db did not know are recovered", "recover", a.config.Recover, "allocs", list)
	return a.restore(all)
}

// unrecorded refuses to start beneath tasks of which no record is left, neither in the ledger nor in the alloc's file: the shim would
// unpublish the volumes that they use.
func (a *Agent) unrecorded(missed []*lostAlloc) error {
	var names, files, pids []string
	for _, l := range missed {
		if l.file != nil {
			continue
		}
		names, files, pids = append(names, l.String()), append(files, a.dirs(l.id).file()), append(pids, l.parents...)
		if !errors.Is(l.damaged, fs.ErrNotExist) {
			names[len(names)-1] += fmt.Sprintf(": %v", l.damaged)
		}
	}
	if len(names) == 0 {
		return nil
	}
	return registry.Errorf(registry.ErrConflict,
		"tasks run that no record describes, and they may use volumes: %s. Nothing was changed. "+
			"Put %s, or this file of each of them, back from a backup: %s. Or stop these tasks, users of volumes before plugins, "+
			"with kill -TERM %s, and start the agent again: it has their volumes released",
		strings.Join(names, "; "), a.ledgerPath(), strings.Join(files, ", "), strings.Join(pids, " "))
}

func (a *Agent) ledgerPath() string { return filepath.Join(a.config.StateDir, "agent", "agent.db") }

// recoverUnpublished does with allocs that run on volumes what the configuration says, if the shim's records are gone: such a shim would not
// release these volumes, and could give them to others.
func (a *Agent) recoverUnpublished(ctx context.Context) error {
	path := hooks.Layout{State: a.config.StateDir}.Database()
	if info, err := os.Stat(path); err != nil && !errors.Is(err, fs.ErrNotExist) || err == nil && info.Size() > 0 {
		return nil // if it cannot be used, the shim says why
	}
	var users []*AllocRecord
	var names []string
	for _, r := range a.Allocs() {
		if r.State.Ended() || !r.UsesVolumes() {
			continue
		}
		for _, t := range r.Group.Tasks {
			running, err := a.runs(ctx, r, t.Name)
			if err != nil {
				return fmt.Errorf("task %q of alloc %s: %w", t.Name, r.ID, err)
			}
			if running {
				users, names = append(users, r), append(names, fmt.Sprintf("alloc %s of job %q", short(r.ID), r.Job))
				break
			}
		}
	}
	if len(users) == 0 {
		return nil
	}
	const repair = "register the volumes again (holdfast volume register), stop what uses them, then holdfast doctor --repair takes the mounts down"
	list := strings.Join(names, "; ")
	if a.config.Recover == RecoverNone {
		return registry.Errorf(registry.ErrConflict,
			"%s is gone or empty, and allocs run on volumes that only it knew: %s. Nothing was changed. Put the right file in its place. "+
				"Or go on without it: holdfast agent --recover=adopt leaves these allocs and their mounts as they are, "+
				"--recover=stop stops them and leaves their mounts; %s", path, list, repair)
	}
	a.log.Warn("the shim's records are lost: mounts of these allocs stay", "recover", a.config.Recover, "allocs", list, "to do", repair)
	for _, r := range users {
		err := a.update(r.ID, func(r *AllocRecord) { r.note("", "uses volumes of which shim.db was lost: %s", repair) })
		if err != nil {
			return err
		}
	}
	if a.config.Recover == RecoverStop {
		return a.takeDownJobs(users)
	}
	return nil
}

// takeDownJobs has the jobs of these allocs stopped in order, then forgotten.
func (a *Agent) takeDownJobs(allocs []*AllocRecord) error {
	a.writing.Lock()
	defer a.writing.Unlock()
	var entries []entry
	jobs := map[string]*JobRecord{}
	for _, r := range allocs {
		if job := a.jobs[r.Job]; job != nil && jobs[r.Job] == nil {
			next := *job
			next.Stopped, next.TakeDown = true, true
			jobs[r.Job], entries = &next, append(entries, entry{jobsBucket, r.Job, &next})
		}
	}
	return a.commit(func() { maps.Copy(a.jobs, jobs) }, entries...)
}

// restore writes the records of lost allocs and their jobs.
func (a *Agent) restore(all []*lostAlloc) error {
	a.writing.Lock()
	defer a.writing.Unlock()
	newest := slices.MaxFunc(all, earlierSaved)
	if err := a.ledger.putText("node id", newest.file.Node.ID); err != nil {
		return err
	}
	var entries []entry
	jobs := a.lostJobs(all)
	for id, job := range jobs {
		entries = append(entries, entry{jobsBucket, id, job})
	}
	var records []*AllocRecord
	for _, l := range all {
		r := l.rebuilt()
		records = append(records, r)
		entries = append(entries, entry{allocsBucket, string(r.ID), r})
	}
	a.node.ID = newest.file.Node.ID
	return a.commit(func() {
		maps.Copy(a.jobs, jobs)
		for _, r := range records {
			delete(a.allocs, r.ID) // an older one may have been told otherwise of its end
		}
		a.publish(records, nil)
	}, entries...)
}

func earlierSaved(x, y *lostAlloc) int { return x.file.Saved.Compare(y.file.Saved) }

// lostJobs are the jobs of lost allocs as they were last. Every file holds the job as it was when the file was saved.
func (a *Agent) lostJobs(all []*lostAlloc) map[string]*JobRecord {
	out := map[string]*JobRecord{}
	bySave := slices.SortedFunc(slices.Values(all), earlierSaved)
	for _, l := range bySave {
		if l.file.Alloc.Pruned {
			continue // it was written without its job
		}
		delete(out, l.file.Alloc.Job)
		if l.file.Job != nil {
			job := *l.file.Job
			out[job.Job.ID] = &job
		}
	}
	for id, job := range out {
		if known := a.jobs[id]; known != nil && known.Version >= job.Version {
			stopped := known.Stopped || known.Version == job.Version && job.Stopped
			*job = *known
			job.Stopped = stopped
		}
		if a.config.Recover == RecoverStop {
			job.Stopped, job.TakeDown = true, true
		}
	}
	if a.config.Recover == RecoverStop { // purged ones have no job; they are taken down with the others
		for _, l := range all {
			r := l.file.Alloc
			if out[r.Job] == nil && a.jobs[r.Job] == nil {
				job := JobRecord{Version: r.Version, Submitted: r.Created, Stopped: true, TakeDown: true}
				job.Job.ID, job.Job.Type = r.Job, r.JobType
				out[r.Job] = &job
			}
		}
	}
	return out
}

// rebuilt is the alloc's record with what its tasks' directories know better.
func (l *lostAlloc) rebuilt() *AllocRecord {
	r := l.file.Alloc.clone()
	for name, t := range r.Tasks {
		h, found := l.handles[name]
		if !found || t.State == TaskDead || t.Handle != nil && t.Handle.ID == h.ID {
			continue
		}
		number, is := strings.CutPrefix(h.ID, strings.TrimSuffix(attemptID(l.id, name, 0), "0"))
		attempt, err := strconv.ParseUint(number, 10, 64)
		if !is || err != nil || attempt < t.Attempt {
			continue
		}
		// Field 22 of /proc/PID/stat counts in hundredths of a second.
		started := host.BootTime{Boot: h.Boot, At: time.Duration(h.TaskStart) * (time.Second / 100)}
		t.State, t.Attempt, t.Handle, t.Started, t.Reason = TaskRunning, attempt, &h, started, ""
	}
	r.Rev++
	if r.State.Ended() {
		return r
	}
	r.note("", "is recovered: agent.db did not know it")
	return r
}

// saveKept saves allocs that reconcile has made another version's.
func (a *Agent) saveKept() {
	a.writing.Lock()
	kept := a.kept
	a.kept = nil
	a.writing.Unlock()
	for _, id := range kept {
		a.saveChange(id)
	}
}

// forgetTakenDown forgets a job that was to be taken down, once it is. a.writing is held.
func (a *Agent) forgetTakenDown(job *JobRecord, allocs []*AllocRecord) {
	if job == nil || !job.TakeDown {
		return
	}
	if slices.ContainsFunc(allocs, func(r *AllocRecord) bool { return !r.State.Ended() }) {
		return
	}
	if a.commit(func() { delete(a.jobs, job.Job.ID) }, entry{jobsBucket, job.Job.ID, nil}) == nil {
		a.kick() // its ended allocs are removed next
	}
}

// takeDownRank is the lowest rank of the allocs that jobs with TakeDown have left; more than lastRank if there are none. Those
// of higher ranks wait for them.
func (a *Agent) takeDownRank() int {
	lowest := lastRank + 1
	for _, al := range a.allocs {
		if job := a.jobs[al.record.Job]; job != nil && job.TakeDown && !al.record.State.Ended() {
			lowest = min(lowest, al.record.rank())
		}
	}
	return lowest
}

// ParseRecovery reads the name of a Recovery.
func ParseRecovery(s string) (Recovery, error) {
	r := Recovery(s)
	if r != RecoverNone && r != RecoverAdopt && r != RecoverStop {
		return "", registry.Invalid("%q: use %s or %s", s, RecoverAdopt, RecoverStop)
	}
	return r, nil
}
