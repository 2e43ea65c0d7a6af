package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"holdfast/registry"
)

// definition declares a metric. docs/metrics.md is printed from definitions.
type definition struct {
	name, help string
	labels     []string
	kind       prometheus.ValueType // 0: a histogram
	constant   prometheus.Labels
	desc       *prometheus.Desc
}

var definitions []*definition

func define(
	kind prometheus.ValueType, constant prometheus.Labels, name, help string, labels ...string,
) *definition {
	d := &definition{name, help, labels, kind, constant, prometheus.NewDesc(name, help, labels, constant)}
	definitions = append(definitions, d)
	return d
}

func gauge(name, help string, labels ...string) *definition {
	return define(prometheus.GaugeValue, nil, name, help, labels...)
}

func counter(name, help string, labels ...string) *definition {
	return define(prometheus.CounterValue, nil, name, help, labels...)
}

// value returns the metric with a value.
func (d *definition) value(v float64, labels ...string) prometheus.Metric {
	return prometheus.MustNewConstMetric(d.desc, d.kind, v, labels...)
}

// histogram returns the metric with the counts of calls. It leaves out bounds below from.
func (d *definition) histogram(m registry.CallMetric, from float64, labels ...string) prometheus.Metric {
	buckets, count := map[float64]uint64{}, uint64(0)
	for i, n := range m.Buckets {
		count += n
		if i < len(registry.CallBuckets) && registry.CallBuckets[i] >= from {
			buckets[registry.CallBuckets[i]] = count
		}
	}
	return prometheus.MustNewConstHistogram(d.desc, count, m.Seconds, buckets, labels...)
}

// kubeletFrom is the first bound of kubelet's csi_operations_seconds.
const kubeletFrom = .1

var (
	csiOperations = define(0, prometheus.Labels{"migrated": "false"}, "csi_operations_seconds",
		"Duration of CSI calls to plugins, in the labels and buckets of kubelet. migrated is always false.",
		"driver_name", "method_name", "grpc_status_code")

	volumeLabels  = []string{"namespace", "persistentvolumeclaim"}
	capacityBytes = gauge("kubelet_volume_stats_capacity_bytes", "Size of a volume that is mounted here.",
		volumeLabels...)
	availableBytes = gauge("kubelet_volume_stats_available_bytes", "Free space of the volume.", volumeLabels...)
	usedBytes      = gauge("kubelet_volume_stats_used_bytes", "Used space of the volume.", volumeLabels...)
	inodes         = gauge("kubelet_volume_stats_inodes", "Inodes of the volume.", volumeLabels...)
	inodesFree     = gauge("kubelet_volume_stats_inodes_free", "Free inodes of the volume.", volumeLabels...)
	inodesUsed     = gauge("kubelet_volume_stats_inodes_used", "Used inodes of the volume.", volumeLabels...)

	pluginHealthy = gauge("holdfast_plugin_healthy",
		"1 if the active instance of the plugin in the role is healthy, else 0.", "plugin", "role")
	pluginUnhealthyTasks = gauge("holdfast_plugin_unhealthy_tasks",
		"Tasks that run the plugin and are not healthy or registered yet, wait for a restart, or have failed for good.",
		"plugin")
	heartbeat = define(0, nil, "holdfast_plugin_heartbeat_seconds",
		"Duration of heartbeats (Probe) of the plugin, also of those that failed.", "plugin")

	claimsWaiting = gauge("holdfast_claims_waiting", "Volumes of allocs that wait for a step, up or down.")
	claimWaiting  = gauge("holdfast_claim_waiting_seconds",
		"How long an alloc has waited for a step of its volume.", "namespace", "volume", "alloc", "step")
	deadMounts = gauge("holdfast_dead_mounts",
		"Allocs whose mount of the volume is lost, dead or hangs. Volumes without one are left out.", "namespace",
		"volume")

	shimServing = gauge("holdfast_shim_serving", "1 if the shim answers calls, 0 if calls are held.")
	intentsOpen = gauge("holdfast_intents_open", "CSI calls under way or of unknown outcome.")
	commits     = counter("holdfast_store_commits_total",
		"Index of the state: the number of changes that were committed since it was created.")
	swaps = counter("holdfast_swaps_total",
		"Swaps of the shim that have ended since the agent started.", "outcome")
	holds = define(0, nil, "holdfast_swap_hold_seconds",
		"The longest possible wait of a call during a swap, for swaps that held calls.")
	events = counter("holdfast_events_total", "Events since the agent started.", "kind")
)
