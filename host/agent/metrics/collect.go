package metrics

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"

	"holdfast/host"
	"holdfast/registry"
)

// Source is the part of a *host.Host that provides the values.
type Source interface {
	CallMetrics(ctx context.Context) ([]host.CallMetric, error)
	Status(ctx context.Context) (host.ShimStatus, error)
	ShimState() host.ShimState
	Swaps() []host.SwapReport
	Plugins(ctx context.Context, q host.PluginQuery) (host.PluginList, host.Seq, error)
	Allocs(ctx context.Context, q host.AllocQuery) ([]host.AllocStatus, host.Seq, error)
	VolumeStats(ctx context.Context, n host.VolumeName) ([]host.VolumeUsage, host.Seq, error)
	Watch(ctx context.Context, o host.WatchOptions, fn func(host.Event) error) error
}

var _ Source = (*host.Host)(nil)

// Metrics collects the values of an agent's metrics. A scrape calls no plugin, and waits at most scrapeLimit for the
// shim.
type Metrics struct {
	source   Source
	log      hclog.Logger
	registry *prometheus.Registry
	scraped  chan struct{} // capacity 1: the usage was requested after the last refresh

	changed chan host.VolumeName // capacity changedMax: volumes whose use has changed since the last refresh

	// Failed returns for each plugin the number of its tasks that have used up their restarts. The shim has no records
	// of such tasks. nil means that there are none. Failed is set before Run.
	Failed func() map[host.PluginID]int

	swaps  *prometheus.CounterVec
	holds  prometheus.Histogram
	events *prometheus.CounterVec

	mu      sync.Mutex                             // guards what follows; held for no longer than a look-up
	usage   map[host.VolumeName][]host.VolumeUsage // replaced as a whole
	counted map[time.Time]bool                     // swaps that are counted already, by their begin
}

// New returns the metrics of an agent. Run keeps them up to date.
func New(s Source, log hclog.Logger) *Metrics {
	m := &Metrics{
		source: s, log: log, registry: prometheus.NewPedanticRegistry(), scraped: make(chan struct{}, 1),
		changed: make(chan host.VolumeName, changedMax),
		swaps:   prometheus.NewCounterVec(prometheus.CounterOpts{Name: swaps.name, Help: swaps.help}, swaps.labels),
		events:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: events.name, Help: events.help}, events.labels),
		counted: map[time.Time]bool{},
		holds: prometheus.NewHistogram(prometheus.HistogramOpts{Name: holds.name, Help: holds.help,
			Buckets: []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}}),
	}
	for _, o := range []host.SwapOutcome{host.SwapCommitted, host.SwapRefused, host.SwapRolledBack} {
		m.swaps.WithLabelValues(string(o)) // start with 0, for rate and increase
	}
	for _, swap := range s.Swaps() { // of earlier agents
		m.counted[swap.Began] = swap.Outcome != host.SwapBaking
	}
	m.registry.MustRegister(m)
	return m
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(to chan<- *prometheus.Desc) {
	for _, d := range definitions {
		to <- d.desc
	}
}

// scrapeLimit bounds the calls to the shim of one scrape.
const scrapeLimit = 2 * time.Second

