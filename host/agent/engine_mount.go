package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/internal/display"
	"holdfast/internal/mount"
	"holdfast/internal/proc"
	"holdfast/registry"
)

// EngineMount is a volume that is mounted for the containers of an engine. To the shim it is an alloc.
type EngineMount struct {
	Volume  host.VolumeID           `json:"volume"`
	Alloc   host.AllocID            `json:"alloc"`
	Sealed  hooks.Sealed            `json:"sealed"` // its group
	Path    string                  `json:"path,omitempty"`
	Boot    string                  `json:"boot"`
	Since   time.Time               `json:"since"`
	Holders map[string]EngineHolder `json:"holders"` // by the ID that the engine sent
}

// EngineHolder counts the mounts of one ID. An engine may mount a volume several times with one ID. Docker does so for
// docker cp beside a running container. Podman always sends the same ID, from each of its stores.
type EngineHolder struct {
	Count  int          `json:"count"`
	Engine EngineCaller `json:"engine"`
}

// EngineCaller is the process of an engine that sent a request.
type EngineCaller struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // as in proc.Stat
	// Daemonless is set for Podman: its processes end while its containers run.
	Daemonless bool `json:"daemonless,omitempty"`
}

// Name is the engine's command, and the name of its task driver.
func (c EngineCaller) Name() string {
	if c.Daemonless {
		return "podman"
	}
	return "docker"
}

// CallerOf describes the process that sent a request.
func CallerOf(pid int) EngineCaller {
	s, _ := proc.ReadStat(pid) // it may have ended
	return EngineCaller{PID: pid, Start: s.Start, Daemonless: s.Comm != "dockerd"}
}

// gone reports whether the engine has ended and will therefore not unmount its mounts.
func (c EngineCaller) gone() bool { return !c.Daemonless && c.ended() }

// ended reports whether the process has ended.
func (c EngineCaller) ended() bool {
	s, err := proc.ReadStat(c.PID)
	return err != nil || s.Start != c.Start || s.State == 'Z'
}

// engineMounts are the mounts for container engines, by volume.
type engineMounts struct {
	mu    sync.Mutex
	known map[host.VolumeID]*EngineMount                  // each is replaced as a whole
	busy  map[host.VolumeID]chan struct{}                 // holds a token while the volume is mounted or unmounted
	users func([]string) (map[string][]mount.User, error) // mount.Users
	// isMount reports whether something is mounted at a path.
	isMount func(path string) (bool, error)
	// unused has, for each mount that no container uses, when the agent first found it unused.
	unused map[host.VolumeID]time.Time
	// lost has the reason why this node lost the volume of a mount, by alloc, as the shim reported it.
	lost map[host.AllocID]string
}

// engineJob is the job of engine mounts in lists.
const engineJob = "container-engine"

// EngineMounts lists the mounts for container engines.
func (a *Agent) EngineMounts() []*EngineMount {
	a.engine.mu.Lock()
	defer a.engine.mu.Unlock()
	return slices.SortedFunc(maps.Values(a.engine.known), func(x, y *EngineMount) int {
		return strings.Compare(string(x.Volume), string(y.Volume))
	})
}

// EngineMount returns the mount of a volume for container engines; nil: none.
func (a *Agent) EngineMount(id host.VolumeID) *EngineMount {
	a.engine.mu.Lock()
	defer a.engine.mu.Unlock()
	return a.engine.known[id]
}

