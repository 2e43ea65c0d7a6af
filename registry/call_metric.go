package registry

// CallBuckets are the upper bounds in seconds of the buckets of a CallMetric. From the fifth on they are those of
// kubelet's csi_operations_seconds. Totals add counts of several releases of the shim, so the bounds never change.
var CallBuckets = []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 15, 25, 50, 120, 300, 600}

// CallMetric counts the calls of one CSI method at one plugin that have ended with the same code.
type CallMetric struct {
	Plugin PluginID
	Driver string // the name that GetPluginInfo returns; "unknown-driver" before its first answer
	Method string // as in /csi.v1.Node/NodeStageVolume
	Code   string // name of the gRPC code, as in DeadlineExceeded
	// Buckets counts the calls by duration: one count for each bound in CallBuckets, and a last one for calls that took
	// longer than all bounds. Each call is counted once.
	Buckets []uint64
	Seconds float64 // sum of the durations
}
