package agent

import (
	"context"

	"holdfast/host"
	"holdfast/registry"
)

// followLostVolumes stops allocs whose volumes were given to other nodes while this node was declared lost. Their jobs
// place other allocs, which wait until the node is ready. It may have missed an event before a resync of the watch, as
// at its start. findLostVolumes then finds these allocs.
func (a *Agent) followLostVolumes(ctx context.Context, s Volumes) {
	o := host.WatchOptions{Snapshot: true, Kinds: []host.EventKind{registry.EventVolumesLost}}
	err := s.Watch(ctx, o, func(e host.Event) error {
		switch e.Kind {
		case registry.EventVolumesLost:
			a.loseVolumes(e.Alloc, e.Detail)
		case registry.EventResync:
			a.findLostVolumes(ctx, s)
		}
		return nil
	})
	if ctx.Err() == nil {
		a.log.Error("stopped receiving events of the shim; allocs that lose their volumes keep running", "error", err)
	}
}

// findLostVolumes stops the allocs that the shim releases although the agent has not asked for that.
func (a *Agent) findLostVolumes(ctx context.Context, s Volumes) {
	for b := newBackoff(); ; sleep(ctx, b.NextBackOff(), nil) {
		list, _, err := s.Allocs(ctx, host.AllocQuery{})
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			a.log.Warn("cannot ask which allocs have lost their volumes", "error", err)
			continue
		}
		for _, al := range list {
			if al.State == registry.AllocReleasing {
				a.loseVolumes(al.ID, "this node was out of service or fenced")
			}
		}
		return
	}
}

// loseVolumes stops the alloc that has lost its volumes. It reports the loss of an engine mount, because the agent
// cannot stop an engine's containers.
func (a *Agent) loseVolumes(id host.AllocID, why string) {
	a.loseEngineMount(id, why)
	a.stopForLostVolumes(id, why)
}

// stopForLostVolumes stops an alloc, unless it is being stopped already or is not an alloc of a job.
func (a *Agent) stopForLostVolumes(id host.AllocID, why string) {
	a.writing.Lock()
	defer a.writing.Unlock()
	r := a.record(id)
	if r == nil || r.Stop || r.State == AllocReleasing || r.State.Ended() {
		return
	}
	a.log.Error("an alloc has lost its volumes and is stopped", "alloc", id, "reason", why)
	err := a.updateLocked(id, func(r *AllocRecord) { r.note("", "stopping, as its volumes were lost: %s", why) })
	if err == nil {
		err = a.stopLocked(id)
	}
	if err != nil {
		a.log.Error("cannot stop an alloc that has lost its volumes", "alloc", id, "error", err)
	}
	a.wakeRun()
}