// setEngineMount records a mount; nil removes it. It clears the mount's entry in unused. If the mount is removed or
// gets another alloc, it also clears the entry of the old alloc in lost.
func (a *Agent) setEngineMount(id host.VolumeID, m *EngineMount) error {
	e := entry{engineBucket, string(id), m}
	if m == nil {
		e.value = nil             // not a nil pointer
		a.saveEngineCopy(id, nil) // before the write, so that no copy outlives the record
	}
	if err := a.ledger.write(e); err != nil {
		return err
	}
	if m != nil {
		a.saveEngineCopy(id, m)
	}
	a.engine.mu.Lock()
	defer a.engine.mu.Unlock()
	delete(a.engine.unused, id) // an engine has just asked for the volume, or the mount is gone
	if old := a.engine.known[id]; old != nil && (m == nil || m.Alloc != old.Alloc) {
		delete(a.engine.lost, old.Alloc)
	}
	if m == nil {
		delete(a.engine.known, id)
	} else {
		a.engine.known[id] = m
	}
	return nil
}

// lockEngineMount waits until no other request mounts or unmounts the volume.
func (a *Agent) lockEngineMount(ctx context.Context, id host.VolumeID) (unlock func(), err error) {
	a.engine.mu.Lock()
	token := a.engine.busy[id]
	if token == nil {
		token = make(chan struct{}, 1)
		a.engine.busy[id] = token
	}
	a.engine.mu.Unlock()
	select {
	case token <- struct{}{}:
		return func() { <-token }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for another request for volume %q: %w", id, context.Cause(ctx))
	}
}

// withCount returns a copy of the mount with a changed count of one holder.
func (m *EngineMount) withCount(id string, caller EngineCaller, change int) *EngineMount {
	next := *m
	next.Holders = maps.Clone(m.Holders)
	h := next.Holders[id]
	if h.Engine != caller && h.Engine.gone() {
		h.Count = 0 // the count was made by a process that will not unmount
	}
	h.Count, h.Engine = h.Count+change, caller
	next.Holders[id] = h
	if h.Count <= 0 {
		delete(next.Holders, id)
	}
	return &next
}

// EngineRequest asks to mount or unmount a volume.
type EngineRequest struct {
	Volume host.VolumeID
	Plugin host.PluginID // of the volume
	Sealed hooks.Sealed  // the group with the volume as "volume", used by a task "engine"; only to mount
	ID     string        // of the use: Docker's ID of the container's mount, or the same ID always from Podman
	Caller EngineCaller
}

// engineLimit bounds a mount. Docker gives up after two minutes, and then shows no reason. Podman cancels the request
// earlier.
const engineLimit = 110 * time.Second

// MountForEngine mounts a volume for a container and returns the directory on this host. After a failure, the volume
// stays mounted only if other containers use it. After a success the caller must call answered, and say whether the
// engine has received the answer: an engine without the answer will not unmount. Until answered is called, other
// requests for the volume wait.
func (a *Agent) MountForEngine(
	ctx context.Context, s Volumes, r EngineRequest,
) (path string, answered func(received bool), err error) {
	limited, cancel := context.WithTimeout(ctx, engineLimit)
	defer cancel()
	unlock, err := a.lockEngineMount(limited, r.Volume)
	if err != nil {
		return "", nil, err
	}
	if path, err = a.mountForEngine(limited, s, r); err != nil {
		unlock()
		return "", nil, err
	}
	return path, func(received bool) {
		defer unlock()
		if received {
			return
		}
		if err := a.takeBackEngineMount(context.WithoutCancel(ctx), s, r); err != nil {
			a.log.Warn("cannot take back a mount that its engine did not wait for", "volume", r.Volume, "error", err)
		}
	}, nil
}

