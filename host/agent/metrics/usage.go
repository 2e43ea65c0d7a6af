package metrics

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"holdfast/host"
	"holdfast/registry"
)

const (
	usageInterval = time.Minute      // from the end of a refresh to the start of the next
	usagePause    = 10 * time.Minute // after this time without a scrape, plugins are not asked any more
	usageLimit    = 5 * time.Second  // for the usage of one volume
	usageAtOnce   = 4                // number of volumes that a plugin is asked about at the same time
	pluginLimit   = 30 * time.Second // for all volumes of one plugin
	changedMax    = 16               // capacity of the channel changed
	changeDelay   = 2 * time.Second  // after a publish: a volume that is being changed has no usage
)

// Run counts events and refreshes the usage of volumes until ctx ends. It asks plugins only while scrapes come:
// the first scrape, and the first after usagePause without one, gets no usage. Between two refreshes it asks for the
// usage of newly published volumes, and drops that of unpublished ones.
func (m *Metrics) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { m.countEvents(ctx) })
	for {
		select {
		case <-m.scraped:
		case <-ctx.Done():
			return nil
		}
		m.refreshWhileScraped(ctx)
	}
}

// refreshWhileScraped refreshes the usage every usageInterval, until no scrape has come for usagePause. Then it drops
// the usage, because the next scrape would otherwise get outdated values.
func (m *Metrics) refreshWhileScraped(ctx context.Context) {
	for last := time.Now(); time.Since(last) < usagePause && ctx.Err() == nil; {
		m.refresh(ctx, nil)
		m.awaitRefresh(ctx)
		select {
		case <-m.scraped:
			last = time.Now()
		default:
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.usage = nil
}

// awaitRefresh returns when the next refresh is due. Meanwhile it refreshes volumes that were published or unpublished,
// changeDelay after the first change. A later change does not extend this delay, because continuous changes would
// otherwise delay the refresh forever.
func (m *Metrics) awaitRefresh(ctx context.Context) {
	var soon <-chan time.Time
	changed, due := map[host.VolumeName]bool{}, time.After(usageInterval)
	for {
		select {
		case name := <-m.changed:
			if len(changed) == 0 {
				soon = time.After(changeDelay)
			}
			changed[name] = true
		case <-soon:
			m.refresh(ctx, changed)
			clear(changed)
		case <-due:
			return
		case <-ctx.Done():
			return
		}
	}
}

// countEvents counts the events from its start on.
func (m *Metrics) countEvents(ctx context.Context) {
	after, err := m.awaitIndex(ctx)
	if err != nil {
		return
	}
	err = m.source.Watch(ctx, host.WatchOptions{After: after}, func(e host.Event) error {
		m.events.WithLabelValues(string(e.Kind)).Inc()
		if e.Kind == registry.EventPublished || e.Kind == registry.EventUnpublished {
			select {
			case m.changed <- e.Volume:
			default: // the channel is full; the next refresh includes the volume
			}
		}
		return nil
	})
	if ctx.Err() == nil {
		m.log.Error("stopped counting events", "error", err)
	}
}

// indexPause is the pause between two requests for the index.
const indexPause = time.Second

// awaitIndex returns the index of the state, once the shim answers.
func (m *Metrics) awaitIndex(ctx context.Context) (host.Seq, error) {
	for {
		st, err := m.source.Status(ctx)
		if err == nil {
			return st.Index, nil
		}
		select {
		case <-time.After(indexPause):
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

// Usage returns the last reported usage of the volumes that are mounted here, and requests a refresh as a scrape does.
// The caller must not change the result.
func (m *Metrics) Usage() map[host.VolumeName][]host.VolumeUsage {
	m.requestUsage()
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.usage
}

// requestUsage makes Run refresh the usage, unless Run has done so within usageInterval.
func (m *Metrics) requestUsage() {
	select {
	case m.scraped <- struct{}{}:
	default:
	}
}

// refresh asks plugins for the usage of the volumes that are mounted here. If changed is not nil, it asks only about
// the volumes in changed, and the other mounted volumes keep their last usage. A volume that is not mounted any more
// has no usage. All plugins are asked at the same time, each for at most pluginLimit, so that a hung plugin delays no
// other.
func (m *Metrics) refresh(ctx context.Context, changed map[host.VolumeName]bool) {
	allocs, _, err := m.source.Allocs(ctx, host.AllocQuery{})
	if err != nil {
		m.log.Warn("cannot list the volumes in use; their usage is not refreshed", "error", err)
		return
	}
	used, rest := map[host.PluginID]map[host.VolumeName]bool{}, []host.VolumeName{}
	for _, a := range allocs {
		for _, v := range a.Volumes {
			switch {
			case v.Publish != registry.MarkDone:
				continue
			case changed != nil && !changed[v.Name]:
				rest = append(rest, v.Name)
				continue
			}
			if used[v.Volume.Plugin] == nil {
				used[v.Volume.Plugin] = map[host.VolumeName]bool{}
			}
			used[v.Volume.Plugin][v.Name] = true
		}
	}
	next := map[host.VolumeName][]host.VolumeUsage{}
	m.copyLastUsage(rest, next)
	var wg sync.WaitGroup
	for _, names := range used {
		wg.Go(func() { m.measure(ctx, names, next) })
	}
	wg.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.usage = next
}

// measure adds the usage of volumes of one plugin to next, which m.mu guards. It stops as soon as the plugin does not
// answer, or does not support the call. Volumes that it does not reach within pluginLimit keep their last usage.
func (m *Metrics) measure(
	ctx context.Context, names map[host.VolumeName]bool, next map[host.VolumeName][]host.VolumeUsage,
) {
	ctx, stop := context.WithTimeout(ctx, pluginLimit)
	defer stop()
	queue := make(chan host.VolumeName)
	var wg sync.WaitGroup
	defer wg.Wait()
	for range usageAtOnce {
		wg.Go(func() {
			for name := range queue {
				if !m.measureOne(ctx, name, next) {
					stop()
				}
			}
		})
	}
	defer close(queue)
	list := slices.Collect(maps.Keys(names)) // random order
	for i, name := range list {
		select {
		case queue <- name:
		case <-ctx.Done():
			if ctx.Err() == context.DeadlineExceeded {
				m.copyLastUsage(list[i:], next)
			}
			return
		}
	}
}

// copyLastUsage copies the last usage of volumes to next.
func (m *Metrics) copyLastUsage(names []host.VolumeName, next map[host.VolumeName][]host.VolumeUsage) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, name := range names {
		if usage, known := m.usage[name]; known {
			next[name] = usage
		}
	}
}

// measureOne adds the usage of a volume to next. A volume that is being changed keeps its last usage. So does a volume
// whose answer did not arrive before ctx ended. goOn reports whether to ask the plugin about further volumes.
func (m *Metrics) measureOne(
	ctx context.Context, name host.VolumeName, next map[host.VolumeName][]host.VolumeUsage,
) (goOn bool) {
	limited, cancel := context.WithTimeout(ctx, usageLimit)
	defer cancel()
	usage, _, err := m.source.VolumeStats(limited, name)
	m.mu.Lock()
	defer m.mu.Unlock()
	if errors.Is(err, host.ErrConflict) || err != nil && ctx.Err() == context.DeadlineExceeded {
		usage, err = m.usage[name], nil
	}
	if err == nil {
		next[name] = usage
		return true
	}
	m.log.Debug("the usage of a volume is unknown", "volume", name, "error", err)
	return limited.Err() == nil && !errors.Is(err, host.ErrUnavailable) && !errors.Is(err, host.ErrUnsupported)
}

func (m *Metrics) collectUsage(to chan<- prometheus.Metric) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for name, list := range m.usage {
		seen := map[string]bool{}
		for _, u := range list {
			total, free, used := capacityBytes, availableBytes, usedBytes
			if u.Unit == "inodes" {
				total, free, used = inodes, inodesFree, inodesUsed
			} else if u.Unit != "bytes" {
				continue
			}
			if seen[u.Unit] { // a plugin may repeat a unit
				continue
			}
			seen[u.Unit] = true
			labels := []string{string(name.Namespace), string(name.ID)}
			to <- total.value(float64(u.Total), labels...)
			if u.Used != 0 || u.Available != 0 { // 0 in both: the plugin has left them out, as for block devices
				to <- free.value(float64(u.Available), labels...)
				to <- used.value(float64(u.Used), labels...)
			}
		}
	}
}
