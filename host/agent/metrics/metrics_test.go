package metrics

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/host"
	"holdfast/registry"
)

var update = flag.Bool("update", false, "write docs/metrics.md")

// fakeHost returns the values of a test.
type fakeHost struct {
	down   bool
	silent atomic.Int32 // Status fails this number of times
	old    bool         // the shim lacks Control.Metrics
	calls  []host.CallMetric
	swaps  []host.SwapReport
	list   host.PluginList
	allocs []host.AllocStatus
	stats  func(ctx context.Context, n host.VolumeName) ([]host.VolumeUsage, error)
	events []host.Event
}

func (h *fakeHost) CallMetrics(context.Context) ([]host.CallMetric, error) {
	if h.old {
		return h.calls, host.ErrUnsupported
	}
	return h.calls, nil
}

func (h *fakeHost) Status(context.Context) (host.ShimStatus, error) {
	if h.silent.Add(-1) >= 0 {
		return host.ShimStatus{}, host.ErrUnavailable
	}
	return host.ShimStatus{OpenIntents: 3, Index: 42}, nil
}

func (h *fakeHost) ShimState() host.ShimState {
	return host.ShimState{Serving: !h.down, Reason: "the shim has died"}
}

func (h *fakeHost) Swaps() []host.SwapReport { return h.swaps }

func (h *fakeHost) Plugins(context.Context, host.PluginQuery) (host.PluginList, host.Seq, error) {
	return h.list, 1, nil
}

func (h *fakeHost) Allocs(context.Context, host.AllocQuery) ([]host.AllocStatus, host.Seq, error) {
	return h.allocs, 1, nil
}

func (h *fakeHost) VolumeStats(ctx context.Context, n host.VolumeName) ([]host.VolumeUsage, host.Seq, error) {
	u, err := h.stats(ctx, n)
	return u, 1, err
}

// Watch sends the events after a cursor, and those without a number.
func (h *fakeHost) Watch(ctx context.Context, o host.WatchOptions, fn func(host.Event) error) error {
	for _, e := range h.events {
		if e.Seq != 0 && e.Seq <= o.After {
			continue
		}
		if err := fn(e); err != nil {
			return err
		}
	}
	<-ctx.Done()
	return context.Cause(ctx)
}

