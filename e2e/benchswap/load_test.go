package benchswap

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"holdfast/host"
)

// sort is a kind of call.
type sort string

const (
	creates  sort = "CreateVolume"
	deletes  sort = "DeleteVolume"
	prepares sort = "PrepareAlloc"
	releases sort = "ReleaseAlloc"
	starts   sort = "TaskStarting"
	exits    sort = "TaskExited"
	lists    sort = "Volumes"
	plugs    sort = "Plugins"
	allocs   sort = "Allocs"
	statuses sort = "Status"
)

var reading = map[sort]bool{lists: true, plugs: true, allocs: true, statuses: true}

// call is one call of a caller.
type call struct {
	sort  sort
	began time.Time
	took  time.Duration
}

func (c call) ended() time.Time { return c.began.Add(c.took) }

// callLimit is the deadline that callers set.
const callLimit = 2 * time.Second

// load is callers at work. Each makes one call after the other, at its own pace.
type load struct {
	n          *node
	expect     *expectations
	sentBefore int             // calls to drivers
	stop       context.Context // ends the load: who is in the middle of a round goes on to its end
	end        context.CancelFunc
	callers    sync.WaitGroup

	mu      sync.Mutex // guards what follows
	calls   []call
	failed  []error
	began   time.Time
	elapsed time.Duration
	late    int           // calls of slow drivers that the caller's own deadline ended
	slow    int           // calls of slow drivers
	worst   time.Duration // by which such a call ended after its deadline
}

// loads counts the loads of a run, so that names are used once.
var loads atomic.Int64

func startLoad(n *node, x *expectations) *load {
	l := &load{n: n, expect: x, sentBefore: n.sent(), began: time.Now()}
	l.stop, l.end = context.WithCancel(context.WithoutCancel(n.t.Context()))
	run := loads.Add(1)
	for i := range n.sizes.plugins {
		task := n.pluginTask("x", i)
		l.callers.Go(func() { (&caller{load: l, id: fmt.Sprintf("%d-%02d", run, i), plugin: i, task: task}).work() })
	}
	for i := range n.sizes.slow {
		l.callers.Go(func() {
			(&patient{load: l, id: fmt.Sprintf("%d-%02d", run, i), number: i, hurried: i%2 == 1}).work()
		})
	}
	return l
}

// finish returns when every caller has ended its round.
func (l *load) finish() {
	l.end()
	l.callers.Wait()
	l.elapsed = time.Since(l.began)
}

func (l *load) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failed = append(l.failed, err)
}

// caller has a deadline of callLimit for each call, none of which waits for a slow driver: any error is a failure.
type caller struct {
	*load
	id     string
	plugin int
	task   host.AllocTask
	next   time.Time
	mine   []call
	broken bool
}

func (c *caller) work() {
	c.next = time.Now().Add(time.Duration(c.plugin) * c.n.sizes.every / time.Duration(c.n.sizes.plugins))
	for round := 0; c.stop.Err() == nil && !c.broken; round++ {
		c.round(round)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, c.mine...)
}

// round is a volume and a task that come and go; in every fourth round, which is not the same one for all callers, an
// alloc as well. Each call that changes something is followed by one that reads.
func (c *caller) round(n int) {
	volume := host.VolumeName{Namespace: "default", ID: host.VolumeID(fmt.Sprintf("load-%s-%d", c.id, n))}
	task := c.task
	task.Alloc = host.AllocID(fmt.Sprintf("task-%s-%d", c.id, n))
	c.do(creates, func(ctx context.Context) error {
		_, err := c.n.host.CreateVolume(ctx, volumeOf(string(volume.ID), c.plugin))
		return err
	})
	c.do(lists, func(ctx context.Context) error {
		list, _, err := c.n.host.Volumes(ctx, host.VolumeQuery{Name: volume})
		if err == nil && len(list) != 1 {
			err = fmt.Errorf("volume %s was created, and %d are listed by that name", volume.ID, len(list))
		}
		return err
	})
	c.do(starts, func(ctx context.Context) error { _, err := c.n.host.TaskStarting(ctx, task); return err })
	c.do(plugs, func(ctx context.Context) error {
		list, _, err := c.n.host.Plugins(ctx, host.PluginQuery{Plugin: host.PluginID(pluginName(c.plugin))})
		if err == nil && (len(list.Instances) != 2 || list.Instances[0].Health.State != host.Healthy) {
			err = fmt.Errorf("%s is not healthy: %+v", pluginName(c.plugin), list.Instances)
		}
		return err
	})
	c.do(exits, func(ctx context.Context) error { return c.n.host.TaskExited(ctx, task.Key(), 1, 0, 0, true) })
	c.do(statuses, func(ctx context.Context) error { _, err := c.n.host.Status(ctx); return err })
	if (n+c.plugin)%4 == 0 {
		c.use(n)
	}
	c.do(deletes, func(ctx context.Context) error { return c.n.host.DeleteVolume(ctx, volume) })
	c.do(statuses, func(ctx context.Context) error { _, err := c.n.host.Status(ctx); return err })
	if !c.broken {
		c.expect.volume(string(volume.ID))
	}
}