// Collect implements prometheus.Collector. It leaves out values that the shim does not return in time.
func (m *Metrics) Collect(to chan<- prometheus.Metric) {
	m.requestUsage()
	ctx, cancel := context.WithTimeout(context.Background(), scrapeLimit)
	defer cancel()
	m.events.Collect(to)
	m.collectSwaps(to)
	m.collectUsage(to)
	err := m.collectCalls(ctx, to)
	serving := m.source.ShimState().Serving
	to <- shimServing.value(number(serving))
	if serving { // after an error, collect the others nevertheless: an older shim may lack one call
		err = errors.Join(err, m.collectStatus(ctx, to), m.collectPlugins(ctx, to), m.collectAllocs(ctx, to))
	}
	if err != nil {
		m.log.Warn("the shim did not answer; metrics are incomplete", "error", err)
	}
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// collectCalls adds up the calls of plugins with the same name, and the heartbeats of each plugin.
func (m *Metrics) collectCalls(ctx context.Context, to chan<- prometheus.Metric) error {
	calls, err := m.source.CallMetrics(ctx)
	operations, beats := map[[3]string]registry.CallMetric{}, map[string]registry.CallMetric{}
	for _, c := range calls {
		addTo(operations, [3]string{c.Driver, c.Method, c.Code}, c)
		if c.Method == "/csi.v1.Identity/Probe" {
			addTo(beats, string(c.Plugin), c)
		}
	}
	for k, c := range operations {
		to <- csiOperations.histogram(c, kubeletFrom, k[:]...)
	}
	for plugin, c := range beats {
		to <- heartbeat.histogram(c, 0, plugin)
	}
	return err
}

func addTo[K comparable](sums map[K]registry.CallMetric, k K, c registry.CallMetric) {
	sum := registry.CallMetric{Buckets: make([]uint64, len(c.Buckets)), Seconds: c.Seconds + sums[k].Seconds}
	copy(sum.Buckets, sums[k].Buckets)
	for i, n := range c.Buckets {
		sum.Buckets[i] += n
	}
	sums[k] = sum
}

// collectSwaps counts swaps that have ended since the last scrape. The host remembers more swaps than can end between
// two scrapes.
func (m *Metrics) collectSwaps(to chan<- prometheus.Metric) {
	m.mu.Lock()
	counted := map[time.Time]bool{}
	for _, s := range m.source.Swaps() {
		ended := s.Outcome != host.SwapBaking
		counted[s.Began] = ended
		if !ended || m.counted[s.Began] {
			continue
		}
		m.swaps.WithLabelValues(string(s.Outcome)).Inc()
		if !s.HeldSince.IsZero() {
			m.holds.Observe(s.Hold.Seconds())
		}
	}
	m.counted = counted
	m.mu.Unlock()
	m.swaps.Collect(to)
	m.holds.Collect(to)
}

func (m *Metrics) collectStatus(ctx context.Context, to chan<- prometheus.Metric) error {
	st, err := m.source.Status(ctx)
	if err == nil {
		to <- intentsOpen.value(float64(st.OpenIntents))
		to <- commits.value(float64(st.Index))
	}
	return err
}

func (m *Metrics) collectPlugins(ctx context.Context, to chan<- prometheus.Metric) error {
	list, _, err := m.source.Plugins(ctx, host.PluginQuery{})
	if err != nil {
		return err
	}
	for _, in := range list.Instances {
		if list.Active[in.InstanceKey] {
			to <- pluginHealthy.value(number(in.Health.State == host.Healthy), string(in.Plugin), string(in.Role))
		}
	}
	unhealthy := map[host.PluginID]int{}
	for _, t := range list.Tasks {
		unhealthy[t.Plugin] += int(number(!t.Healthy && t.Phase != registry.TaskStopping))
	}
	if m.Failed != nil {
		for plugin, n := range m.Failed() {
			unhealthy[plugin] += n
		}
	}
	for plugin, n := range unhealthy {
		to <- pluginUnhealthyTasks.value(float64(n), string(plugin))
	}
	return nil
}

// collectAllocs collects what the volumes of allocs wait for, and their dead mounts.
func (m *Metrics) collectAllocs(ctx context.Context, to chan<- prometheus.Metric) error {
	allocs, _, err := m.source.Allocs(ctx, host.AllocQuery{})
	if err != nil {
		return err
	}
	now, waiting := time.Now(), 0
	ages, dead := map[[4]string]time.Duration{}, map[host.VolumeName]int{}
	for _, a := range allocs {
		for _, v := range a.Volumes {
			if v.Trouble != "" {
				dead[v.Name]++
			}
		}
		waiting += len(a.Waiting)
		for _, w := range a.Waiting { // even if the volume does not exist
			k := [4]string{string(w.Volume.Namespace), string(w.Volume.ID), string(a.ID), string(w.Step)}
			if !w.Since.IsZero() {
				ages[k] = max(ages[k], now.Sub(w.Since))
			}
		}
	}
	to <- claimsWaiting.value(float64(waiting))
	for k, age := range ages {
		to <- claimWaiting.value(age.Seconds(), k[:]...)
	}
	for name, n := range dead {
		to <- deadMounts.value(float64(n), string(name.Namespace), string(name.ID))
	}
	return nil
}
