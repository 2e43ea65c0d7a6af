package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/moby/sys/mountinfo"

	"holdfast/host"
)

// shelf is a volume that may be there or not.
type shelf struct {
	id   string
	spec host.VolumeSpec
}

func (m *mess) newShelf(p *service, n int) *shelf {
	s := &shelf{id: fmt.Sprintf("%s-%d", p.id, n)}
	text := fmt.Sprintf("id = %q\nname = %q\ntype = \"csi\"\nplugin_id = %q\ncapacity_min = \"1MiB\"\n", s.id, s.id, p.id)
	for _, mode := range []string{"single-node-writer", "multi-node-multi-writer"} {
		text += fmt.Sprintf("capability {\n access_mode = %q\n attachment_mode = \"file-system\"\n}\n", mode)
	}
	spec, _, err := m.host.ParseVolume(m.ctx(), host.Source{Name: s.id + ".hcl", Text: []byte(text)}, host.ParseOptions{})
	m.must(err)
	s.spec = spec
	return s
}

func (s *shelf) name() host.VolumeName {
	return host.VolumeName{Namespace: "default", ID: host.VolumeID(s.id)}
}

// tolerable says whether an error may come of the faults, or of what others do with the volume.
func (m *mess) tolerable(what string, err error) bool {
	if errors.Is(err, host.ErrDamaged) || errors.Is(err, host.ErrUnsupported) {
		m.t.Errorf("%s: %v", what, err)
		return false
	}
	return true
}

// clerk creates, expands and deletes volumes, without asking anybody.
func (m *mess) clerk(ctx context.Context, name string) {
	rng := m.dice(name)
	for pause(ctx, upTo(rng, 100)) {
		s := m.volumes[rng.IntN(len(m.volumes))]
		limit := upTo(rng, 2000)
		switch rng.IntN(6) {
		case 0, 1:
			m.tolerable("delete "+s.id, m.remove(s, limit))
		case 2:
			m.expand(s, int64(1+rng.IntN(8))<<20, limit)
		default:
			m.tolerable("create "+s.id, m.make(s, limit))
		}
	}
}

func (m *mess) make(s *shelf, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(m.ctx(), limit)
	defer cancel()
	return m.call(func(h *host.Host) error { _, err := h.CreateVolume(ctx, s.spec); return err })
}

// expand has a volume expanded. Some plugins cannot.
func (m *mess) expand(s *shelf, size int64, limit time.Duration) {
	ctx, cancel := context.WithTimeout(m.ctx(), limit)
	defer cancel()
	err := m.call(func(h *host.Host) error {
		_, err := h.ExpandVolume(ctx, s.name(), host.CapacityRange{Required: size})
		return err
	})
	if !errors.Is(err, host.ErrUnsupported) {
		m.tolerable("expand "+s.id, err)
	}
}

func (m *mess) remove(s *shelf, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(m.ctx(), limit)
	defer cancel()
	return m.call(func(h *host.Host) error { return h.DeleteVolume(ctx, s.name()) })
}

// user is an orchestrator's loop of allocs that use volumes.
func (m *mess) user(ctx context.Context, name string) {
	rng := m.dice(name)
	for n := 1; pause(ctx, upTo(rng, 50)); n++ {
		m.alloc(ctx, rng, fmt.Sprintf("%s-%d", name, n))
	}
}

// alloc is one alloc's life.
func (m *mess) alloc(ctx context.Context, rng *rand.Rand, id string) {
	volumes := []string{m.volumes[rng.IntN(len(m.volumes))].id}
	if other := m.volumes[rng.IntN(len(m.volumes))].id; other != volumes[0] && rng.IntN(3) == 0 {
		volumes = append(volumes, other)
	}
	mode := "multi-node-multi-writer"
	if rng.IntN(6) == 0 {
		mode = "single-node-writer"
	}
	group := host.AllocGroup{Alloc: host.AllocID(id), Job: "user", Group: "g", Namespace: "default", Sealed: m.parse(groupText(mode, volumes...)).Groups[0].Sealed}
	m.keep(func(a *account) { a.allocs[group.Alloc] = group })
	if rng.IntN(4) == 0 {
		m.stopped(ctx, rng, group)
		return
	}
	m.use(ctx, rng, group, len(volumes))
	if rng.IntN(8) == 0 { // forgotten: the next host that is told what lives has it released
		m.keep(func(a *account) { delete(a.allocs, group.Alloc) })
		m.owe(id, true)
		return
	}
	for range 3 {
		if m.letGo(id, upTo(rng, 3000)) {
			m.reallyGone(id)
			return
		}
	}
}

