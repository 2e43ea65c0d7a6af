package e2e

import (
	"testing"

	"holdfast/internal/csifake"
)

// registering holds a plugin's task in the middle of its registration: it has been asked what it is and has not answered.
func (w *world) registering() (*pluginTask, *csifake.Gate) {
	w.t.Helper()
	var gate *csifake.Gate
	w.started = func(p *csifake.Plugin) { gate = p.On("GetPluginInfo").Times(1).Hold() }
	p := w.startPlugin("alloc-p", csifake.Monolith, 1)
	w.started = nil
	<-gate.Arrived()
	return p, gate
}

// The shim is killed while it learns what a plugin is. The next one goes on with it.
func TestShimKilledWhileAPluginRegisters(t *testing.T) {
	w := newWorld(t, everything...)
	p, gate := w.registering()
	w.killShim()
	gate.Open()
	w.registered("alloc-p")
	w.must(w.story())
	w.exit(p)
}

// The plugin is killed while it is asked what it is. Started again, it is registered once.
func TestPluginKilledWhileItRegisters(t *testing.T) {
	w := newWorld(t, everything...)
	p, gate := w.registering()
	p.Kill()
	gate.Open()
	w.must(w.host.TaskExited(w.ctx(), p.task.Key(), 1, 0, 9, false))
	p = w.startPlugin("alloc-p", csifake.Monolith, 2)
	w.registered("alloc-p")
	w.must(w.story())
	w.exit(p)
}