// running returns metrics of a host whose Run ends with the test.
func running(t *testing.T, h *fakeHost) *Metrics {
	m, done := New(h, hclog.NewNullLogger()), make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { done <- m.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return m
}

func scrape(t *testing.T, m *Metrics) string {
	t.Helper()
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	if w.Code != 200 {
		t.Fatalf("scrape: %d %s", w.Code, w.Body)
	}
	return w.Body.String()
}

// expect requires lines of a scrape.
func expect(t *testing.T, text string, lines ...string) {
	t.Helper()
	for _, l := range lines {
		if !strings.Contains(text, "\n"+l+"\n") {
			t.Errorf("the scrape lacks %q", l)
		}
	}
	if t.Failed() {
		t.Log(text)
	}
}

func name(id string) host.VolumeName {
	return host.VolumeName{Namespace: "default", ID: host.VolumeID(id)}
}

// inUse returns a mounted volume of an alloc.
func inUse(plugin, id string) registry.AllocVolume {
	return registry.AllocVolume{
		Name: name(id), Publish: registry.MarkDone, Volume: registry.VolumeKey{Plugin: host.PluginID(plugin)},
	}
}

func call(plugin, driver, method, code string, bucket int, seconds float64) host.CallMetric {
	m := host.CallMetric{
		Plugin: host.PluginID(plugin), Driver: driver, Method: method, Code: code, Seconds: seconds,
		Buckets: make([]uint64, len(registry.CallBuckets)+1),
	}
	m.Buckets[bucket] = 2
	return m
}

func TestScrapeHasTheNumbersOfTheHost(t *testing.T) {
	const probe = "/csi.v1.Identity/Probe"
	node := host.InstanceKey{Role: host.RoleNode, Plugin: "disk"}
	wait := registry.Wait{Volume: name("slow"), Step: registry.StepStage, Since: time.Now().Add(-time.Hour)}
	dead := inUse("disk", "dead")
	dead.Trouble = "transport endpoint is not connected"
	h := &fakeHost{
		calls: []host.CallMetric{
			call("disk", "disk.example.org", probe, "OK", 0, .002),
			call("disk", "disk.example.org", probe, "Internal", 1, .02),
			call("twin", "disk.example.org", probe, "OK", len(registry.CallBuckets), 4000),
		},
		list: host.PluginList{
			Instances: []host.Instance{{InstanceKey: node}}, Active: map[host.InstanceKey]bool{node: true},
			Tasks: []host.PluginTask{{Plugin: "disk", Healthy: true}, {Plugin: "disk"},
				{Plugin: "disk", Phase: registry.TaskStopping}, {Plugin: "disk", Phase: registry.TaskExited}},
		},
		// Two requests of an alloc may wait for the same step of the same volume.
		allocs: []host.AllocStatus{{
			Alloc:   registry.Alloc{ID: "a", Waiting: []registry.Wait{wait, wait}},
			Volumes: []registry.AllocVolume{inUse("disk", "well"), dead},
		}},
		swaps: []host.SwapReport{{Began: time.Unix(1, 0), Outcome: host.SwapCommitted, HeldSince: time.Unix(1, 0)}},
	}
	m := New(h, hclog.NewNullLogger())
	m.Failed = func() map[host.PluginID]int { return map[host.PluginID]int{"disk": 1, "gone": 1} }
	expect(t, scrape(t, m), `holdfast_swaps_total{outcome="committed"} 0`)
	began := time.Unix(2, 0)
	h.swaps = append(h.swaps, host.SwapReport{Began: began, Outcome: host.SwapBaking, HeldSince: began,
		Hold: 7 * time.Millisecond})
	expect(t, scrape(t, m), `holdfast_swaps_total{outcome="committed"} 0`)
	h.swaps[1].Outcome = host.SwapCommitted
	scrape(t, m)
	const ok = `{driver_name="disk.example.org",grpc_status_code="OK",` +
		`method_name="/csi.v1.Identity/Probe",migrated="false"`
	text := scrape(t, m)
	expect(t, text,
		`csi_operations_seconds_bucket`+ok+`,le="0.1"} 2`, `csi_operations_seconds_bucket`+ok+`,le="600"} 2`,
		`csi_operations_seconds_count`+ok+`} 4`, `csi_operations_seconds_sum`+ok+`} 4000.002`,
		`holdfast_plugin_heartbeat_seconds_bucket{plugin="disk",le="0.005"} 2`,
		`holdfast_plugin_heartbeat_seconds_bucket{plugin="disk",le="0.01"} 4`,
		`holdfast_plugin_heartbeat_seconds_count{plugin="twin"} 2`,
		`holdfast_plugin_healthy{plugin="disk",role="csi-node"} 0`, `holdfast_plugin_unhealthy_tasks{plugin="disk"} 3`,
		`holdfast_plugin_unhealthy_tasks{plugin="gone"} 1`,
		`holdfast_claims_waiting 2`, `holdfast_dead_mounts{namespace="default",volume="dead"} 1`,
		`holdfast_shim_serving 1`, `holdfast_intents_open 3`, `holdfast_store_commits_total 42`,
		`holdfast_swaps_total{outcome="committed"} 1`, `holdfast_swaps_total{outcome="rolled back"} 0`,
		`holdfast_swap_hold_seconds_bucket{le="0.005"} 0`, `holdfast_swap_hold_seconds_bucket{le="0.01"} 1`,
	)
	if strings.Contains(text, `csi_operations_seconds_bucket`+ok+`,le="0.005"}`) {
		t.Error("kubelet has no bucket of 5 ms")
	}
	if !regexp.MustCompile(
		`holdfast_claim_waiting_seconds\{alloc="a",namespace="default",step="stage",volume="slow"\} 36\d\d\.`).
		MatchString(text) {
		t.Error("the wait of an hour is missing")
	}
	h.old = true
	expect(t, scrape(t, m), `holdfast_intents_open 3`, `holdfast_claims_waiting 2`)
	h.down = true
	if text = scrape(t, m); strings.Contains(text, "intents_open") {
		t.Error("a shim that does not serve was asked")
	}
	expect(t, text, `holdfast_shim_serving 0`, `csi_operations_seconds_count`+ok+`} 4`)
}

// The usage of 1000 volumes is measured within 10 s while another plugin hangs. Each volume is measured once a minute,
// with few calls at a time. No scrape waits for a plugin. Without scrapes, no plugin is asked, and outdated usage is
// dropped.
func TestUsageIsRefreshedInTheBackground(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked, hung, atOnce, most atomic.Int32
		h := &fakeHost{events: []host.Event{{Kind: "staged"}, {Kind: "staged"}}}
		h.stats = func(ctx context.Context, n host.VolumeName) ([]host.VolumeUsage, error) {
			switch {
			case strings.HasPrefix(string(n.ID), "hangs"):
				hung.Add(1)
				<-ctx.Done()
				return nil, ctx.Err()
			case asked.Add(1) > 1000 && n.ID == "v7":
				return nil, fmt.Errorf("%w: it is being changed", host.ErrConflict)
			case n.ID == "v8":
				return nil, errors.New("the plugin is out of order")
			case n.ID == "v9":
				return []host.VolumeUsage{{Unit: "bytes", Total: 5}, {Unit: "bytes", Total: 6}, {Unit: "unknown"}}, nil
			}
			most.Store(max(most.Load(), atOnce.Add(1)))
			defer atOnce.Add(-1)
			time.Sleep(10 * time.Millisecond)
			return []host.VolumeUsage{{Unit: "bytes", Total: 100, Used: 90, Available: 10},
				{Unit: "inodes", Total: 7, Used: 3, Available: 4}}, nil
		}
		var volumes []registry.AllocVolume
		for i := range 1000 {
			volumes = append(volumes, inUse("disk", fmt.Sprint("v", i)), inUse("dead", fmt.Sprint("hangs", i)))
		}
		unmounted := inUse("disk", "unmounted")
		unmounted.Publish = ""
		h.allocs = []host.AllocStatus{{Volumes: append(volumes, unmounted)}, {Volumes: volumes}}
		m := running(t, h)
		time.Sleep(time.Hour)
		if asked.Load() != 0 {
			t.Errorf("%d calls of plugins without a scrape", asked.Load())
		}
		before := time.Now()
		scrape(t, m)
		if took := time.Since(before); took != 0 {
			t.Errorf("a scrape took %s", took)
		}
		time.Sleep(10 * time.Second)
		scrape(t, m)
		time.Sleep(usageInterval + 10*time.Second)
		text := scrape(t, m)
		expect(t, text,
			`kubelet_volume_stats_used_bytes{namespace="default",persistentvolumeclaim="v0"} 90`,
			`kubelet_volume_stats_available_bytes{namespace="default",persistentvolumeclaim="v999"} 10`,
			`kubelet_volume_stats_capacity_bytes{namespace="default",persistentvolumeclaim="v7"} 100`,
			`kubelet_volume_stats_inodes{namespace="default",persistentvolumeclaim="v7"} 7`,
			`kubelet_volume_stats_inodes_free{namespace="default",persistentvolumeclaim="v7"} 4`,
			`kubelet_volume_stats_inodes_used{namespace="default",persistentvolumeclaim="v7"} 3`,
			`kubelet_volume_stats_capacity_bytes{namespace="default",persistentvolumeclaim="v9"} 5`,
			`holdfast_events_total{kind="staged"} 2`,
		)
		for _, not := range []string{`"v8"`, `"unmounted"`, "hangs",
			`used_bytes{namespace="default",persistentvolumeclaim="v9"`} {
			if strings.Contains(text, not) {
				t.Errorf("the scrape has %s", not)
			}
		}
		if n := hung.Load(); n > 2*usageAtOnce {
			t.Errorf("a plugin that hangs was asked %d times in two refreshes", n)
		}
		if n := asked.Load(); n != 2000 || most.Load() > usageAtOnce {
			t.Errorf("%d calls for 1000 volumes in two refreshes, %d at once", n, most.Load())
		}
		time.Sleep(usagePause + 2*usageInterval)
		paused := asked.Load()
		time.Sleep(time.Hour)
		if n := asked.Load() - paused; n != 0 {
			t.Errorf("%d calls of plugins without a scrape", n)
		}
		if strings.Contains(scrape(t, m), "kubelet_volume_stats") {
			t.Error("the first scrape after a pause has an old usage")
		}
		time.Sleep(10 * time.Second)
		expect(t, scrape(t, m), `kubelet_volume_stats_used_bytes{namespace="default",persistentvolumeclaim="v0"} 90`)
	})
}

