package agent

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/registry"
)

// setHolder makes the shim report that the alloc holds the volume, with the state of its mount.
func (e *env) setHolder(id host.AllocID, mark registry.Mark) {
	v := host.VolumeStatus{}
	v.ID, v.Staging.State = "data", mark
	v.Holders = []registry.Holder{{Claim: registry.Claim{Alloc: id}, Publish: mark}}
	e.setShim(func(s *fakeShim) { s.volumes = []host.VolumeStatus{v} })
}

// A change that stops a plugin whose mounts are in use is refused, unless another instance replaces the stopped one.
func TestChangedPluginInUseIsRefused(t *testing.T) {
	plugins := func(name string, count int, command string) hooks.Group {
		p := plugin("disk")
		p.Config, _ = json.Marshal(map[string]string{"command": command})
		g := tasks(name, p)
		g.Count = count
		return g
	}
	users := func(env string) hooks.Group {
		u := task("main", "")
		u.Env = map[string]string{"VALUE": env}
		return withVolumes(tasks("users", u))
	}
	before := []hooks.Group{plugins("plugins", 2, "/bin/true"), users("old")}
	changed, done := plugins("plugins", 2, "/bin/false"), registry.MarkDone
	for name, c := range map[string]struct {
		after   []hooks.Group
		user    string // the job that uses the volume
		mark    registry.Mark
		refused bool
	}{
		"changed":             {[]hooks.Group{changed, users("old")}, "user", done, false},
		"an uncertain mount":  {[]hooks.Group{users("old")}, "user", registry.MarkSent, true},
		"fewer":               {[]hooks.Group{plugins("plugins", 1, "/bin/true"), users("old")}, "user", done, true},
		"group renamed":       {[]hooks.Group{plugins("others", 2, "/bin/true"), users("old")}, "user", done, true},
		"another plugin":      {[]hooks.Group{tasks("plugins", plugin("other")), users("old")}, "user", done, true},
		"group removed":       {[]hooks.Group{users("old")}, "user", done, true},
		"own user stays":      {[]hooks.Group{changed, users("old")}, "disk", done, false},
		"own user goes first": {[]hooks.Group{changed, users("new")}, "disk", done, false},
		"unchanged":           {before, "user", done, false},
		"more":                {[]hooks.Group{plugins("plugins", 3, "/bin/true"), users("old")}, "user", done, false},
		"only users changed":  {[]hooks.Group{plugins("plugins", 2, "/bin/true"), users("new")}, "user", done, false},
		"held, not mounted":   {[]hooks.Group{changed, users("old")}, "user", "", false},
	} {
		t.Run(name, func(t *testing.T) {
			withAgent(t, func(e *env) {
				e.submit(job("disk", "service", before...))
				e.submit(userJob("user", ""))
				e.awaitCount("start ", 4)
				user := e.awaitAlloc(c.user, "with volumes", (*AllocRecord).UsesVolumes)
				e.setHolder(user.ID, c.mark)
				err := e.trySubmit(job("disk", "service", c.after...), SubmitOptions{})
				if !c.refused {
					e.must(err)
					return
				}
				e.hasError(err, registry.ErrConflict, "of job "+c.user+" holds volume")
				synctest.Wait()
				e.hasCount("stop ", 0)
				if v := e.agent.job("disk").Version; v != 1 {
					e.Errorf("the refused change is version %d", v)
				}
				e.must(e.trySubmit(job("disk", "service", c.after...), SubmitOptions{Force: true}))
				e.await("a plugin is stopped", func([]*AllocRecord) bool { return e.count("stop disk/plugin") > 0 })
			})
		})
	}
}