// mountForEngine is MountForEngine for a caller that holds the volume's lock.
func (a *Agent) mountForEngine(ctx context.Context, s Volumes, r EngineRequest) (path string, err error) {
	m, err := a.usableEngineMount(ctx, s, r)
	if err != nil {
		return "", err
	}
	if m, err = a.dropLostCount(m, r); err != nil {
		return "", err
	}
	m = m.withCount(r.ID, r.Caller, 1)
	if err := a.setEngineMount(r.Volume, m); err != nil || m.Path != "" { // with a path, it is mounted already
		return m.Path, err
	}
	next := *m
	next.Path, err = a.prepareEngineMount(ctx, s, m)
	if err == nil {
		err = a.setEngineMount(r.Volume, &next)
	}
	if err == nil {
		return next.Path, nil
	}
	// The engine does not unmount a volume whose mount failed.
	undo, cancelUndo := context.WithTimeout(context.WithoutCancel(ctx), releaseWait)
	defer cancelUndo()
	m = m.withCount(r.ID, r.Caller, -1)
	undoErr := a.setEngineMount(r.Volume, m)
	if undoErr == nil {
		undoErr = a.releaseEngineMount(undo, s, m)
	}
	if undoErr != nil {
		a.log.Warn("a volume could not be mounted for a container engine, and is released later", "volume", r.Volume,
			"error", undoErr)
	}
	return "", err
}

// dropLostCount drops the count of a Podman process that was killed before it stored its own count. Podman sends a
// mount only if its own count is 0. But another store of Podman, which sends the same ID, may have counted the mount.
// Then a container uses the mount, or the process that mounted it still runs to start the container. In both cases
// dropLostCount keeps the count.
func (a *Agent) dropLostCount(m *EngineMount, r EngineRequest) (*EngineMount, error) {
	h, held := m.Holders[r.ID]
	if !held || !h.Engine.Daemonless || !h.Engine.ended() {
		return m, nil
	}
	_, used, err := a.unusedFor(m)
	if err != nil || used {
		return m, err
	}
	return m.withCount(r.ID, h.Engine, -h.Count), nil
}

// releaseWait bounds how long an engine waits for a release, which continues later. Podman waits for 5 s by default.
const releaseWait = 4 * time.Second

// usableEngineMount returns the current mount of the volume, or a record without a path, which is still to be mounted.
// The record is new, or that of a mount that an earlier agent has begun. usableEngineMount first releases a recorded
// mount that is from an earlier boot, is being released, or does not exist any more. It also releases a mount whose
// volume this node has lost, but refuses the request while containers use that mount. Without a current mount it
// refuses the request if CheckEnginePlugin does.
func (a *Agent) usableEngineMount(ctx context.Context, s Volumes, r EngineRequest) (*EngineMount, error) {
	boot, err := proc.BootID()
	if err != nil {
		return nil, err
	}
	m := a.EngineMount(r.Volume)
	if m != nil && m.Boot == boot && m.Path != "" {
		usable, err := a.canJoin(ctx, s, m)
		if err != nil || usable {
			return m, err
		}
	}
	// Neither a mount nor a release may wait for a plugin that waits for the engine.
	if err := a.CheckEnginePlugin(ctx, s, r.Plugin, r.Caller); err != nil {
		return nil, err
	}
	if m != nil && m.Boot == boot && m.Path == "" && len(m.Holders) > 0 {
		unanswered := *m // the agent died before it answered; the mount keeps its alloc
		unanswered.Holders = map[string]EngineHolder{}
		return &unanswered, nil
	}
	if m != nil {
		if err := a.releaseEngineMount(ctx, s, m); err != nil {
			return nil, fmt.Errorf("release its previous mount: %w", err)
		}
	}
	return &EngineMount{
		Volume: r.Volume, Alloc: host.AllocID(uuid.NewString()), Sealed: r.Sealed, Boot: boot, Since: time.Now().UTC(),
		Holders: map[string]EngineHolder{},
	}, nil
}

// canJoin reports whether another container may use the mount, which has a path. If it returns false, the mount can be
// released. It returns an error if this node has lost the volume and containers still use it. Another container must
// not join these, and they would also write beside a new mount.
func (a *Agent) canJoin(ctx context.Context, s Volumes, m *EngineMount) (bool, error) {
	mounted, err := a.engine.isMount(m.Path)
	if err != nil || !mounted {
		return false, err
	}
	allocs, _, err := s.Allocs(ctx, host.AllocQuery{ID: m.Alloc})
	if err != nil {
		return false, err
	}
	lost := ""
	if len(allocs) > 0 {
		lost = a.engine.lostReason(allocs[0])
	}
	if lost == "" && len(m.Holders) > 0 {
		return true, nil
	}
	_, used, err := a.unusedFor(m)
	switch {
	case err != nil || !used:
		return false, err
	case lost != "":
		return false, registry.Errorf(registry.ErrConflict,
			"this node has lost volume %q (%s), and containers still use it; stop them, then start this one again: %s",
			m.Volume, lost, a.describeLost(m, lost).Stop)
	}
	return true, nil
}

