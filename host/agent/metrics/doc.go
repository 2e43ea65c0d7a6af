// Package metrics has the numbers of an agent and its shim as Prometheus metrics. CSI calls and volume usage have the
// names of kubelet, which dashboards for Kubernetes use. docs/metrics.md lists all metrics.
package metrics
