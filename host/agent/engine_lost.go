package agent

import (
	"context"
	"maps"
	"slices"
	"strings"

	"holdfast/host"
	"holdfast/internal/display"
	"holdfast/registry"
)

// LostEngineMount is a mount for container engines of a volume that this node has no claim on any more: the node was
// out of service or fenced, or a person has released the claim. The containers may still write.
type LostEngineMount struct {
	Volume host.VolumeID
	Alloc  host.AllocID
	Path   string
	Reason string
	// Containers are the IDs of the containers that use the mount, as far as they are known.
	Containers []string
	// Stop is the command that stops the containers, or lists them if their IDs are not known.
	Stop string
}

// LostEngineMounts lists the lost mounts. The node releases each once its containers have stopped.
func (a *Agent) LostEngineMounts(ctx context.Context, s Volumes) (list []LostEngineMount, err error) {
	all := a.EngineMounts()
	if len(all) == 0 {
		return nil, nil
	}
	allocs, _, err := s.Allocs(ctx, host.AllocQuery{})
	if err != nil {
		return nil, err
	}
	for _, m := range all {
		i := slices.IndexFunc(allocs, func(al host.AllocStatus) bool { return al.ID == m.Alloc })
		if i < 0 || m.Path == "" || len(m.Holders) == 0 {
			continue // unknown to the shim, not complete, or held by no engine
		}
		if reason := a.engine.lostReason(allocs[i]); reason != "" {
			list = append(list, a.describeLost(m, reason))
		}
	}
	return list, nil
}

func (a *Agent) describeLost(m *EngineMount, reason string) LostEngineMount {
	l := LostEngineMount{Volume: m.Volume, Alloc: m.Alloc, Path: m.Path, Reason: reason}
	l.Containers, _ = a.EngineContainers(m.Volume) // after an error, the command of Stop lists them
	engines := slices.Sorted(maps.Keys(m.countByEngine()))
	if len(l.Containers) > 0 && len(engines) == 1 {
		var shortIDs []string
		for _, id := range l.Containers {
			shortIDs = append(shortIDs, id[:12])
		}
		l.Stop = display.Command(engines[0]+" stop", shortIDs...)
		return l
	}
	var commands []string
	for _, engine := range engines {
		commands = append(commands, listContainers(engine, m.Volume))
	}
	l.Stop = strings.Join(commands, "; ")
	return l
}

// countByEngine returns the number of mounts by the name of the engine that holds them.
func (m *EngineMount) countByEngine() map[string]int {
	mounts := map[string]int{}
	for _, h := range m.Holders {
		mounts[h.Engine.Name()] += h.Count
	}
	return mounts
}

func listContainers(engine string, volume host.VolumeID) string {
	return display.Command(engine+" ps --filter", "volume="+string(volume))
}

// lostReason returns why the node has lost the volume of a complete mount. al is the mount's alloc, as the shim reports
// it. The reason is empty if the alloc has its claim.
func (e *engineMounts) lostReason(al host.AllocStatus) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch why := e.lost[al.ID]; {
	case why != "":
		return why
	case al.State == registry.AllocReleasing:
		return "it is being released from this node"
	case len(al.Volumes) == 0:
		return "its claim was released"
	}
	return ""
}

// loseEngineMount records and logs why this node has lost the volume of an engine's containers. The mount is released
// once they have stopped. If no engine holds a mount of this alloc, loseEngineMount does nothing.
func (a *Agent) loseEngineMount(id host.AllocID, reason string) {
	all := a.EngineMounts()
	i := slices.IndexFunc(all, func(m *EngineMount) bool { return m.Alloc == id })
	if i < 0 || len(all[i].Holders) == 0 {
		return
	}
	a.engine.mu.Lock()
	a.engine.lost[id] = reason
	a.engine.mu.Unlock()
	l := a.describeLost(all[i], reason)
	a.log.Error("containers use a volume that this node has lost; stop them", "volume", l.Volume, "reason", reason,
		"command", l.Stop)
}
