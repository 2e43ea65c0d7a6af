package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

// Config says where an agent keeps its state and what it can run. StateDir and Drivers are required.
type Config struct {
	StateDir string // the same as the host's: the agent keeps its own below agent/
	Name     string // of this node; default the machine's host name
	Drivers  []taskdriver.Driver
	Override string // the driver of every task, whatever its job says; empty: as the job says
	Logger   hclog.Logger

	// Find finds the task that was started in a directory without anybody living to note it; default taskdriver.Find.
	Find func(ctx context.Context, dir string) (taskdriver.Handle, bool, error)
	// Parents lists the processes that run tasks below the state directory; default taskdriver.Parents.
	Parents func(dir string) ([]taskdriver.Parent, error)
	// Recover says what Living does if the ledger does not know what runs. Unless it is RecoverNone, New moves a damaged ledger away.
	Recover Recovery
	// Backoff is between two tries to prepare or release an alloc: first, and at most. Default 250 ms and 15 s.
	Backoff [2]time.Duration
}

// Agent runs jobs. Its methods may be called at the same time; what changes jobs needs Run to be under way in order to have an effect.
type Agent struct {
	config  Config
	log     hclog.Logger
	ledger  *ledger
	node    Node
	drivers map[string]taskdriver.Driver
	kicked  chan struct{} // holds one: something is to be reconciled

	draining atomic.Bool
	forced   chan struct{} // closed when no task is given time to end any more

	// writing serializes changes. It is held from reading the current records until the change is on disk and published.
	writing sync.Mutex

	// mu guards the published records. It is never held during a write to disk. Changing these fields needs writing as well.
	mu      sync.Mutex
	jobs    map[string]*JobRecord
	allocs  map[host.AllocID]*alloc
	listed  []*AllocRecord // those of allocs, the oldest first; replaced as a whole
	journal []Note         // of this agent's life, the newest last
	dropped int            // notes that are not in the journal any more
	changed chan struct{}  // closed at the next change
	again   chan struct{}  // closed when what waits may be tried again
	failed  error          // the ledger's first error

	kept     []host.AllocID // allocs that are another version's now, and not saved yet; guarded by writing
	shortage string         // see Shortage
	retrying bool           // reconcile is going to be called because of a shortage

	copyFails atomic.Bool // the last copy of an alloc's record could not be written
}

// alloc is an alloc with what its runner listens to. A record is never changed in place once it is here.
type alloc struct {
	record   *AllocRecord
	stop     chan struct{} // closed when it is to end
	restarts map[host.TaskName]chan host.PendingRestart
	started  bool       // it has a runner
	saving   sync.Mutex // held while its file is written
}

func newAlloc(r *AllocRecord) *alloc {
	al := &alloc{record: r, stop: make(chan struct{}), restarts: map[host.TaskName]chan host.PendingRestart{}}
	for name := range r.Tasks {
		al.restarts[name] = make(chan host.PendingRestart, 1)
	}
	if r.Stop {
		close(al.stop)
	}
	return al
}

// New opens the agent's ledger. It starts nothing.
func New(c Config) (*Agent, error) {
	if c.StateDir == "" || len(c.Drivers) == 0 {
		return nil, registry.Invalid("agent: Config.StateDir and Config.Drivers are required")
	}
	if err := c.complete(); err != nil {
		return nil, err
	}
	l, err := c.openLedger()
	if err != nil {
		return nil, err
	}
	a := &Agent{
		config: c, log: c.Logger, ledger: l, drivers: map[string]taskdriver.Driver{}, kicked: make(chan struct{}, 1),
		allocs: map[host.AllocID]*alloc{}, changed: make(chan struct{}), again: make(chan struct{}),
		forced: make(chan struct{}),
	}
	for _, d := range c.Drivers {
		a.drivers[d.Name()] = d
	}
	if err := a.load(); err != nil {
		return nil, errors.Join(err, l.close())
	}
	if err := a.room(); err != nil {
		a.log.Warn("the agent begins on a full disk", "error", err)
	}
	return a, nil
}

func (c *Config) complete() (err error) {
	if c.Name == "" {
		if c.Name, err = os.Hostname(); err != nil {
			return fmt.Errorf("name of this node: %w", err)
		}
	}
	if c.StateDir, err = filepath.Abs(c.StateDir); err != nil {
		return fmt.Errorf("state directory: %w", err)
	}
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	if c.Find == nil {
		c.Find = taskdriver.Find
	}
	if c.Parents == nil {
		c.Parents = taskdriver.Parents
	}
	if c.Backoff == [2]time.Duration{} {
		c.Backoff = [2]time.Duration{250 * time.Millisecond, 15 * time.Second}
	}
	return nil
}

func (a *Agent) load() error {
	id, err := a.ledger.text("node id", newID)
	if err != nil {
		return err
	}
	a.node = Node{ID: id, Name: a.config.Name}
	jobs, records, err := a.ledger.load()
	if err != nil {
		return err
	}
	a.jobs = jobs
	a.publish(slices.SortedFunc(maps.Values(records), byAge), nil)
	return nil
}

// Close closes the ledger. Run has to have returned.
func (a *Agent) Close() error { return a.ledger.close() }

// Node is this machine.
func (a *Agent) Node() Node { return a.node }

// Run runs what the ledger holds and what is submitted, until ctx ends; then it leaves all tasks running and returns nil. Another error is
// the ledger's: what cannot be written down is not done. A full disk is none: what needs room waits for it.
func (a *Agent) Run(ctx context.Context, s Storage) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() { a.followRestarts(ctx, s) })
	wg.Go(func() { a.followPlugins(ctx, s) })
	a.kick()
	for ctx.Err() == nil && a.broken() == nil {
		select {
		case <-a.kicked:
			a.reconcile(func(id host.AllocID) {
				wg.Go(func() {
					a.runner(id, s).run(ctx)
					a.kick()
				})
			})
			a.saveKept()
		case <-ctx.Done():
		}
	}
	cancel()
	wg.Wait()
	return a.broken()
}

