package benchswap

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"holdfast/host"
)

// method is a method of the host.
type method string

const (
	createVolume method = "CreateVolume"
	deleteVolume method = "DeleteVolume"
	prepareAlloc method = "PrepareAlloc"
	releaseAlloc method = "ReleaseAlloc"
	taskStarting method = "TaskStarting"
	taskExited   method = "TaskExited"
	volumes      method = "Volumes"
	pluginsOf    method = "Plugins"
	allocs       method = "Allocs"
	status       method = "Status"
)

var reads = map[method]bool{volumes: true, pluginsOf: true, allocs: true, status: true}

// call is a call that succeeded.
type call struct {
	method method
	began  time.Time
	took   time.Duration
}

func (c call) ended() time.Time { return c.began.Add(c.took) }

// load is callers, one per plugin. Each makes one call after the other, at its own pace.
type load struct {
	n       *node
	stop    context.Context // ends callers after their round
	end     context.CancelFunc
	callers sync.WaitGroup

	mu      sync.Mutex // guards what follows
	calls   []call
	failed  []error
	began   time.Time
	elapsed time.Duration
}

// loadCount makes names of volumes and allocs unique.
var loadCount atomic.Int64

func startLoad(n *node) *load {
	l := &load{n: n, began: time.Now()}
	l.stop, l.end = context.WithCancel(context.WithoutCancel(n.t.Context()))
	run := loadCount.Add(1)
	for i := range n.sizes.plugins {
		c := &caller{load: l, id: fmt.Sprintf("%d-%02d", run, i), plugin: i, task: n.pluginTask("x", i)}
		l.callers.Go(c.run)
	}
	return l
}

// finish waits until every caller has ended its round.
func (l *load) finish() {
	l.end()
	l.callers.Wait()
	l.elapsed = time.Since(l.began)
	for _, err := range l.failed {
		l.n.t.Errorf("a call failed: %v", err)
	}
}

// caller uses one plugin. Any error is a failure.
type caller struct {
	*load
	id      string
	plugin  int
	task    host.AllocTask
	next    time.Time // of the next call
	calls   []call
	failure error
}

func (c *caller) run() {
	c.next = time.Now().Add(time.Duration(c.plugin) * c.n.sizes.every / time.Duration(c.n.sizes.plugins))
	for round := 0; c.stop.Err() == nil && c.failure == nil; round++ {
		c.round(round)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.load.calls = append(c.load.calls, c.calls...)
	if c.failure != nil {
		c.failed = append(c.failed, c.failure)
	}
}

// round creates and deletes a volume, starts and ends a task, and in every fourth round uses a volume. A read follows
// each mutating call.
func (c *caller) round(n int) {
	h := c.n.host
	name := host.VolumeName{Namespace: "default", ID: host.VolumeID(fmt.Sprintf("load-%s-%d", c.id, n))}
	task := c.task
	task.Alloc = host.AllocID(fmt.Sprintf("task-%s-%d", c.id, n))
	readStatus := func(ctx context.Context) error { _, err := h.Status(ctx); return err }
	c.do(createVolume, func(ctx context.Context) error {
		_, err := h.CreateVolume(ctx, volumeSpec(string(name.ID), c.plugin))
		return err
	})
	c.do(volumes, func(ctx context.Context) error {
		list, _, err := h.Volumes(ctx, host.VolumeQuery{Name: name})
		if err == nil && len(list) != 1 {
			err = fmt.Errorf("volume %s was created, and %d are listed", name.ID, len(list))
		}
		return err
	})
	c.do(taskStarting, func(ctx context.Context) error { _, err := h.TaskStarting(ctx, task); return err })
	c.do(pluginsOf, func(ctx context.Context) error {
		list, _, err := h.Plugins(ctx, host.PluginQuery{Plugin: host.PluginID(pluginName(c.plugin))})
		if err == nil && (len(list.Instances) != 2 || list.Instances[0].Health.State != host.Healthy) {
			err = fmt.Errorf("%s is not healthy: %+v", pluginName(c.plugin), list.Instances)
		}
		return err
	})
	c.do(taskExited, func(ctx context.Context) error { return h.TaskExited(ctx, task.Key(), 1, 0, 0, true) })
	c.do(status, readStatus)
	if (n+c.plugin)%4 == 0 {
		c.useVolume(n)
	}
	c.do(deleteVolume, func(ctx context.Context) error { return h.DeleteVolume(ctx, name) })
	c.do(status, readStatus)
}

// useVolume prepares and releases an alloc that uses the plugin's spare volume.
func (c *caller) useVolume(n int) {
	h, g := c.n.host, c.n.spare[c.plugin]
	g.Alloc = host.AllocID(fmt.Sprintf("use-%s-%d", c.id, n))
	wantListed := func(want int) func(context.Context) error {
		return func(ctx context.Context) error {
			list, _, err := h.Allocs(ctx, host.AllocQuery{ID: g.Alloc})
			if err == nil && len(list) != want {
				err = fmt.Errorf("%d allocs are listed as %s, not %d", len(list), g.Alloc, want)
			}
			return err
		}
	}
	c.do(prepareAlloc, func(ctx context.Context) error { _, err := h.PrepareAlloc(ctx, g); return err })
	c.do(allocs, wantListed(1))
	c.do(releaseAlloc, func(ctx context.Context) error { return h.ReleaseAlloc(ctx, g.Alloc) })
	c.do(allocs, wantListed(0))
}

// do makes a call when it is due. A caller that is late skips what it has missed.
func (c *caller) do(m method, f func(context.Context) error) {
	if c.failure != nil {
		return
	}
	time.Sleep(time.Until(c.next))
	began := time.Now()
	if c.next = c.next.Add(c.n.sizes.every); c.next.Before(began) {
		c.next = began
	}
	ctx, cancel := context.WithDeadline(context.Background(), began.Add(waitLimit))
	defer cancel()
	err, took := f(ctx), time.Since(began)
	if err != nil {
		c.failure = fmt.Errorf("%s of caller %s after %s: %w", m, c.id, took.Round(time.Millisecond), err)
		return
	}
	c.calls = append(c.calls, call{m, began, took})
}
