package agent

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"testing/synctest"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/registry"
)

// use has the shim say that the alloc holds the volume, which the plugin has staged and published or has not.
func (w *world) use(id host.AllocID, mark registry.Mark) {
	v := host.VolumeStatus{}
	v.ID, v.Placement.Stage = "data", mark
	v.Holders = []registry.Holder{{Claim: registry.Claim{Alloc: id}, Publish: mark}}
	w.shim.mu.Lock()
	defer w.shim.mu.Unlock()
	w.shim.volumes = []host.VolumeStatus{v}
}

// A change that stops a plugin beneath a mount in use is refused, whichever way the job is changed, as job stop is.
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
	for name, c := range map[string]struct {
		after   []hooks.Group
		other   bool // another job uses the volume, not this one
		mark    registry.Mark
		refused bool
	}{
		"changed":                  {[]hooks.Group{plugins("plugins", 2, "/bin/false"), users("old")}, true, registry.MarkDone, true},
		"an uncertain mount":       {[]hooks.Group{plugins("plugins", 2, "/bin/false"), users("old")}, true, registry.MarkSent, true},
		"fewer":                    {[]hooks.Group{plugins("plugins", 1, "/bin/true"), users("old")}, true, registry.MarkDone, true},
		"group renamed":            {[]hooks.Group{plugins("others", 2, "/bin/true"), users("old")}, true, registry.MarkDone, true},
		"group removed":            {[]hooks.Group{users("old")}, true, registry.MarkDone, true},
		"its own user stays":       {[]hooks.Group{plugins("plugins", 2, "/bin/false"), users("old")}, false, registry.MarkDone, true},
		"its own user goes first":  {[]hooks.Group{plugins("plugins", 2, "/bin/false"), users("new")}, false, registry.MarkDone, false},
		"unchanged":                {before, true, registry.MarkDone, false},
		"more":                     {[]hooks.Group{plugins("plugins", 3, "/bin/true"), users("old")}, true, registry.MarkDone, false},
		"only the user is changed": {[]hooks.Group{plugins("plugins", 2, "/bin/true"), users("new")}, true, registry.MarkDone, false},
		"held, but not mounted":    {[]hooks.Group{plugins("plugins", 2, "/bin/false"), users("old")}, true, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.submit(job("disk", "service", before...))
				w.submit(job("user", "service", withVolumes(tasks("g", task("main", "")))))
				w.await("all run", func([]*AllocRecord) bool { return w.count("start ") == 4 })
				who := w.awaitRunning("user")
				if !c.other {
					for _, r := range w.agent.Allocs() {
						if r.Group.Name == "users" {
							who = r
						}
					}
				}
				w.use(who.ID, c.mark)
				_, err := w.agent.Submit(w.Context(), job("disk", "service", c.after...), Source{}, w.shim, SubmitOptions{})
				if !c.refused {
					if err != nil {
						w.Errorf("refused: %v", err)
					}
					return
				}
				if !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(), "of job "+who.Job+" holds volume") {
					w.Errorf("it is taken, or refused for another reason: %v", err)
				}
				synctest.Wait()
				if w.count("stop ") != 0 || w.agent.job("disk").Version != 1 {
					w.Errorf("a refused change does something: %v", w.all())
				}
				_, err = w.agent.Submit(w.Context(), job("disk", "service", c.after...), Source{}, w.shim, SubmitOptions{Force: true})
				if err != nil {
					w.Errorf("forced: %v", err)
				}
				w.await("a plugin is stopped", func([]*AllocRecord) bool { return w.count("stop disk/plugin") > 0 })
			})
		})
	}
}

func TestSubmitReturnsWithItsAllocsPlaced(t *testing.T) {
	inWorld(t, func(w *world) {
		w.submit(batch("many", 3, `{}`))
		if n := len(w.agent.Allocs()); n != 3 {
			t.Errorf("%d allocs are known when Submit returns, want 3", n)
		}
	})
}
