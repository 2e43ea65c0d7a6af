package agent

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"

	"holdfast/hooks"
	"holdfast/host"
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
	Holders map[string]EngineHolder `json:"holders"` // by the engine's ID of the container, or of the command
}

// EngineHolder counts the mounts of one ID. An engine may mount several times with one ID, for a container and for a
// copy beside it.
type EngineHolder struct {
	Count  int          `json:"count"`
	Engine EngineCaller `json:"engine"`
}

// EngineCaller is the process of an engine that sent a request.
type EngineCaller struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // as in proc.Stat
	// Lasting is set for an engine without a daemon: its processes end while its containers run.
	Lasting bool `json:"lasting,omitempty"`
}

// CallerOf describes the process that sent a request.
func CallerOf(pid int) EngineCaller {
	s, _ := proc.ReadStat(pid) // it may have ended
	return EngineCaller{PID: pid, Start: s.Start, Lasting: s.Comm != "dockerd"}
}

// gone reports whether the engine's process has ended, so that it will not unmount what it has mounted.
func (c EngineCaller) gone() bool {
	if c.Lasting {
		return false
	}
	s, err := proc.ReadStat(c.PID)
	return err != nil || s.Start != c.Start || s.State == 'Z'
}

// engineMounts are the mounts for container engines, by volume.
type engineMounts struct {
	mu    sync.Mutex
	known map[host.VolumeID]*EngineMount  // replaced as a whole
	busy  map[host.VolumeID]chan struct{} // holds a token while the volume is mounted or unmounted
	users func([]string) (map[string][]mount.User, error)
	// unused has the first review since which no container used the mount.
	unused map[host.VolumeID]time.Duration
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

func (a *Agent) engineMount(id host.VolumeID) *EngineMount {
	a.engine.mu.Lock()
	defer a.engine.mu.Unlock()
	return a.engine.known[id]
}

// setEngineMount records a mount; nil removes it.
func (a *Agent) setEngineMount(id host.VolumeID, m *EngineMount) error {
	e := entry{engineBucket, string(id), nil}
	if m != nil {
		e.value = m
	}
	if err := a.ledger.write(e); err != nil {
		return err
	}
	a.engine.mu.Lock()
	defer a.engine.mu.Unlock()
	delete(a.engine.unused, id) // an engine just asked for it, or it is gone
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

// with returns a copy of the mount with a changed count of one holder.
func (m *EngineMount) with(id string, caller EngineCaller, change int) *EngineMount {
	next := *m
	next.Holders = maps.Clone(m.Holders)
	h := next.Holders[id]
	if h.Engine != caller && h.Engine.gone() {
		h.Count = 0 // counted by a process that will not unmount
	}
	h.Count, h.Engine = h.Count+change, caller
	next.Holders[id] = h
	if h.Count <= 0 {
		delete(next.Holders, id)
	}
	return &next
}

// MountForEngine mounts a volume for the container that the engine calls id, and returns the directory on this host.
// Sealed is the group with the volume as "volume", used by a task "engine". A failure leaves nothing mounted that no
// other container uses.
func (a *Agent) MountForEngine(
	ctx context.Context, s Volumes, volume host.VolumeID, sealed hooks.Sealed, id string, caller EngineCaller,
) (path string, err error) {
	unlock, err := a.lockEngineMount(ctx, volume)
	if err != nil {
		return "", err
	}
	defer unlock()
	boot, err := proc.BootID()
	if err != nil {
		return "", err
	}
	before := a.engineMount(volume)
	if before != nil && (before.Boot != boot || len(before.Holders) == 0) {
		if err := a.releaseEngineMount(ctx, s, before); err != nil {
			return "", fmt.Errorf("release the volume from its last use: %w", err)
		}
		before = nil
	}
	if before == nil {
		before = &EngineMount{
			Volume: volume, Alloc: host.AllocID(newID()), Sealed: sealed, Boot: boot, Since: time.Now().UTC(),
			Holders: map[string]EngineHolder{},
		}
	}
	if before.Path == "" {
		before.Holders = map[string]EngineHolder{} // the agent was killed before it answered; the engine asks again
	}
	next := before.with(id, caller, 1)
	if err := a.setEngineMount(volume, next); err != nil {
		return "", err
	}
	if next.Path == "" {
		next.Path, err = a.prepareEngineMount(ctx, s, next)
		if err == nil {
			err = a.setEngineMount(volume, next)
		}
	}
	if err == nil {
		return next.Path, nil
	}
	// The engine does not unmount what it could not mount.
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	next = next.with(id, caller, -1)
	next.Path = ""
	failed := a.setEngineMount(volume, next)
	if failed == nil && len(next.Holders) == 0 {
		failed = a.releaseEngineMount(undo, s, next)
	}
	if failed != nil {
		a.log.Warn("a volume could not be mounted for a container engine, and is released later", "volume", volume,
			"error", failed)
	}
	return "", err
}

// undoTimeout bounds how long an engine waits for the release after a failed mount. The release continues later.
const undoTimeout = 10 * time.Second

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
		return "", err
	}
	binds := plans[engineTask].Binds
	if len(binds) != 1 {
		return "", fmt.Errorf("volume %q: the shim returned %d mounts instead of one", m.Volume, len(binds))
	}
	return binds[0].Source, nil
}