// CheckEnginePlugin returns an error if no job runs the plugin, or if the engine may have to start it. A starting
// dockerd answers no request before it has mounted the volumes of its containers, so it would wait for itself.
func (a *Agent) CheckEnginePlugin(ctx context.Context, s Lister, plugin host.PluginID, by EngineCaller) error {
	list, _, err := s.Plugins(ctx, host.PluginQuery{Plugin: plugin})
	switch engine := by.Name(); {
	case err != nil || slices.ContainsFunc(list.Tasks, func(t host.PluginTask) bool { return t.Healthy }):
		return err
	case a.runsPlugin(engine, plugin):
		return registry.Errorf(registry.ErrUnavailable, "plugin %q runs in a container of %s and is not healthy, and "+
			"%s may start no container while it waits for a volume; try again when holdfast plugin status shows the "+
			"plugin healthy", plugin, engine, engine)
	case len(list.Tasks)+len(list.Instances) == 0 && a.DescribeDrain() != "":
		return registry.Errorf(registry.ErrUnavailable, "plugin %q is not running: %s", plugin, a.DescribeDrain())
	case len(list.Tasks)+len(list.Instances) == 0 && !a.runsPlugin("", plugin):
		return registry.Errorf(registry.ErrUnavailable, "plugin %q is not running; start its job with holdfast job "+
			"run, or see holdfast plugin status for running plugins", plugin)
	}
	return nil
}

// CheckEngineController is CheckEnginePlugin for the creation or deletion of a volume, which another node of the
// cluster can also do. node is the node of a volume that stays on its node; empty: this node.
func (a *Agent) CheckEngineController(
	ctx context.Context, s Volumes, plugin host.PluginID, node host.NodeName, by EngineCaller,
) error {
	refused := a.CheckEnginePlugin(ctx, s, plugin, by)
	if !errors.Is(refused, registry.ErrUnavailable) {
		return refused
	}
	nodes, _, err := s.Nodes(ctx, host.NodeQuery{})
	if err != nil {
		return err
	}
	var elsewhere []string
	for _, n := range nodes {
		for _, p := range n.Plugins {
			switch {
			case p.Plugin != plugin || !n.Alive || string(n.Name) == a.node.Name ||
				p.Health(registry.RoleController) == "":
			case !p.Local || n.Name == node:
				return nil
			default:
				elsewhere = append(elsewhere, string(n.Name))
			}
		}
	}
	if len(elsewhere) > 0 {
		return registry.Errorf(registry.ErrUnavailable, "%w; it runs on node %s, but its volumes stay on their node",
			refused, strings.Join(elsewhere, ", "))
	}
	return refused
}

// runsPlugin reports whether a job runs the plugin. If driver is not empty, only tasks of that driver count.
func (a *Agent) runsPlugin(driver string, plugin host.PluginID) bool {
	return slices.ContainsFunc(a.Allocs(), func(r *AllocRecord) bool {
		return !r.State.Ended() && slices.ContainsFunc(r.Group.Tasks, func(t hooks.Task) bool {
			return t.Plugin == plugin && (driver == "" || t.Driver == driver)
		})
	})
}

func (m *EngineMount) allocGroup() host.AllocGroup {
	return host.AllocGroup{
		Alloc: m.Alloc, Job: engineJob, Group: string(m.Volume), Namespace: registry.DefaultNamespace, Sealed: m.Sealed,
		Isolated: map[string]bool{engineTask: true},
	}
}

