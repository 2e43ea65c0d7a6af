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

	"github.com/cenkalti/backoff/v5"
	"github.com/google/uuid"
	"github.com/hashicorp/go-hclog"

	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/internal/mount"
	"holdfast/registry"
)

// Config configures an agent. StateDir and Drivers are required.
type Config struct {
	StateDir string // the host's state directory; the agent uses agent/ below it
	Name     string // of this node; default: the host name
	Drivers  []taskdriver.Driver
	Override string // driver of every task, whatever the job says; empty: the job's choice
	Logger   hclog.Logger

	// Find finds a task that was started in dir but not recorded; default taskdriver.Find.
	Find func(ctx context.Context, dir string) (taskdriver.Handle, bool, error)
	// Parents lists the parent processes of tasks below the state directory; default taskdriver.Parents.
	Parents func(dir string) ([]taskdriver.Parent, error)
	// Recover says what to do with running tasks that the ledger does not know. Unless it is RecoverNone, New moves
	// a damaged ledger away.
	Recover Recovery
}

var _ Storage = (*host.Host)(nil)

// Storage is the part of host.Host that an agent needs to run jobs. It provides the volumes of allocs, and reports
// plugin tasks to the shim.
type Storage interface {
	Volumes
	TaskStarting(ctx context.Context, t host.AllocTask) (host.Plan, error)
	TaskStarted(ctx context.Context, k host.TaskKey, attempt uint64) error
	TaskStopping(ctx context.Context, k host.TaskKey, attempt uint64) error
	PreferTask(ctx context.Context, k host.TaskKey, attempt uint64) error
	TaskExited(ctx context.Context, k host.TaskKey, attempt uint64, code, signal int, final bool) error
}

// Volumes provides the volumes of allocs.
type Volumes interface {
	Lister
	PrepareAlloc(ctx context.Context, g host.AllocGroup) (map[string]host.Plan, error)
	ReleaseAlloc(ctx context.Context, id host.AllocID) error
	ReplaceAlloc(ctx context.Context, id host.AllocID) error
	// Nodes says whether this node is drained.
	Nodes(ctx context.Context, q host.NodeQuery) ([]host.NodeStatus, host.Seq, error)
	// Watch calls fn with events until ctx ends. The agent stops allocs that have lost their volumes.
	Watch(ctx context.Context, o host.WatchOptions, fn func(host.Event) error) error
	// Allocs reports what an alloc waits for.
	Allocs(ctx context.Context, q host.AllocQuery) ([]host.AllocStatus, host.Seq, error)
}

// Lister lists volumes with their holders, and plugins with their tasks.
type Lister interface {
	Volumes(ctx context.Context, q host.VolumeQuery) ([]host.VolumeStatus, host.Seq, error)
	// Plugins also says which tasks the shim wants to be restarted.
	Plugins(ctx context.Context, q host.PluginQuery) (host.PluginList, host.Seq, error)
}

// Agent runs jobs. Its methods may be called concurrently. Changes of jobs take effect while Run runs.
type Agent struct {
	config  Config
	log     hclog.Logger
	ledger  *ledger
	node    Node
	drivers map[string]taskdriver.Driver
	wake    chan struct{} // capacity 1: reconcile has work

	shuttingDown atomic.Bool   // all allocs are stopped, because the agent ends
	drained      atomic.Bool   // the node is drained
	drainKnown   atomic.Bool   // the shim has set drained, or is late. Until then nothing new is placed or started
	graceOver    chan struct{} // closed when tasks get no more grace; mu guards it

	// writing serializes changes. It is held while records are read, changed, written to disk and published.
	writing sync.Mutex

	// mu guards the published records. It is never held during a write to disk. Changing these fields also needs
	// writing.
	mu      sync.Mutex
	jobs    map[string]*JobRecord
	allocs  map[host.AllocID]*alloc
	listed  []*AllocRecord // records of allocs, oldest first; replaced as a whole
	journal []Note         // of this agent process, newest last
	dropped int            // number of notes removed from the front of journal
	changed chan struct{}  // closed at the next change
	retry   chan struct{}  // closed when waiting work may be retried
	failed  error          // first error of the ledger
	paused  map[pausedSlot]bool

	engine engineMounts

	shortage string // see Shortage; mu guards it, and retrying
	retrying bool   // a retry because of a shortage is scheduled
}