// kick has the jobs compared with what runs.
func (a *Agent) kick() {
	select {
	case a.kicked <- struct{}{}:
	default: // it is going to be done anyway
	}
}

// Retry has whatever waits tried again.
func (a *Agent) Retry() {
	a.mu.Lock()
	defer a.mu.Unlock()
	close(a.again)
	a.again = make(chan struct{})
}

func (a *Agent) whenRetried() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.again
}

func (a *Agent) broken() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.failed
}

// fail ends Run: the ledger is the agent's memory.
func (a *Agent) fail(err error) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.failed == nil {
		a.failed = err
	}
	a.announce()
	a.kick()
	return err
}

// announce wakes whoever waits for a change. a.mu is held.
func (a *Agent) announce() {
	close(a.changed)
	a.changed = make(chan struct{})
}

// commit writes the entries down, and then publishes what they say. If there is no room for them nothing has changed, and the error is
// registry.ErrExhausted; any other error ends Run. The caller holds a.writing and not a.mu, so readers never wait for the disk.
func (a *Agent) commit(publish func(), entries ...entry) error {
	err := a.ledger.write(entries...)
	if errors.Is(err, registry.ErrExhausted) {
		a.noteShortage(err)
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

// publish has readers see these records, and not any more those that are gone. a.mu is held.
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

// record is the alloc as it is now; nil if it is not known.
func (a *Agent) record(id host.AllocID) *AllocRecord {
	a.mu.Lock()
	defer a.mu.Unlock()
	if al, known := a.allocs[id]; known {
		return al.record
	}
	return nil
}

// update changes an alloc's record, on disk first.
func (a *Agent) update(id host.AllocID, change func(r *AllocRecord)) error {
	a.writing.Lock()
	defer a.writing.Unlock()
	return a.updateLocked(id, change)
}

// updateLocked is update for who holds a.writing.
func (a *Agent) updateLocked(id host.AllocID, change func(r *AllocRecord)) error {
	next := a.allocs[id].record.clone()
	had := len(next.Notes)
	change(next)
	next.Rev++
	fresh := slices.Clone(next.Notes[min(had, len(next.Notes)):])
	next.Notes = next.Notes[max(0, len(next.Notes)-maxNotes):]
	return a.commit(func() {
		a.publish([]*AllocRecord{next}, nil)
		a.say(fresh)
	}, entry{allocsBucket, string(id), next})
}

// maxJournal bounds the notes that a follower may be behind.
const maxJournal = 1000

func (a *Agent) say(notes []Note) {
	a.journal = append(a.journal, notes...)
	if over := len(a.journal) - maxJournal; over > 0 {
		a.journal, a.dropped = slices.Clone(a.journal[over:]), a.dropped+over
	}
}

// note adds something that happened to the record.
func (r *AllocRecord) note(task host.TaskName, format string, args ...any) {
	n := Note{At: time.Now().UTC(), Job: r.Job, Alloc: r.ID, Task: task, Text: fmt.Sprintf(format, args...)}
	if r.Group.Count > 1 {
		n.Place = fmt.Sprintf("[%d]", r.Index)
	}
	r.Notes = append(r.Notes, n)
}

// Notes calls fn with what has happened to allocs since this agent began, as far as it is kept, and with what happens then, in order, until
// fn or ctx ends it. What has happened when ctx ends is still told.
func (a *Agent) Notes(ctx context.Context, fn func(Note) error) error {
	for at := 0; ; {
		over := ctx.Err() != nil
		a.mu.Lock()
		at = max(at, a.dropped)
		fresh, changed := slices.Clone(a.journal[at-a.dropped:]), a.changed
		a.mu.Unlock()
		for _, n := range fresh {
			if err := fn(n); err != nil {
				return err
			}
		}
		at += len(fresh)
		if over {
			return context.Cause(ctx)
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// Await returns when the condition holds for all allocs there are, the oldest first.
func (a *Agent) Await(ctx context.Context, holds func([]*AllocRecord) bool) error {
	for {
		a.mu.Lock()
		all, changed, failed := a.listed, a.changed, a.failed
		a.mu.Unlock()
		switch {
		case failed != nil:
			return failed
		case holds(all):
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Allocs lists all allocs, the oldest first. Neither the list nor its records are to be changed.
func (a *Agent) Allocs() []*AllocRecord {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.listed
}

// Jobs lists all jobs by id. The records are not to be changed.
func (a *Agent) Jobs() []*JobRecord {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.SortedFunc(maps.Values(a.jobs), func(x, y *JobRecord) int { return cmp.Compare(x.Job.ID, y.Job.ID) })
}

// isolated says whether the driver gives its tasks a file system of their own.
func (a *Agent) isolated(name string) bool {
	d, known := a.drivers[name]
	return known && d.Isolated()
}

func (a *Agent) dirs(id host.AllocID) dirs {
	return dirs{filepath.Join(allocsDir(a.config.StateDir), string(id))}
}

// allocsDir has a directory for each alloc.
func allocsDir(state string) string { return filepath.Join(state, "agent", "allocs") }

// allocOf returns the alloc of a task's parent, if an agent of this state directory started it.
func allocOf(state string, p taskdriver.Parent) (id host.AllocID, ours bool) {
	below, ours := strings.CutPrefix(p.Dir, allocsDir(state)+"/")
	first, _, _ := strings.Cut(below, "/")
	return host.AllocID(first), ours
}
