package task

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/hooks"
	"holdfast/registry"
)

// startHealthy returns an env with a registered plugin that has just had a heartbeat.
func startHealthy(t *testing.T, s hooks.PluginSpec) (w *env, task registry.Task, p *plugin, stop func() error) {
	w = newEnv(t)
	task, p = w.start("plugin")
	stop = w.run(task, s)
	after(s.Heartbeat.Interval)
	w.commits()
	return w, task, p, stop
}

// A change of health is one commit, with one event of the task and one of each role.
func TestOneEventPerChange(t *testing.T) {
	for _, c := range []struct {
		cause registry.Cause
		sick  func(*plugin)
		lasts time.Duration // at most, of one heartbeat
	}{
		{registry.CauseNotReady, func(p *plugin) { p.ready = false }, 0},
		{registry.CauseMissed, func(p *plugin) { p.broken = errors.New("INTERNAL") }, 0},
		{registry.CauseMissed, func(p *plugin) { p.hangs = true }, hooks.DefaultHeartbeatTimeout},
		{registry.CauseGone, func(p *plugin) { p.up = false }, 0},
	} {
		runInBubble(t, string(c.cause), func(t *testing.T) {
			w, _, p, _ := startHealthy(t, spec(hooks.TypeMonolith))
			for range 3 {
				p.set(c.sick)
				after(time.Hour)
				w.wantCommits("sick for an hour", "unhealthy, unhealthy, task unhealthy ("+string(c.cause)+")")
				w.wantHealth("sick", registry.Unhealthy, c.cause)
				p.set(func(p *plugin) { p.up, p.ready, p.hangs, p.broken = true, true, false, nil })
				after(time.Hour)
				w.wantCommits("well for an hour", "healthy, healthy, task healthy (probed)")
				w.wantHealth("well", registry.Healthy, registry.CauseProbed)
			}
		})
	}
}

func TestOnlyMissesInARowMakeUnhealthy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := spec(hooks.TypeNode)
		w, _, p, _ := startHealthy(t, s)
		for range 5 {
			p.set(func(p *plugin) { p.broken = errors.New("INTERNAL") })
			after(time.Duration(s.Heartbeat.Failures-1) * s.Heartbeat.Interval)
			p.set(func(p *plugin) { p.broken = nil })
			after(s.Heartbeat.Interval)
		}
		w.wantCommits("two misses at a time")
		p.set(func(p *plugin) { p.broken = errors.New("INTERNAL") })
		after(time.Duration(s.Heartbeat.Failures)*s.Heartbeat.Interval - 1)
		w.wantCommits("a moment before the third")
		after(1)
		w.wantCommits("the third", nodeUnhealthy(registry.CauseMissed))
	})
}

// A lost connection and a new one are both noticed without a heartbeat.
func TestLostConnectionMakesUnhealthyAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _, p, _ := startHealthy(t, spec(hooks.TypeNode))
		after(time.Second)
		p.set(func(p *plugin) { p.up = false })
		after(0)
		w.wantCommits("its end", nodeUnhealthy(registry.CauseGone))
		if detail := w.instances()[0].Health.Detail; detail != errRefused.Error() {
			t.Errorf("detail is %q", detail)
		}
		before, _ := p.seen()
		after(time.Minute)
		if now, _ := p.seen(); len(now)-len(before) > int(time.Minute/retryMost)+10 {
			t.Errorf("it was looked for %d times in a minute", len(now)-len(before))
		}
		p.set(func(p *plugin) { p.up = true })
		after(retryMost)
		w.wantCommits("its return", nodeRecovers)
	})
}

// After a loss of the connection, another plugin may listen at the socket.
func TestReturningPluginDescribesItselfBeforeItIsHealthy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _, p, _ := startHealthy(t, spec(hooks.TypeNode))
		p.set(func(p *plugin) { p.up = false })
		after(time.Minute)
		w.commits()
		p.set(func(p *plugin) { p.up, p.unknown = true, errors.New("node id is empty") })
		after(time.Minute)
		w.wantCommits("it does not tell what it is")
		w.wantHealth("it does not tell what it is", registry.Unhealthy, registry.CauseGone)
		p.set(func(p *plugin) { p.unknown, p.version = nil, "2" })
		after(retryMost)
		w.wantCommits("it does", "updated, healthy, task healthy (probed)")
		if v := w.instances()[0].Fingerprint.Version; v != "2" {
			t.Errorf("version is %q", v)
		}
	})
}

