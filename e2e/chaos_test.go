package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"holdfast/internal/csifake"
)

// TestChaos lets everything happen at once, many times over: allocs come and go on shared volumes while plugins fail, hang, crash, are
// replaced and taken over, the shim is killed and the host starts anew. Then the faults stop, everything is released, and nothing may be
// left. HOLDFAST_CHAOS=10m goes on with new seeds for that long; HOLDFAST_CHAOS_SEED=7 runs that one.
func TestChaos(t *testing.T) {
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	t.Run("run", func(t *testing.T) {
		for _, seed := range ordinarySeeds(t) {
			t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
				t.Parallel()
				chaos(t, seed, 2*time.Second)
			})
		}
	})
	soak(t)
	growth(t, goroutines, files)
}

// ordinarySeeds are the few of an ordinary run.
func ordinarySeeds(t *testing.T) []uint64 {
	t.Helper()
	one := os.Getenv("HOLDFAST_CHAOS_SEED")
	if one == "" {
		return []uint64{1, 2, 3}
	}
	seed, err := strconv.ParseUint(one, 10, 64)
	if err != nil {
		t.Fatalf("HOLDFAST_CHAOS_SEED: %v", err)
	}
	return []uint64{seed}
}

// soak runs new seeds until the time that was asked for is over.
func soak(t *testing.T) {
	text := os.Getenv("HOLDFAST_CHAOS")
	if text == "" {
		return
	}
	long, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("HOLDFAST_CHAOS: %v", err)
	}
	first := uint64(time.Now().UnixNano())
	for seed, end := first, time.Now().Add(long); time.Now().Before(end) && !t.Failed(); seed += 2 {
		t.Run("soak", func(t *testing.T) {
			for _, s := range []uint64{seed, seed + 1} {
				t.Run(fmt.Sprintf("seed=%d", s), func(t *testing.T) {
					t.Parallel()
					chaos(t, s, 5*time.Second)
				})
			}
		})
	}
}

// chaos is one world's life.
func chaos(t *testing.T, seed uint64, long time.Duration) {
	m := newMess(t, seed)
	random, cancel := context.WithCancel(t.Context())
	defer cancel()
	m.watching.Go(func() { m.watch(m.ctx()) })
	var actors sync.WaitGroup
	for _, s := range m.seats {
		m.nursing.Go(func() { s.live(random) })
	}
	for i := range 6 {
		actors.Go(func() { m.user(random, fmt.Sprintf("u%d", i)) })
	}
	for i := range 2 {
		actors.Go(func() { m.clerk(random, fmt.Sprintf("c%d", i)) })
	}
	actors.Go(func() { m.demon(random) })
	m.rage(long)
	cancel()
	actors.Wait()
	m.calm()
	m.judge()
	if t.Failed() {
		t.Logf("HOLDFAST_CHAOS_SEED=%d repeats the operations, though not their timing", seed)
	}
}

// mess is a world in which everything happens at once.
type mess struct {
	*world
	seed     uint64
	plugins  []*service
	seats    []*seat
	volumes  []*shelf
	told     *record // what a watcher was told, over the death of shims and hosts
	watching sync.WaitGroup
	nursing  sync.WaitGroup // the lives of seats, which go on until over is closed
	over     chan struct{}

	mu      sync.Mutex // guards what follows
	tenancy *tenancy
	living  account
	owed    map[string]bool // allocs that are still to be released
	runs    sync.WaitGroup  // of plugins
}

// service is one plugin, with one storage system, served by several tasks.
type service struct {
	id      string
	caps    []string
	backend *csifake.Backend
}

func services() []*service {
	return []*service{
		{id: "mono", caps: larger},
		{id: "split", caps: append([]string{"EXPAND_VOLUME", "expansion/OFFLINE"}, everything...)},
		{id: "bare", caps: []string{"CREATE_DELETE_VOLUME", "EXPAND_VOLUME", "expansion/ONLINE"}},
		{id: "stager", caps: []string{"CREATE_DELETE_VOLUME", "STAGE_UNSTAGE_VOLUME"}},
		{id: "attacher", caps: []string{"CREATE_DELETE_VOLUME", "PUBLISH_UNPUBLISH_VOLUME"}},
	}
}

func newMess(t *testing.T, seed uint64) *mess {
	w := newWorld(t)
	m := &mess{world: w, seed: seed, told: &record{}, over: make(chan struct{}), living: newAccount(), owed: map[string]bool{}}
	m.tenancy = newTenancy(w.host)
	rng := m.dice("plugins")
	all := services()
	picked := []*service{all[rng.IntN(2)], all[2+rng.IntN(3)]}
	for _, p := range picked {
		p.backend = csifake.NewBackend("")
		m.plugins = append(m.plugins, p)
		roles := []csifake.Role{csifake.Monolith}
		if p.id == "split" {
			roles = []csifake.Role{csifake.Node, csifake.Controller}
		}
		for _, role := range roles {
			for i := range 2 {
				m.seats = append(m.seats, m.newSeat(p, role, i))
			}
		}
		for i := range 3 {
			m.volumes = append(m.volumes, m.newShelf(p, i))
		}
	}
	return m
}

// dice are those of one actor: what it does is the seed's, whatever the others do.
func (m *mess) dice(actor string) *rand.Rand {
	var h uint64 = 14695981039346656037
	for _, c := range []byte(actor) {
		h = (h ^ uint64(c)) * 1099511628211
	}
	return rand.New(rand.NewPCG(m.seed, h))
}

// pause waits; false: the time for chaos is over.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// upTo is a random time, at most ms milliseconds.
func upTo(rng *rand.Rand, ms int) time.Duration {
	return time.Duration(rng.IntN(ms)+1) * time.Millisecond
}