func TestUpdateKeepsUnchangedGroups(t *testing.T) {
	withAgent(t, func(e *env) {
		allocs := func() map[string]host.AllocID {
			out := map[string]host.AllocID{}
			for _, r := range unended(e.agent.Allocs(), lastRank) {
				out[fmt.Sprintf("%s[%d]", r.Group.Name, r.Index)] = r.ID
			}
			return out
		}
		awaitAllocs := func(n int) {
			e.await("allocs", func(all []*AllocRecord) bool { return len(unended(all, lastRank)) == n })
		}
		same, changed := tasks("same", task("same", "")), withVolumes(tasks("changed", task("main", "")))
		same.Count = 2
		e.submit(job("work", "service", same, changed))
		e.awaitCount("start", 3)
		before := allocs()
		same.Count = 3
		changed.Tasks = append(changed.Tasks[:0:0], task("main", `{"user":"nobody"}`))
		e.submit(job("work", "service", same, changed))
		e.awaitCount("start", 5)
		awaitAllocs(4)
		after := allocs()
		if before["same[0]"] != after["same[0]"] || before["same[1]"] != after["same[1]"] ||
			before["changed[0]"] == after["changed[0]"] || after["same[2]"] == "" {
			e.Errorf("before %v, after %v", before, after)
		}
		e.has("prepared work", "start work/main", "stop work/main", "released work", "prepared work", "start work/main")
		e.hasCount("stop", 1)
		e.submit(job("work", "service", same)) // without the other group
		awaitAllocs(3)
	})
}

func TestAPluginInUseIsNotStopped(t *testing.T) {
	withAgent(t, func(e *env) {
		_, user := e.runPluginAndUser()
		e.setHolder(user.ID, "")
		e.hasError(e.agent.StopJob(e.Context(), "disk", e.shim, StopOptions{}), registry.ErrConflict, "job user")
		e.engineMount("a", dockerd)
		e.setHolder(e.agent.EngineMount("notes").Alloc, "")
		e.hasError(e.agent.StopJob(e.Context(), "disk", e.shim, StopOptions{}), registry.ErrConflict,
			"a container of docker (docker ps --filter volume=notes) holds volume")
		e.setShim(func(s *fakeShim) {
			s.volumes[0].Holders[0].Claim.Node = "another" // that node has its own instance of the plugin
		})
		e.stopJob("disk", StopOptions{Purge: true})
		e.await("only the user is left", func(all []*AllocRecord) bool { return len(all) == 1 && all[0].Job == "user" })
	})
}

func TestShutdownNamesWhatIsLeft(t *testing.T) {
	withAgent(t, func(e *env) {
		e.shim.release = func(host.AllocID) error {
			return registry.Errorf(registry.ErrUnavailable, "the plugin is gone")
		}
		e.runPluginAndUser()
		e.hasError(e.agent.StopAll(e.timeout()), nil, "the plugin is gone")
		e.hasCount("stop disk/plugin", 0)
		e.hasError(e.agent.KillAll(e.timeout()), nil, "job user is releasing")
		e.has("stop user/main", "stop disk/plugin")
	})
}

func TestForceGivesTasksNoGrace(t *testing.T) {
	withAgent(t, func(e *env) {
		e.driver.ignoreTerm = true
		e.submit(serviceJob("slow", `{"kill_timeout":"1h"}`))
		e.awaitRunning("slow")
		e.hasError(e.agent.StopAll(e.timeout()), nil, "job slow is stopping")
		e.must(e.agent.KillAll(e.timeout()))
		e.has("stop slow/main")
	})
}

func TestAllocsAreFoundByPrefix(t *testing.T) {
	a := &Agent{allocs: map[host.AllocID]*alloc{}}
	for _, id := range []host.AllocID{"aaaaaaaa-1", "aaaaaaaa-2", "bbbbbbbb-1", "c"} {
		a.publish([]*AllocRecord{{ID: id}}, nil)
	}
	for prefix, want := range map[string]string{
		"aaaaaaaa-1": "", "c": "", "bbbbbbbb": "", "aaaaaaaa": "\n  aaaaaaaa-2  ", "bbbbbbb": "not found",
		"dddddddd": "not found", "": "not found",
	} {
		_, err := a.Find(prefix)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", prefix, err, want)
		}
	}
}
