package agent

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/internal/mount"
	"holdfast/internal/proc"
)

// engineReview is the time between two reviews of all engine mounts.
const engineReview = 15 * time.Second

// unusedLimit is how long a mount that Docker holds may be unused. Docker may hold a mount although no container
// exists: after a lost answer it repeats its request, and that counts twice. Before a container starts, Docker mounts
// its other volumes too; unusedLimit is longer than that takes.
const unusedLimit = 5 * time.Minute

// followEngineMounts releases mounts that no container uses any more. These are mounts of an earlier boot, those whose
// release was interrupted, those of an engine process that has ended without unmounting them, those whose volume this
// node has lost, and those of Docker that have been unused for unusedLimit.
func (a *Agent) followEngineMounts(ctx context.Context, s Volumes) {
	for {
		for _, m := range a.unusedEngineMounts() {
			a.engine.mu.Lock()
			lost := a.engine.lost[m.Alloc] != ""
			a.engine.mu.Unlock()
			err := a.reviewEngineMount(ctx, s, m.Volume, releaseWait, func(h EngineHolder, unused time.Duration) bool {
				return lost || h.Engine.gone() || unused >= unusedLimit && !h.Engine.Daemonless
			})
			if err != nil && ctx.Err() == nil {
				a.log.Warn("cannot release a volume that no container uses", "volume", m.Volume, "error", err)
			}
		}
		if sleep(ctx, engineReview, nil); ctx.Err() != nil {
			return
		}
	}
}

// unusedEngineMounts lists the mounts for a review of each. It leaves out those that containers use. For that, it reads
// the processes of the machine once for all volumes, and not at all for a single one, because its review does so.
func (a *Agent) unusedEngineMounts() []*EngineMount {
	all := a.EngineMounts()
	var paths []string
	for _, m := range all {
		if m.Path != "" {
			paths = append(paths, m.Path)
		}
	}
	if len(paths) < 2 {
		return all
	}
	users, err := a.engine.users(paths)
	if err != nil {
		return all // the review of each mount reports the error
	}
	a.engine.mu.Lock()
	defer a.engine.mu.Unlock()
	return slices.DeleteFunc(all, func(m *EngineMount) bool {
		used := m.Path != "" && len(a.onlyContainers(users[m.Path])) > 0
		if used {
			delete(a.engine.unused, m.Volume)
		}
		return used
	})
}

// ForgetForEngine prepares the removal of a volume: if no container uses the mount, it drops the holders of the asking
// engine (for Podman: of all its processes) and of engines that have ended. It releases the mount if no holder is left.
// The asking engine has no container with the volume: otherwise it would refuse the removal itself.
func (a *Agent) ForgetForEngine(ctx context.Context, s Volumes, r EngineRequest) error {
	return a.reviewEngineMount(ctx, s, r.Volume, releaseTimeout, func(h EngineHolder, _ time.Duration) bool {
		return h.Engine == r.Caller || h.Engine.Daemonless && r.Caller.Daemonless || h.Engine.gone()
	})
}

// reviewEngineMount drops the holders for which stale returns true, unless a container uses the mount. It drops all
// holders of a mount that is from an earlier boot or was not completed. If no holder is left and no container uses the
// mount, it releases the mount, and waits at most wait for that. Other requests for the volume wait.
func (a *Agent) reviewEngineMount(
	ctx context.Context, s Volumes, volume host.VolumeID, wait time.Duration,
	stale func(h EngineHolder, unused time.Duration) bool,
) error {
	unlock, err := a.lockEngineMount(ctx, volume)
	if err != nil {
		return err
	}
	defer unlock()
	m := a.EngineMount(volume)
	if m == nil {
		return nil
	}
	boot, err := proc.BootID()
	if err != nil {
		return err
	}
	unused, used, err := a.unusedFor(m)
	if err != nil {
		return err
	}
	next := *m
	next.Holders = maps.Clone(m.Holders)
	maps.DeleteFunc(next.Holders, func(_ string, h EngineHolder) bool {
		// A living agent holds the lock until the path is set. Without a path, an earlier agent died first.
		return m.Boot != boot || m.Path == "" || !used && stale(h, unused)
	})
	if len(next.Holders) != len(m.Holders) {
		if err := a.setEngineMount(volume, &next); err != nil {
			return err
		}
	}
	if len(next.Holders) > 0 || used {
		return nil
	}
	a.log.Info("releasing a volume that no container uses any more", "volume", volume)
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	return a.releaseEngineMount(ctx, s, &next)
}

