package host

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
)

// CallMetrics returns the counts of all ended CSI calls of this host's shims. No swap makes a count smaller. If a shim
// dies, its counts since the last CallMetrics are lost. If no shim is active, CallMetrics does not wait for one. With
// an error, the counts are those of the last successful call.
func (h *Host) CallMetrics(ctx context.Context) ([]CallMetric, error) {
	var err error
	if h.shimState.get().Serving {
		err = h.do(ctx, reads, func(ctx context.Context, sh *shim) error { return h.metrics.read(ctx, sh) })
	}
	return h.metrics.list(), err
}

// lastMetricsLimit bounds the wait for the counts of a shim that is about to end.
const lastMetricsLimit = time.Second

// callMetrics adds up the counts of all shims of a host.
type callMetrics struct {
	mu    sync.Mutex // guards total and counted of all shims; not held during calls
	total map[callKey]CallMetric
}

type callKey struct {
	plugin               PluginID
	driver, method, code string
}

// read adds what a shim has counted since it was read last.
func (t *callMetrics) read(ctx context.Context, sh *shim) error {
	reply, err := sh.control().Metrics(ctx, &pb.MetricsRequest{Call: &pb.Call{}})
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.total == nil {
		t.total = map[callKey]CallMetric{}
	}
	if sh.counted == nil {
		sh.counted = map[callKey]CallMetric{}
	}
	for _, now := range convert(reply.GetCalls(), wire.CallMetric) {
		key := callKey{now.Plugin, now.Driver, now.Method, now.Code}
		last := sh.counted[key]
		if now.Seconds < last.Seconds { // an answer that was overtaken by a later one
			continue
		}
		sh.counted[key], t.total[key] = now, addMetric(t.total[key], now, last)
	}
	return nil
}

// addMetric returns sum + now - last.
func addMetric(sum, now, last CallMetric) CallMetric {
	total := now
	total.Seconds += sum.Seconds - last.Seconds
	total.Buckets = slices.Clone(now.Buckets)
	for i := range last.Buckets {
		total.Buckets[i] -= last.Buckets[i]
	}
	for i := range sum.Buckets {
		total.Buckets[i] += sum.Buckets[i]
	}
	return total
}

func (t *callMetrics) list() []CallMetric {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Values(t.total))
}