// A living plugin causes no event under a new shim. A dead one is unhealthy at once.
func TestNewShimSupervisesWhereTheOldOneStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, task, p, stop := startHealthy(t, spec(hooks.TypeMonolith))
		_ = stop()
		w.restart()
		stop = w.run(task, spec(hooks.TypeMonolith))
		after(time.Hour)
		w.wantCommits("a shim after another")
		_ = stop()
		w.restart()
		p.set(func(p *plugin) { p.up = false })
		after(time.Minute)
		w.wantHealth("before the next shim", registry.Healthy, registry.CauseProbed)
		stop = w.run(task, spec(hooks.TypeMonolith))
		after(0)
		w.wantCommits("dead meanwhile", "unhealthy, unhealthy, task unhealthy (gone)")
		_ = stop()
		w.restart()
		p.set(func(p *plugin) { p.up, p.version = true, "2" })
		w.run(task, spec(hooks.TypeMonolith))
		after(0)
		w.wantCommits("back meanwhile", "updated, healthy, updated, healthy, task healthy (probed)")
	})
}

// The plugin describes itself every ten minutes, and when the connection reports that the description is outdated.
func TestDescriptionIsRefreshed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := spec(hooks.TypeMonolith)
		w, _, p, _ := startHealthy(t, s)
		_, before := p.seen()
		p.set(func(p *plugin) { p.version = "2" })
		after(refreshEvery - 2*s.Heartbeat.Interval)
		w.wantCommits("before it is time")
		after(2 * s.Heartbeat.Interval)
		w.wantCommits("every ten minutes", "updated, updated")
		p.set(func(p *plugin) { p.version, p.outdated = "3", true })
		after(s.Heartbeat.Interval)
		w.wantCommits("outdated", "updated, updated")
		if _, now := p.seen(); now != before+2 {
			t.Errorf("asked %d times", now-before)
		}
		p.set(func(p *plugin) { p.outdated, p.unknown = true, errors.New("metadata service is away") })
		after(time.Hour)
		w.wantCommits("a refresh in vain is no sickness")
		p.set(func(p *plugin) { p.version, p.unknown = "4", nil })
		after(s.Heartbeat.Interval)
		w.wantCommits("asked again at each heartbeat", "updated, updated")
		_, before = p.seen()
		after(refreshEvery - 2*s.Heartbeat.Interval)
		if _, now := p.seen(); now != before {
			t.Errorf("asked %d times without need", now-before)
		}
	})
}

// A plugin without its socket is unhealthy, even if it answers on the open connection. If the directory is missing, it
// is restarted at once. Otherwise it is restarted if it does not make the socket again within its health timeout.
func TestPluginWithoutItsSocketIsRestarted(t *testing.T) {
	const asks = "restart asked (socket gone)"
	sick := nodeUnhealthy(registry.CauseSocketGone)
	for what, c := range map[string]struct {
		dir, answers bool
		lasts        time.Duration
		want         []string
	}{
		"the directory is swept":        {true, true, time.Minute, []string{sick, asks}},
		"it is, and the connection too": {true, false, time.Minute, []string{nodeUnhealthy(registry.CauseGone), asks}},
		"the socket is removed":         {false, true, time.Hour, []string{sick, asks}},
		"it is made anew":               {false, true, hooks.DefaultHealthTimeout, []string{sick, nodeRecovers}},
		"it is made anew at once":       {false, true, socketGrace / 2, nil},
	} {
		runInBubble(t, what, func(t *testing.T) {
			w, task, p, stop := startHealthy(t, spec(hooks.TypeNode))
			w.sockets.remove(true, c.dir)
			p.set(func(p *plugin) { p.up = c.answers })
			after(c.lasts)
			if len(c.want) < 2 || c.want[1] != asks {
				w.sockets.remove(false, false)
			}
			after(time.Hour)
			w.wantCommits(what, c.want...)
			_ = stop()
			w.restart()
			w.run(task, spec(hooks.TypeNode))
			after(time.Hour)
			w.wantCommits("at the next shim")
		})
	}
}
