package csi

import (
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/registry"
)

// CallMetrics counts the calls that have ended, by plugin, method and code. The zero value is ready for use.
type CallMetrics struct {
	mu    sync.Mutex // guards calls and kinds; held for no longer than a look-up
	calls map[callKind]*registry.CallMetric
	kinds map[registry.PluginID]int // number of keys in calls, by plugin
}

// maxKinds bounds the kinds of calls of one plugin, because plugins choose their driver names, and clients of endpoints
// choose methods. Further kinds are counted as "other".
const maxKinds = 1000

type callKind struct {
	plugin               registry.PluginID
	driver, method, code string
}

// observe counts a call.
func (m *CallMetrics) observe(k callKind, took time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := m.calls[k]
	if c == nil && m.kinds[k.plugin] >= maxKinds {
		k.driver, k.method = "other", "other"
		c = m.calls[k]
	}
	if c == nil {
		c = &registry.CallMetric{
			Plugin: k.plugin, Driver: k.driver, Method: k.method, Code: k.code,
			Buckets: make([]uint64, len(registry.CallBuckets)+1),
		}
		if m.calls == nil {
			m.calls, m.kinds = map[callKind]*registry.CallMetric{}, map[registry.PluginID]int{}
		}
		m.calls[k] = c
		m.kinds[k.plugin]++
	}
	i, _ := slices.BinarySearch(registry.CallBuckets, took.Seconds())
	c.Buckets[i]++
	c.Seconds += took.Seconds()
}

// List returns a copy of all counts, in no order.
func (m *CallMetrics) List() []registry.CallMetric {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := make([]registry.CallMetric, 0, len(m.calls))
	for _, c := range m.calls {
		one := *c
		one.Buckets = slices.Clone(c.Buckets)
		list = append(list, one)
	}
	return list
}

// driverName returns the name that the plugin has reported over this link. Until then it returns the name that the
// sidecars of Kubernetes use.
func (l *link) driverName() string {
	if name := l.driver.Load(); name != nil {
		return *name
	}
	return "unknown-driver"
}

// codeLabel returns the name of the error's code. A code that gRPC does not define counts as Unknown, so that plugins
// cannot add labels.
func codeLabel(err error) string {
	if code := status.Code(err); code <= codes.Unauthenticated {
		return code.String()
	}
	return codes.Unknown.String()
}