// New opens the agent's ledger. It starts nothing.
func New(c Config) (*Agent, error) {
	if c.StateDir == "" || len(c.Drivers) == 0 {
		return nil, registry.Invalid("agent: Config.StateDir and Config.Drivers are required")
	}
	if err := c.setDefaults(); err != nil {
		return nil, err
	}
	l, content, err := c.loadLedger()
	if err != nil {
		return nil, err
	}
	if content.node == "" {
		content.node = uuid.NewString()
		if err := l.write(entry{metaBucket, nodeKey, content.node}); err != nil {
			return nil, errors.Join(err, l.close())
		}
	}
	a := &Agent{
		config: c, log: c.Logger, ledger: l, drivers: map[string]taskdriver.Driver{}, wake: make(chan struct{}, 1),
		node: Node{ID: content.node, Name: c.Name}, jobs: content.jobs,
		allocs: map[host.AllocID]*alloc{}, changed: make(chan struct{}), retry: make(chan struct{}),
		graceOver: make(chan struct{}), paused: map[pausedSlot]bool{},
		engine: engineMounts{
			known: content.mounts,
			busy:  map[host.VolumeID]chan struct{}{}, unused: map[host.VolumeID]time.Time{},
			lost: map[host.AllocID]string{}, users: mount.Users,
			isMount: func(path string) (bool, error) { return mount.IsPoint(filepath.Dir(path), path) },
		},
	}
	for _, d := range c.Drivers {
		a.drivers[d.Name()] = d
	}
	a.publish(slices.SortedFunc(maps.Values(content.allocs), byAge), nil)
	if err := a.addEngineCopies(); err != nil {
		return nil, errors.Join(err, l.close())
	}
	if err := a.checkSpace(); err != nil {
		a.log.Warn("the agent starts on a full disk", "error", err)
	}
	return a, nil
}

func (c *Config) setDefaults() (err error) {
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
	return nil
}

// Close closes the ledger. Run must have returned.
func (a *Agent) Close() error { return a.ledger.close() }

// Node describes this node.
func (a *Agent) Node() Node { return a.node }

// Run runs the jobs until ctx ends. It then leaves all tasks running and returns nil. It returns an error if the ledger
// fails, because the agent takes no step that it cannot record. A full disk is not such an error: the agent waits for
// space.
func (a *Agent) Run(ctx context.Context, s Storage) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() { a.followPlugins(ctx, s) })
	drainKnown := sync.OnceFunc(func() { a.drainKnown.Store(true); a.wakeRun() })
	defer time.AfterFunc(pollTimeout, drainKnown).Stop() // the shim may not answer
	wg.Go(func() { a.followDrain(ctx, s, drainKnown) })
	wg.Go(func() { a.followLostVolumes(ctx, s) })
	wg.Go(func() { a.followRolls(ctx, s) })
	wg.Go(func() { a.followEngineMounts(ctx, s) })
	a.wakeRun()
	for ctx.Err() == nil && a.failure() == nil {
		select {
		case <-a.wake:
			a.reconcile(func(id host.AllocID, al *alloc) {
				wg.Go(func() {
					(&runner{a: a, s: s, id: id, al: al}).run(ctx)
					a.wakeRun()
				})
			})
		case <-ctx.Done():
		}
	}
	cancel()
	wg.Wait()
	return a.failure()
}

// followPlugins follows the plugins and their tasks. It hands each restart that the shim requests to the runner of the
// task. After each change it ends the pauses of waiting allocs and wakes Await.
func (a *Agent) followPlugins(ctx context.Context, s Lister) {
	var q host.PluginQuery
	pauses := newBackoff()
	for ctx.Err() == nil {
		a.mu.Lock()
		changed := a.changed
		a.mu.Unlock()
		list, at, err := s.Plugins(ctx, q)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			a.log.Warn("cannot ask for changes of plugins", "error", err)
			sleep(ctx, pauses.NextBackOff(), nil)
			continue
		case at == 0: // the shim has written nothing yet: Plugins would return at once
			sleep(ctx, maxPause, changed)
			continue
		}
		pauses.Reset()
		q.MinIndex = at
		for _, t := range list.Tasks {
			if t.Restart != nil {
				a.requestRestart(t.TaskKey, *t.Restart)
			}
		}
		a.Retry()
		a.mu.Lock()
		a.announce()
		a.mu.Unlock()
	}
}