// use is an alloc that uses the plugin's spare volume.
func (c *caller) use(n int) {
	g := c.n.spare[c.plugin]
	g.Alloc = host.AllocID(fmt.Sprintf("use-%s-%d", c.id, n))
	list := func(ctx context.Context, want int) error {
		list, _, err := c.n.host.Allocs(ctx, g.Alloc)
		if err == nil && len(list) != want {
			err = fmt.Errorf("%d allocs are listed as %s, and not %d", len(list), g.Alloc, want)
		}
		return err
	}
	c.do(prepares, func(ctx context.Context) error { _, err := c.n.host.PrepareAlloc(ctx, g); return err })
	c.do(allocs, func(ctx context.Context) error { return list(ctx, 1) })
	c.do(releases, func(ctx context.Context) error { return c.n.host.ReleaseAlloc(ctx, g.Alloc) })
	c.do(allocs, func(ctx context.Context) error { return list(ctx, 0) })
	if !c.broken {
		c.expect.use(string(g.Alloc))
	}
}

// do makes a call when its time has come, or at once if that is past.
func (c *caller) do(s sort, f func(context.Context) error) {
	if c.broken {
		return
	}
	time.Sleep(time.Until(c.next))
	c.next = later(c.next.Add(c.n.sizes.every), time.Now())
	began := time.Now()
	ctx, cancel := context.WithDeadline(context.Background(), began.Add(callLimit))
	defer cancel()
	if err := f(ctx); err != nil {
		c.broken = true
		c.fail(fmt.Errorf("%s of caller %s after %s: %w", s, c.id, time.Since(began).Round(time.Millisecond), err))
		return
	}
	c.mine = append(c.mine, call{s, began, time.Since(began)})
}

// later: who has fallen behind does not make up for it.
func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// patient is a caller whose driver is slow. It has all the time that the driver needs and a call may not fail; or it is
// hurried, and has callLimit for each try: then a try ends well, or by that deadline, at its time. It tries again until
// the call ends well.
type patient struct {
	*load
	id      string
	number  int
	hurried bool
}

func (p *patient) work() {
	for round := 0; p.stop.Err() == nil; round++ {
		g := p.n.slow[p.number]
		g.Alloc = host.AllocID(fmt.Sprintf("slow-%s-%d", p.id, round))
		for _, f := range []func(context.Context) error{
			func(ctx context.Context) error { _, err := p.n.host.PrepareAlloc(ctx, g); return err },
			func(ctx context.Context) error { return p.n.host.ReleaseAlloc(ctx, g.Alloc) },
		} {
			if err := p.do(f); err != nil {
				p.fail(fmt.Errorf("slow caller %s: %w", p.id, err))
				return
			}
		}
		p.expect.use(string(g.Alloc))
	}
}

func (p *patient) do(f func(context.Context) error) error {
	p.mu.Lock()
	p.slow++
	p.mu.Unlock()
	limit := patience
	if p.hurried {
		limit = callLimit
	}
	for began := time.Now(); ; {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		due := time.Now().Add(limit)
		err := f(ctx)
		over := time.Since(due)
		cancel()
		switch {
		case err == nil:
			return nil
		case !p.hurried || !atItsTime(err, over) || time.Since(began) > patience:
			return fmt.Errorf("after %s: %w", time.Since(began).Round(time.Millisecond), err)
		}
		p.mu.Lock()
		p.late++
		p.worst = max(p.worst, over)
		p.mu.Unlock()
	}
}

// atItsTime says whether a call was ended by its caller's deadline: it says so, and was not over before it (the shim's
// clock may be the first, by little) nor long after it.
func atItsTime(err error, over time.Duration) bool {
	return errors.Is(err, context.DeadlineExceeded) && over > -50*time.Millisecond && over < callLimit
}