// A plugin that answers slowly does not delay the usage of other plugins' volumes. Its own earlier answers stay.
func TestSlowPluginDelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &fakeHost{}
		h.stats = func(ctx context.Context, n host.VolumeName) ([]host.VolumeUsage, error) {
			if n.ID != "fast" {
				select {
				case <-time.After(4 * time.Second):
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			}
			return []host.VolumeUsage{{Unit: "bytes", Total: 100, Used: 90, Available: 10}}, nil
		}
		volumes := []registry.AllocVolume{inUse("disk", "fast")}
		for i := range 1000 {
			volumes = append(volumes, inUse("slow", fmt.Sprint("slow", i)))
		}
		h.allocs = []host.AllocStatus{{Volumes: volumes}}
		m := running(t, h)
		measured := 0
		for range 3 {
			scrape(t, m)
			time.Sleep(pluginLimit + usageInterval)
			synctest.Wait()
			text := scrape(t, m)
			expect(t, text, `kubelet_volume_stats_used_bytes{namespace="default",persistentvolumeclaim="fast"} 90`)
			const used = `kubelet_volume_stats_used_bytes{namespace="default",persistentvolumeclaim="slow`
			now := strings.Count(text, used)
			if now <= measured {
				t.Errorf("%d volumes of the slow plugin have a usage, %d had one before", now, measured)
			}
			measured = now
		}
	})
}

