package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"holdfast/host"
	"holdfast/registry"
)

// alloc is an alloc's record with the channels of its runner. Records are replaced, never changed in place.
type alloc struct {
	record          *AllocRecord
	stop            chan struct{} // closed when the alloc must end
	restartRequests map[host.TaskName]chan registry.RestartRequest
	started         bool // it has a runner
}

func newAlloc(r *AllocRecord) *alloc {
	al := &alloc{record: r, stop: make(chan struct{}),
		restartRequests: map[host.TaskName]chan registry.RestartRequest{}}
	for name := range r.Tasks {
		al.restartRequests[name] = make(chan registry.RestartRequest, 1)
	}
	if r.Stop {
		close(al.stop)
	}
	return al
}

func (a *Agent) failure() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.failed
}

// fail ends Run with err, unless an earlier error ends it already. It returns err.
func (a *Agent) fail(err error) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.failed == nil {
		a.failed = err
	}
	a.announce()
	a.wakeRun()
	return err
}

// announce wakes Await and Notes. The caller holds a.mu.
func (a *Agent) announce() {
	close(a.changed)
	a.changed = make(chan struct{})
}

// commit writes the entries to disk and then calls publish. On a full disk it changes nothing and returns
// registry.ErrExhausted. Any other error ends Run. The caller holds a.writing but not a.mu, so that readers never wait
// for the disk.
func (a *Agent) commit(publish func(), entries ...entry) error {
	err := a.ledger.write(entries...)
	if errors.Is(err, registry.ErrExhausted) {
		a.setShortage(err)
		return err
	}
	if err != nil {
		return a.fail(err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	publish()
	a.announce()
	return nil
}

// publish changes what readers see: it adds or replaces records, and removes those of gone. The caller holds a.mu.
func (a *Agent) publish(records []*AllocRecord, gone []host.AllocID) {
	next := slices.Clone(a.listed)
	for _, r := range records {
		i, found := slices.BinarySearchFunc(next, r, byAge)
		if found {
			next[i] = r
		} else {
			next = slices.Insert(next, i, r)
		}
		if al := a.allocs[r.ID]; al != nil {
			al.record = r
		} else {
			a.allocs[r.ID] = newAlloc(r)
		}
	}
	for _, id := range gone {
		delete(a.allocs, id)
	}
	if len(gone) > 0 {
		next = slices.DeleteFunc(next, func(r *AllocRecord) bool { return a.allocs[r.ID] == nil })
	}
	a.listed = next
}

// byAge orders the oldest first.
func byAge(x, y *AllocRecord) int {
	return cmp.Or(x.Created.Compare(y.Created), cmp.Compare(x.ID, y.ID))
}

// record returns the current record of an alloc, or nil.
func (a *Agent) record(id host.AllocID) *AllocRecord {
	a.mu.Lock()
	defer a.mu.Unlock()
	if al, known := a.allocs[id]; known {
		return al.record
	}
	return nil
}

// update changes an alloc's record on disk, then for readers, then in the alloc's directory.
func (a *Agent) update(id host.AllocID, change func(r *AllocRecord)) error {
	a.writing.Lock()
	defer a.writing.Unlock()
	return a.updateLocked(id, change)
}

// updateLocked is update for callers that hold a.writing.
func (a *Agent) updateLocked(id host.AllocID, change func(r *AllocRecord)) error {
	return a.updateAll([]host.AllocID{id}, change, func() {})
}

// updateAll changes the records of allocs, and writes more entries, in one commit. Then it saves the copies of the
// records in the allocs' directories. The caller holds a.writing.
func (a *Agent) updateAll(
	ids []host.AllocID, change func(r *AllocRecord), publish func(), entries ...entry,
) error {
	var records []*AllocRecord
	var added []Note
	for _, id := range ids {
		next, notes := a.allocs[id].record.withChange(change)
		added = append(added, notes...)
		records, entries = append(records, next), append(entries, entry{allocsBucket, string(id), next})
	}
	err := a.commit(func() {
		publish()
		a.publish(records, nil)
		a.addNotes(added)
	}, entries...)
	if err != nil {
		return err
	}
	for _, r := range records {
		a.logCopyError(r.ID, a.saveCopy(r))
	}
	return nil
}

// updateLater changes an alloc's record for readers only. The next commit of the alloc writes the change to disk. An
// agent that dies before that commit leaves the earlier record, and the next agent must reach the same state from it:
// see the callers.
func (a *Agent) updateLater(id host.AllocID, change func(r *AllocRecord)) error {
	a.writing.Lock()
	defer a.writing.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.failed != nil {
		return a.failed
	}
	next, notes := a.allocs[id].record.withChange(change)
	a.publish([]*AllocRecord{next}, nil)
	a.addNotes(notes)
	a.announce()
	return nil
}

// withChange returns a copy of the record after the change, and the notes that the change has added.
func (r *AllocRecord) withChange(change func(r *AllocRecord)) (next *AllocRecord, added []Note) {
	next = r.clone()
	change(next)
	next.Rev++
	added = slices.Clone(next.Notes[min(len(r.Notes), len(next.Notes)):])
	next.Notes = next.Notes[max(0, len(next.Notes)-maxNotes):]
	return next, added
}

// maxJournal bounds the number of notes that are kept for slow readers of Notes.
const maxJournal = 1000

func (a *Agent) addNotes(notes []Note) {
	a.journal = append(a.journal, notes...)
	if over := len(a.journal) - maxJournal; over > 0 {
		a.journal, a.dropped = slices.Clone(a.journal[over:]), a.dropped+over
	}
}

// note adds a note to the record.
func (r *AllocRecord) note(task host.TaskName, format string, args ...any) {
	n := Note{At: time.Now().UTC(), Job: r.Job, Alloc: r.ID, Task: task, Text: fmt.Sprintf(format, args...)}
	n.Failed = r.State == AllocFailed
	if t := r.Tasks[task]; t != nil {
		n.Failed = t.Failed
	}
	if r.Group.Count > 1 {
		n.Place = fmt.Sprintf("[%d]", r.Index)
	}
	r.Notes = append(r.Notes, n)
}

// Notes calls fn with the notes of this agent process, oldest first, until fn returns an error or ctx ends. Notes that
// exist when ctx ends are still delivered. Only the last maxJournal notes are kept, so a slow fn may miss some.
func (a *Agent) Notes(ctx context.Context, fn func(Note) error) error {
	for next := 0; ; {
		ended := ctx.Err() != nil // before the notes are read, so that the last ones are delivered
		a.mu.Lock()
		next = max(next, a.dropped)
		added, changed := slices.Clone(a.journal[next-a.dropped:]), a.changed
		a.mu.Unlock()
		for _, n := range added {
			if err := fn(n); err != nil {
				return err
			}
		}
		next += len(added)
		if ended {
			return context.Cause(ctx)
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}