// requestRestart replaces the pending restart request of the task, except an operator's for the same or a later
// attempt: that does not count against the restart policy. The runner ignores a request for an earlier attempt.
func (a *Agent) requestRestart(k host.TaskKey, r registry.RestartRequest) {
	a.mu.Lock()
	defer a.mu.Unlock()
	al := a.allocs[k.Alloc]
	if al == nil || al.restartRequests[k.Task] == nil {
		return // the shim may know allocs that the agent has removed
	}
	pending := al.restartRequests[k.Task]
	select {
	case earlier := <-pending:
		if earlier.Cause == causeOperator && earlier.Attempt >= r.Attempt {
			r = earlier
		}
	default:
	}
	pending <- r
}

// wakeRun makes Run call reconcile.
func (a *Agent) wakeRun() {
	select {
	case a.wake <- struct{}{}:
	default: // a call is already pending
	}
}

// Retry ends all pauses between attempts to prepare or release allocs.
func (a *Agent) Retry() {
	a.mu.Lock()
	defer a.mu.Unlock()
	close(a.retry)
	a.retry = make(chan struct{})
}

func (a *Agent) retryRequested() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.retry
}

// The first and the longest pause between attempts, for example to prepare an alloc.
const (
	minPause = 250 * time.Millisecond
	maxPause = 15 * time.Second
)

// newBackoff returns pauses without jitter.
func newBackoff() *backoff.ExponentialBackOff {
	return &backoff.ExponentialBackOff{InitialInterval: minPause, Multiplier: 2, MaxInterval: maxPause}
}

// sleep returns after d, or earlier if ctx ends or wake is closed.
func sleep(ctx context.Context, d time.Duration, wake <-chan struct{}) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-wake:
	case <-ctx.Done():
	}
}

// Await returns nil when holds is true for the list of all allocs, oldest first. It checks after each change of a
// record or of a plugin's health. It returns an error if the ledger fails or ctx ends first.
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

// Allocs lists all allocs, oldest first. Callers must not change the list or its records.
func (a *Agent) Allocs() []*AllocRecord {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.listed
}

// Jobs lists all jobs by ID. Callers must not change the records.
func (a *Agent) Jobs() []*JobRecord {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.SortedFunc(maps.Values(a.jobs), func(x, y *JobRecord) int { return cmp.Compare(x.Job.ID, y.Job.ID) })
}

// Find returns the alloc whose ID is prefix. If prefix has at least 8 characters, as the short IDs in the output of
// commands, it may also be the beginning of the ID of just one alloc.
func (a *Agent) Find(prefix string) (*AllocRecord, error) {
	var found []*AllocRecord
	for _, r := range a.Allocs() {
		if string(r.ID) == prefix {
			return r, nil
		}
		if len(prefix) >= shortID && strings.HasPrefix(string(r.ID), prefix) {
			found = append(found, r)
		}
	}
	switch len(found) {
	case 0:
		return nil, registry.Errorf(registry.ErrNotFound, "alloc %q not found (see holdfast alloc status)", prefix)
	case 1:
		return found[0], nil
	}
	return nil, ambiguous(prefix, found)
}

// isolated reports whether the driver gives tasks a file system of their own.
func (a *Agent) isolated(driver string) bool {
	d, known := a.drivers[driver]
	return known && d.Isolated()
}

func (a *Agent) dirs(id host.AllocID) dirs {
	return dirs{filepath.Join(allocsDir(a.config.StateDir), string(id))}
}

// allocsDir holds a directory for each alloc.
func allocsDir(state string) string { return filepath.Join(state, "agent", "allocs") }

func ledgerPath(state string) string { return filepath.Join(state, "agent", "agent.db") }

// allocOf returns the alloc of a task's parent process. ours reports whether an agent with this state directory started
// it.
func allocOf(state string, p taskdriver.Parent) (id host.AllocID, ours bool) {
	below, ours := strings.CutPrefix(p.Dir, allocsDir(state)+"/")
	first, _, _ := strings.Cut(below, "/")
	return host.AllocID(first), ours
}