// UnmountForEngine takes back one mount of id. It unmounts the volume with the last. An id that has nothing mounted is
// no error: an engine also unmounts after a mount that failed.
func (a *Agent) UnmountForEngine(
	ctx context.Context, s Volumes, volume host.VolumeID, id string, caller EngineCaller,
) error {
	unlock, err := a.lockEngineMount(ctx, volume)
	if err != nil {
		return err
	}
	defer unlock()
	m := a.engineMount(volume)
	if m == nil {
		return nil
	}
	if _, held := m.Holders[id]; held {
		m = m.with(id, caller, -1)
		if err := a.setEngineMount(volume, m); err != nil {
			return err
		}
	}
	if len(m.Holders) > 0 {
		return nil
	}
	return a.releaseEngineMount(ctx, s, m)
}

func (a *Agent) releaseEngineMount(ctx context.Context, s Volumes, m *EngineMount) error {
	if err := s.ReleaseAlloc(ctx, m.Alloc); err != nil {
		return err
	}
	return a.setEngineMount(m.Volume, nil)
}

// followEngineMounts releases mounts that no container uses any more: those of an earlier boot, those whose release
// was interrupted, and those of an engine process that has ended without unmounting them.
func (a *Agent) followEngineMounts(ctx context.Context, s Volumes) {
	for {
		for _, m := range a.EngineMounts() {
			if err := a.reviewEngineMount(ctx, s, m.Volume); err != nil && ctx.Err() == nil {
				a.log.Warn("cannot release a volume that no container uses", "volume", m.Volume, "error", err)
			}
		}
		if sleep(ctx, engineReview, nil); ctx.Err() != nil {
			return
		}
	}
}

// engineReview is the time between two looks at all engine mounts.
const engineReview = 15 * time.Second

func (a *Agent) reviewEngineMount(ctx context.Context, s Volumes, volume host.VolumeID) error {
	unlock, err := a.lockEngineMount(ctx, volume)
	if err != nil {
		return err
	}
	defer unlock()
	m := a.engineMount(volume)
	if m == nil {
		return nil
	}
	boot, err := proc.BootID()
	if err != nil {
		return err
	}
	next := *m
	next.Holders = maps.Clone(m.Holders)
	if m.Boot != boot {
		clear(next.Holders)
	}
	unused, err := a.unusedFor(m)
	if err != nil {
		return err
	}
	maps.DeleteFunc(next.Holders, func(_ string, h EngineHolder) bool {
		return unused > 0 && h.Engine.gone() || unused > unusedLimit && !h.Engine.Lasting
	})
	if len(next.Holders) == len(m.Holders) && len(m.Holders) > 0 {
		return nil
	}
	if err := a.setEngineMount(volume, &next); err != nil || len(next.Holders) > 0 {
		return err
	}
	a.log.Info("releasing a volume that no container uses any more", "volume", volume)
	ctx, cancel := context.WithTimeout(ctx, releaseTimeout)
	defer cancel()
	return a.releaseEngineMount(ctx, s, &next)
}

// unusedLimit is how long a mount that an engine holds may be unused. The engine may hold it although no container
// exists: it repeats a request whose answer was lost, and that counts twice.
const unusedLimit = 2 * time.Minute

// unusedFor returns for how long no container has used the mount, and 0 if one does. Containers may outlive their
// engine.
func (a *Agent) unusedFor(m *EngineMount) (time.Duration, error) {
	users := map[string][]mount.User{}
	if m.Path != "" {
		var err error
		if users, err = a.engine.users([]string{m.Path}); err != nil {
			return 0, err
		}
	}
	now := proc.BootTime()
	a.engine.mu.Lock()
	defer a.engine.mu.Unlock()
	since, known := a.engine.unused[m.Volume]
	switch {
	case len(users[m.Path]) > 0:
		delete(a.engine.unused, m.Volume)
		return 0, nil
	case !known:
		a.engine.unused[m.Volume], since = now, now
	}
	return now - since + 1, nil
}

// releaseTimeout bounds one attempt to release a mount, during which its engine waits.
const releaseTimeout = 2 * time.Minute

// loadEngineMounts reads the records of engine mounts.
func (l *ledger) loadEngineMounts() (known map[host.VolumeID]*EngineMount, err error) {
	known = map[host.VolumeID]*EngineMount{}
	err = recoverDamage(func() error {
		return l.db.View(func(tx *bolt.Tx) error {
			return tx.Bucket(engineBucket).ForEach(func(k, v []byte) error {
				m := &EngineMount{}
				known[host.VolumeID(k)] = m
				return decode(k, v, m)
			})
		})
	})
	return known, err
}

// EngineUses reports whether a container engine has the volume mounted.
func (a *Agent) EngineUses(id host.VolumeID) bool {
	m := a.engineMount(id)
	return m != nil && len(m.Holders) > 0
}

// EnginePath returns the directory where the volume is mounted for container engines. It is empty if it is not.
func (a *Agent) EnginePath(id host.VolumeID) string {
	if m := a.engineMount(id); m != nil {
		return m.Path
	}
	return ""
}
