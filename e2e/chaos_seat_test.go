package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/internal/csifake"
)

// seat is one of the tasks that serve a plugin: an alloc of it, then the next one.
type seat struct {
	m      *mess
	plug   *service
	role   csifake.Role
	name   string
	rng    *rand.Rand
	allocs int

	task host.AllocTask
	done chan struct{} // closed when the plugin has ended

	mu sync.Mutex // guards up
	up *csifake.Plugin
}

func (m *mess) newSeat(p *service, role csifake.Role, n int) *seat {
	s := &seat{m: m, plug: p, role: role, name: fmt.Sprintf("%s-%s-%d", p.id, role, n)}
	s.rng = m.dice(s.name)
	return s
}

// plugin is the one that runs, or nil.
func (s *seat) plugin() *csifake.Plugin {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.up
}

// live starts the task, and lets it end and start anew in every way until ctx ends. Then it is only
// started again should it die, until all is over.
func (s *seat) live(ctx context.Context) {
	s.next()
	for {
		s.start()
		died, over := s.wait(ctx)
		if over && !died {
			break
		}
		final := s.rng.IntN(3) == 0
		s.end(died || s.rng.IntN(2) == 0, final)
		pause(ctx, upTo(s.rng, 150))
		if final {
			s.next()
		}
	}
	for !closed(s.m.over) {
		select {
		case <-s.done:
			s.nurse()
		case <-s.m.over:
		}
	}
}

// nurse starts a task again that has died.
func (s *seat) nurse() {
	if closed(s.done) {
		s.end(true, false)
		s.start()
	}
}

func (s *seat) wait(ctx context.Context) (died, over bool) {
	timer := time.NewTimer(200*time.Millisecond + upTo(s.rng, 2500))
	defer timer.Stop()
	select {
	case <-s.done:
		return true, ctx.Err() != nil
	case <-timer.C:
	case <-ctx.Done():
		over = true
	}
	return closed(s.done), over
}

// next is a new alloc.
func (s *seat) next() {
	s.allocs++
	s.task = host.AllocTask{Alloc: host.AllocID(fmt.Sprintf("%s-%d", s.name, s.allocs)), Task: "plugin", Sealed: s.m.sealedPlugin(s.plug.id, s.role)}
}

// start starts the next attempt, as an orchestrator does.
func (s *seat) start() {
	s.task.Attempt++
	task := s.task
	s.m.keep(func(a *account) { a.tasks[task.Key()] = host.WorkloadTask{AllocTask: task} })
	var plan host.Plan
	s.report("starting", func(h *host.Host) (err error) { plan, err = h.TaskStarting(s.m.ctx(), task); return err })
	p, err := csifake.New(csifake.Config{
		Name: s.plug.id + ".example.org", Role: s.role, Caps: s.plug.caps, Socket: csifake.SocketPath(env(plan, "CSI_ENDPOINT")), Journal: s.m.journal,
		Backend: s.plug.backend, Mounts: true, DataDir: filepath.Join(s.m.dir, "data", s.plug.id), Instance: string(task.Alloc),
		VolumeContext: map[string]string{"pool": "p"}, PublishContext: map[string]string{"lun": "7"},
	})
	if err != nil {
		s.m.t.Errorf("start %s: %v", task.Key(), err)
		return
	}
	done := make(chan struct{})
	s.m.runs.Go(func() {
		defer close(done)
		if err := p.Run(context.WithoutCancel(s.m.t.Context())); err != nil {
			s.m.t.Errorf("%s: %v", task.Key(), err)
		}
	})
	s.done = done
	s.mu.Lock()
	s.up = p
	s.mu.Unlock()
	at := s.m.sinceBoot()
	s.m.keep(func(a *account) { a.tasks[task.Key()] = host.WorkloadTask{AllocTask: task, Running: true, Started: at} })
	s.report("started", func(h *host.Host) error { return h.TaskStarted(s.m.ctx(), task.Key(), task.Attempt) })
}

// end ends the attempt and says so.
func (s *seat) end(kill, final bool) {
	s.mu.Lock()
	p := s.up
	s.up = nil
	s.mu.Unlock()
	if kill {
		p.Kill()
	} else {
		p.Stop()
	}
	<-s.done
	task := s.task
	s.m.keep(func(a *account) {
		a.tasks[task.Key()] = host.WorkloadTask{AllocTask: task}
		if final {
			delete(a.tasks, task.Key())
		}
	})
	s.report("exited", func(h *host.Host) error { return h.TaskExited(s.m.ctx(), task.Key(), task.Attempt, 0, 9, final) })
}

// report makes a call that must not fail, whatever happens to the shim meanwhile.
func (s *seat) report(what string, f func(*host.Host) error) {
	if err := s.m.call(f); err != nil {
		s.m.t.Errorf("task %s %s, attempt %d: %v", s.task.Key(), what, s.task.Attempt, err)
	}
}

func env(plan host.Plan, name string) string {
	for _, e := range plan.Env {
		if e.Name == name {
			return e.Value
		}
	}
	return ""
}

// sealedPlugin parses the job of a plugin.
func (m *mess) sealedPlugin(id string, role csifake.Role) host.Sealed {
	text := fmt.Sprintf("task \"plugin\" {\n driver = \"raw_exec\"\n csi_plugin {\n id = %q\n type = %q\n heartbeat {\n interval = \"1s\"\n }\n }\n}\n", id, role)
	return m.parse(text).Groups[0].Tasks[0].Sealed
}

// parse parses a job.
func (m *mess) parse(text string) *host.Job {
	var job *host.Job
	err := m.call(func(h *host.Host) (err error) {
		job, _, err = h.Parse(m.ctx(), host.Source{Name: "job.hcl", Text: []byte(text)}, host.ParseOptions{})
		return err
	})
	if err != nil {
		m.t.Errorf("parse: %v", err)
		return &host.Job{Groups: []host.Group{{Tasks: []host.Task{{}}}}}
	}
	return job
}

func (w *world) sinceBoot() host.BootTime {
	at := w.bootTime()
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts)
	at.At = time.Duration(ts.Nano())
	return at
}

// groupText is a job with a task that uses volumes, under the names v0, v1 and so on.
func groupText(mode string, volumes ...string) string {
	var b, mounts strings.Builder
	for i, v := range volumes {
		fmt.Fprintf(&b, "volume \"v%d\" {\n type = \"csi\"\n source = %q\n access_mode = %q\n attachment_mode = \"file-system\"\n}\n", i, v, mode)
		fmt.Fprintf(&mounts, "volume_mount {\n volume = \"v%d\"\n destination = \"/v%d\"\n}\n", i, i)
	}
	return fmt.Sprintf("job \"user\" {\n group \"g\" {\n%s\n task \"t\" {\n driver = \"raw_exec\"\n%s\n}\n}\n}\n", b.String(), mounts.String())
}