// A volume that is published between two refreshes soon has its usage, even if other volumes follow without a pause. A
// volume that is unpublished has no usage any more.
func TestUsageFollowsPublishAndUnpublish(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		in := func(names ...string) []host.AllocStatus {
			var list []registry.AllocVolume
			for _, n := range names {
				list = append(list, inUse("disk", n))
			}
			return []host.AllocStatus{{Volumes: list}}
		}
		h := &fakeHost{allocs: in("stays", "old"), events: []host.Event{
			{Kind: registry.EventPublished, Volume: name("new")},
			{Kind: registry.EventUnpublished, Volume: name("old")}}}
		var asked atomic.Int32
		h.stats = func(_ context.Context, n host.VolumeName) ([]host.VolumeUsage, error) {
			if n.ID == "stays" {
				asked.Add(1)
			}
			return []host.VolumeUsage{{Unit: "bytes", Total: 100, Used: 90, Available: 10}}, nil
		}
		m := running(t, h)
		scrape(t, m)
		synctest.Wait()
		h.allocs = in("stays", "new")
		for range 4 {
			time.Sleep(changeDelay / 2)
			m.changed <- name("other")
		}
		synctest.Wait()
		if u := m.Usage(); len(u) != 2 || len(u[name("stays")]) != 1 || len(u[name("new")]) != 1 {
			t.Errorf("usage: %v", u)
		}
		if n := asked.Load(); n != 1 {
			t.Errorf("an unchanged volume was asked for %d times", n)
		}
	})
}

// Events from before the start of the agent are not counted, even if the shim does not answer at the start.
func TestOnlyNewEventsAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &fakeHost{events: []host.Event{{Seq: 1, Kind: "staged"}, {Seq: 43, Kind: "staged"}}}
		h.silent.Store(3)
		m := running(t, h)
		time.Sleep(time.Minute)
		expect(t, scrape(t, m), `holdfast_events_total{kind="staged"} 1`)
	})
}

func TestHealthzFollowsTheShim(t *testing.T) {
	h := &fakeHost{}
	m := New(h, hclog.NewNullLogger())
	for _, c := range []struct {
		down bool
		code int
		text string
	}{{false, 200, "ok"}, {true, 503, "the shim is not serving: the shim has died"}} {
		h.down = c.down
		w := httptest.NewRecorder()
		m.healthz(w, nil)
		if w.Code != c.code || strings.TrimSpace(w.Body.String()) != c.text {
			t.Errorf("down %v: %d %s", c.down, w.Code, w.Body)
		}
	}
}