// stopped releases an alloc while it is prepared. Nobody prepares it again after that, so it stays away.
func (m *mess) stopped(ctx context.Context, rng *rand.Rand, group host.AllocGroup) {
	at := m.now()
	var preparing sync.WaitGroup
	asked := &heeded{Context: m.ctx(), heed: make(chan struct{})}
	preparing.Go(func() {
		_, err := at.PrepareAlloc(asked, group)
		asked.Done() // at the latest
		m.tolerable("prepare "+string(group.Alloc), err)
	})
	<-asked.heed
	pause(context.WithoutCancel(ctx), 5*time.Millisecond+upTo(rng, 200))
	m.letGo(string(group.Alloc), upTo(rng, 3000))
	preparing.Wait()
	m.reallyGone(string(group.Alloc))
}

// heeded tells when somebody asks for its end for the first time: from then on a call that it was given to is under way. A goroutine that
// was started may not have come to its call for as long as it pleases a busy machine.
type heeded struct {
	context.Context
	once sync.Once
	heed chan struct{}
}

func (h *heeded) Done() <-chan struct{} {
	h.once.Do(func() { close(h.heed) })
	return h.Context.Done()
}

// use has the alloc's volumes mounted, and finds them mounted for as long as nobody has let them go.
func (m *mess) use(ctx context.Context, rng *rand.Rand, group host.AllocGroup, volumes int) {
	var plans map[string]host.Plan
	err := errors.New("not tried")
	for try := 0; try < 2 && err != nil; try++ {
		limited, cancel := context.WithTimeout(m.ctx(), 300*time.Millisecond+upTo(rng, 4000))
		err = m.call(func(h *host.Host) (err error) { plans, err = h.PrepareAlloc(limited, group); return err })
		cancel()
	}
	hold := upTo(rng, 200)
	if err != nil {
		m.tolerable("prepare "+string(group.Alloc), err)
		return
	}
	for range 2 {
		for i := range volumes {
			path := env(plans["t"], fmt.Sprintf("HOLDFAST_VOLUME_V%d", i))
			if mounted, err := mountinfo.Mounted(path); err != nil || !mounted {
				m.t.Errorf("alloc %s is prepared, and %s is not mounted: %v", group.Alloc, path, err)
			} else if err := os.WriteFile(filepath.Join(path, string(group.Alloc)), nil, 0o600); err != nil {
				m.t.Errorf("alloc %s: %v", group.Alloc, err)
			}
		}
		pause(ctx, hold)
	}
}

// letGo releases an alloc. One that is not released in time goes on by itself.
func (m *mess) letGo(id string, limit time.Duration) bool {
	m.keep(func(a *account) { delete(a.allocs, host.AllocID(id)) })
	m.owe(id, true)
	ctx, cancel := context.WithTimeout(m.ctx(), limit)
	defer cancel()
	err := m.call(func(h *host.Host) error { return h.ReleaseAlloc(ctx, host.AllocID(id)) })
	if err != nil {
		m.tolerable("release "+id, err)
		return false
	}
	m.owe(id, false)
	return true
}

func (m *mess) owe(id string, owed bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if owed {
		m.owed[id] = true
	} else {
		delete(m.owed, id)
	}
}

// reallyGone holds an answered release to its word: nothing that was asked before it brings the alloc back.
func (m *mess) reallyGone(id string) {
	m.mu.Lock()
	owed := m.owed[id]
	m.mu.Unlock()
	if owed {
		return
	}
	var list []host.AllocStatus
	err := m.call(func(h *host.Host) (err error) { list, _, err = h.Allocs(m.ctx(), host.AllocID(id)); return err })
	if err != nil || len(list) > 0 {
		m.t.Errorf("alloc %s was released, and is there: %+v, %v", id, list, err)
	}
}