// releaseTimeout is how long the removal of a volume waits for its release.
const releaseTimeout = 30 * time.Second

// unusedFor reports whether a container uses the mount. If not, it returns the time since the first call that found no
// user. It does not matter whether the engine runs, because containers may outlive it.
func (a *Agent) unusedFor(m *EngineMount) (unused time.Duration, used bool, err error) {
	users, err := a.engineUsers(m)
	if err != nil {
		return 0, false, err
	}
	a.engine.mu.Lock()
	defer a.engine.mu.Unlock()
	if len(users) > 0 {
		delete(a.engine.unused, m.Volume)
		return 0, true, nil
	}
	since, found := a.engine.unused[m.Volume]
	if !found {
		since = time.Now()
		a.engine.unused[m.Volume] = since
	}
	return time.Since(since), false, nil
}

// engineUsers returns the users of the mount that may be containers.
func (a *Agent) engineUsers(m *EngineMount) ([]mount.User, error) {
	if m.Path == "" {
		return nil, nil
	}
	users, err := a.engine.users([]string{m.Path})
	return a.onlyContainers(users[m.Path]), err
}

// onlyContainers returns the users that may be containers. It leaves out users that see the volume at the same path as
// this process: these are processes in a private copy of this mount namespace.
func (a *Agent) onlyContainers(users []mount.User) []mount.User {
	root := hooks.Layout{State: a.config.StateDir}.MountRoot() + "/"
	return slices.DeleteFunc(users, func(u mount.User) bool { return strings.HasPrefix(u.There, root) })
}

// Describe names the engines that hold the mount, with the command that lists their containers.
func (m *EngineMount) Describe() string {
	mounts := m.countByEngine()
	if len(mounts) == 0 {
		return "no container engine holds it any more; it is released when nothing uses it"
	}
	var list []string
	for _, name := range slices.Sorted(maps.Keys(mounts)) {
		noun := "mounts"
		if mounts[name] == 1 {
			noun = "mount"
		}
		list = append(list, fmt.Sprintf("%s holds %d %s (see %s)", name, mounts[name], noun,
			listContainers(name, m.Volume)))
	}
	return strings.Join(list, ", and ")
}

// containers names the engines whose containers use the volume, with the commands that list these.
func (m *EngineMount) containers() string {
	var list []string
	for _, engine := range slices.Sorted(maps.Keys(m.countByEngine())) {
		list = append(list, fmt.Sprintf("a container of %s (%s)", engine, listContainers(engine, m.Volume)))
	}
	return cmp.Or(strings.Join(list, " and "), "a container that has ended")
}

// containerID finds the container's ID in the name of a cgroup of Docker or Podman. The ID of its pod may come before
// it.
var containerID = regexp.MustCompile(`(?s)^.*\b([0-9a-f]{64})\b`)

// EngineContainers returns the IDs of the containers that use the volume, according to their cgroups. An engine does
// not say for which container it mounts a volume.
func (a *Agent) EngineContainers(volume host.VolumeID) (ids []string, err error) {
	m := a.EngineMount(volume)
	if m == nil {
		return nil, nil
	}
	users, err := a.engineUsers(m)
	for _, u := range users {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", u.PID)) // it may have ended; PID 0: not a process
		if found := containerID.FindSubmatch(text); found != nil {
			ids = append(ids, string(found[1]))
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids), err
}