const document = "../../../docs/metrics.md"

// TestMetricsDocument compares docs/metrics.md with the definitions. The document is printed from them.
func TestMetricsDocument(t *testing.T) {
	var b strings.Builder
	b.WriteString(heading)
	for _, d := range definitions {
		kind := "histogram"
		if d.kind != 0 {
			kind = strings.ToLower(d.kind.ToDTO().String())
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", d.name, kind, strings.Join(d.labels, ", "), d.help)
	}
	b.WriteString(notes)
	if *update {
		if err := os.WriteFile(document, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if text, err := os.ReadFile(document); err != nil || string(text) != b.String() {
		t.Errorf("docs/metrics.md is not what the definitions say (%v); run go test ./host/agent/metrics -update", err)
	}
}

const heading = `# Metrics

Printed by ` + "`go test ./host/agent/metrics -update`" + `.

` + "`holdfast agent --metrics 127.0.0.1:9750`" + ` serves Prometheus metrics at /metrics and its health at
/healthz: 200, or 503 with the reason while the shim does not answer. It is off by default. The control socket always
serves the metrics:
` + "`curl --unix-socket /run/holdfast/DIGEST/agent.sock http://holdfast/v1/metrics`" + `.

| Metric | Type | Labels | Meaning |
|---|---|---|---|
`

const notes = `
- Names and labels of ` + "`csi_operations_seconds`" + ` and ` + "`kubelet_volume_stats_*`" + ` are those of kubelet.
  persistentvolumeclaim is the ID of the volume.
- No swap makes a counter smaller. A restart of the agent does, as Prometheus expects. A shim that dies takes along the
  CSI calls that it has made since the last scrape. Those of a swapped shim are read before it ends.
- Plugins are asked for the usage of volumes in the background: each volume once a minute, 4 volumes of a plugin at a
  time, until no scrape has come for 10 minutes. The first scrape after that has no usage. A volume that is mounted
  meanwhile is asked for soon, and one that is unmounted has no usage soon after. A volume that is being changed keeps
  its last usage. A plugin that does not answer within 5 seconds, is not healthy, or cannot say is skipped until the
  next minute, and its volumes have no usage. Volumes that a slow plugin has not answered for within 30 seconds keep
  their last usage.
- A scrape waits at most 2 seconds for the shim, and leaves out what the shim has not answered.

[examples/monitoring](../examples/monitoring) has alert rules and a dashboard for Grafana.
`

// Each metric in the alert rules and the dashboard exists, and each rule and panel uses at least one.
func TestRulesAndDashboardNameMetricsThatExist(t *testing.T) {
	known := map[string]bool{}
	for _, d := range definitions {
		if known[d.name] = d.kind != 0; d.kind == 0 {
			known[d.name+"_bucket"], known[d.name+"_count"], known[d.name+"_sum"] = true, true, true
		}
	}
	for file, expr := range map[string]*regexp.Regexp{
		"alerts.yml":     regexp.MustCompile(`(?m)^ *expr: (.*)$`),
		"dashboard.json": regexp.MustCompile(`"expr": "(.*)"`),
	} {
		text, err := os.ReadFile("../../../examples/monitoring/" + file)
		if err != nil {
			t.Fatal(err)
		}
		found := expr.FindAllSubmatch(text, -1)
		if len(found) < 5 {
			t.Errorf("%s has %d expressions", file, len(found))
		}
		for _, e := range found {
			names := regexp.MustCompile(`\b(csi|kubelet|holdfast)_[a-z_]+`).FindAllString(string(e[1]), -1)
			if len(names) == 0 {
				t.Errorf("%s: no metric in %s", file, e[1])
			}
			for _, n := range names {
				if !known[n] {
					t.Errorf("%s: metric %s does not exist", file, n)
				}
			}
		}
	}
}

func TestPromtoolAcceptsTheAlertRules(t *testing.T) {
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("promtool is missing (Debian package prometheus)")
	}
	for _, args := range [][]string{{"check", "rules", "alerts.yml"}, {"test", "rules", "alerts_test.yml"}} {
		c := exec.Command(promtool, args...)
		c.Dir = "../../../examples/monitoring"
		if out, err := c.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	}
}