// engineTask is the task of the group of an engine mount.
const engineTask = "engine"

func (a *Agent) prepareEngineMount(ctx context.Context, s Volumes, m *EngineMount) (path string, err error) {
	plans, err := s.PrepareAlloc(ctx, m.allocGroup())
	if err != nil {
		return "", a.explainEngineWait(ctx, s, m, err)
	}
	binds := plans[engineTask].Binds
	if len(binds) != 1 {
		return "", fmt.Errorf("volume %q: the shim returned %d mounts instead of one", m.Volume, len(binds))
	}
	return binds[0].Source, nil
}

// explainEngineWait returns what the mount waited for, if ctx has ended, else err.
func (a *Agent) explainEngineWait(ctx context.Context, s Volumes, m *EngineMount, err error) error {
	if ctx.Err() == nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pollTimeout)
	defer cancel()
	list, _, listErr := s.Allocs(ctx, host.AllocQuery{ID: m.Alloc})
	if listErr != nil || len(list) == 0 || len(list[0].Waiting) == 0 {
		return err
	}
	return registry.Errorf(registry.ErrUnavailable, "volume %q is not mounted yet: %s; start the container again, or "+
		"see %s", m.Volume, a.DescribeWaits(ctx, s, list[0].Waiting),
		display.Command("holdfast volume status", string(m.Volume)))
}

// UnmountForEngine takes back one mount of an ID, as takeBackEngineMount does. For Podman it only locks the mount, and
// the caller must call answered, and say whether the engine has received the answer: answered then takes the mount
// back. Until Podman has the answer, it counts the volume as mounted and sends no Mount. If the volume were released
// earlier, the next container would get a directory without the volume. For Docker answered is nil.
func (a *Agent) UnmountForEngine(
	ctx context.Context, s Volumes, r EngineRequest,
) (answered func(received bool), err error) {
	limited, cancel := context.WithTimeout(ctx, releaseWait)
	defer cancel()
	unlock, err := a.lockEngineMount(limited, r.Volume)
	if err != nil {
		return nil, err
	}
	if !r.Caller.Daemonless {
		defer unlock()
		return nil, a.takeBackEngineMount(limited, s, r)
	}
	return func(received bool) {
		defer unlock()
		if !received {
			return
		}
		if err := a.takeBackEngineMount(context.WithoutCancel(ctx), s, r); err != nil {
			a.log.Warn("cannot take back a mount that Podman has given up", "volume", r.Volume, "error", err)
		}
	}, nil
}

// takeBackEngineMount takes back one mount of an ID, and releases the volume after the last one. The caller holds the
// lock. An ID without a mount is no error, because an engine may also unmount after a failed mount. A release that
// fails, or takes longer than releaseWait, is continued later, because the engine would not repeat the request.
func (a *Agent) takeBackEngineMount(ctx context.Context, s Volumes, r EngineRequest) error {
	m := a.EngineMount(r.Volume)
	if m == nil {
		return nil
	}
	if _, held := m.Holders[r.ID]; held {
		m = m.withCount(r.ID, r.Caller, -1)
		if err := a.setEngineMount(r.Volume, m); err != nil {
			return err
		}
	}
	if len(m.Holders) > 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, releaseWait)
	defer cancel()
	_, used, err := a.unusedFor(m)
	if err == nil && !used {
		err = a.releaseEngineMount(ctx, s, m)
	}
	if err != nil || used {
		a.log.Warn("a volume that no container engine holds any more is released later", "volume", r.Volume,
			"in_use", used, "error", err)
	}
	return nil
}

func (a *Agent) releaseEngineMount(ctx context.Context, s Volumes, m *EngineMount) error {
	if err := s.ReleaseAlloc(ctx, m.Alloc); err != nil {
		return err
	}
	return a.setEngineMount(m.Volume, nil)
}
