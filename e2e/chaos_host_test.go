package e2e

import (
	"context"
	"errors"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"holdfast/host"
	"holdfast/internal/csifake"
)

// tenancy is one host from Open to Close.
type tenancy struct {
	*host.Host
	closing  chan struct{} // closed before Close
	replaced chan struct{} // closed once the next one is there
}

func newTenancy(h *host.Host) *tenancy {
	return &tenancy{h, make(chan struct{}), make(chan struct{})}
}

// account is what an orchestrator keeps of what runs.
type account struct {
	allocs map[host.AllocID]host.AllocGroup
	tasks  map[host.TaskKey]host.WorkloadTask
}

func newAccount() account {
	return account{map[host.AllocID]host.AllocGroup{}, map[host.TaskKey]host.WorkloadTask{}}
}

func (m *mess) now() *tenancy {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.tenancy
}

// keep changes the account.
func (m *mess) keep(f func(a *account)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f(&m.living)
}

// call makes a call, again at the next host if this one was closed meanwhile.
func (m *mess) call(f func(*host.Host) error) error {
	for {
		at := m.now()
		err := f(at.Host)
		if err == nil || !closed(at.closing) {
			return err
		}
		<-at.replaced
	}
}

func closed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// reopen closes the host and opens the next one, which is told what lives.
func (m *mess) reopen() {
	at := m.now()
	close(at.closing)
	if err := at.Close(); err != nil {
		m.t.Errorf("close: %v", err)
	}
	m.mu.Lock()
	m.config.Workload = host.Workload{Allocs: slices.Collect(maps.Values(m.living.allocs)), Tasks: slices.Collect(maps.Values(m.living.tasks))}
	m.mu.Unlock()
	h, err := host.Open(m.ctx(), m.config)
	for try := 0; err != nil && try < 20; try++ {
		m.t.Errorf("open: %v", err)
		pause(m.ctx(), 100*time.Millisecond)
		h, err = host.Open(m.ctx(), m.config)
	}
	if err != nil {
		h = at.Host
	}
	m.mu.Lock()
	m.host, m.tenancy = h, newTenancy(h)
	m.mu.Unlock()
	close(at.replaced)
}

// demon breaks things.
func (m *mess) demon(ctx context.Context) {
	rng := m.dice("demon")
	for pause(ctx, 20*time.Millisecond+upTo(rng, 60)) {
		switch n := rng.IntN(60); {
		case n == 0:
			m.reopen()
		case n <= 3:
			m.killShim()
		default:
			m.curse(rng)
		}
	}
}

// Steps of a volume's life, and what plugins may answer. Those who say "not found" of what is there, refuse a creation that they have
// made, or a deletion, lose volumes themselves: nobody would detach what they do not know.
var (
	steps     = mutating
	questions = []string{"Probe", "GetPluginInfo", "GetPluginCapabilities", "NodeGetInfo", "NodeGetCapabilities", "ControllerGetCapabilities"}
	unclear   = []codes.Code{codes.Internal, codes.Unavailable, codes.Aborted, codes.Unknown, codes.DeadlineExceeded, codes.DataLoss, codes.Canceled}
	refusals  = []codes.Code{codes.FailedPrecondition, codes.InvalidArgument, codes.PermissionDenied, codes.AlreadyExists, codes.OutOfRange}
)

// curse scripts a fault at a plugin that runs.
func (m *mess) curse(rng *rand.Rand) {
	s := m.seats[rng.IntN(len(m.seats))]
	p := s.plugin()
	rpc, after := steps[rng.IntN(len(steps))], rng.IntN(2) == 0
	if rng.IntN(6) == 0 {
		rpc = questions[rng.IntN(len(questions))]
	}
	code, refused := unclear[rng.IntN(len(unclear))], false
	if rng.IntN(3) == 0 && !(rpc == "CreateVolume" && after) {
		code, refused = refusals[rng.IntN(len(refusals))], true
	}
	kind, delay, times := rng.IntN(5), upTo(rng, 300), 1+rng.IntN(2)
	if p == nil {
		return
	}
	at := p.On(rpc).Times(times)
	if rpc == "DeleteVolume" && refused {
		at.Rule(s.keeps())
		return
	}
	if after {
		at = at.After()
	}
	switch kind {
	case 0, 1:
		at.Code(code, "cursed")
	case 2:
		at.Delay(delay)
	case 3:
		at.Delayed(delay).Code(code, "cursed late")
	case 4:
		at.Times(1).Delayed(delay).Crash()
	}
}

// keeps refuses to delete a volume that is there, as it is in use. Of one that is not, whatever became of an earlier call, it says that it is
// deleted.
func (s *seat) keeps() csifake.Rule {
	return csifake.Rule{Lie: csifake.NoEffect, Answer: func(_ context.Context, req, reply proto.Message, err error) (proto.Message, error) {
		volumes, look := s.plug.backend.Volumes()
		if look != nil {
			return nil, look
		}
		if _, there := volumes[req.(*csi.DeleteVolumeRequest).GetVolumeId()]; there && err == nil {
			return nil, status.Error(codes.FailedPrecondition, "cursed")
		}
		return reply, err
	}}
}

// record is the events that a watcher was told.
type record struct {
	mu   sync.Mutex
	list []host.Event
}

func (r *record) add(e host.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = append(r.list, e)
}

func (r *record) all() []host.Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.list)
}

func (r *record) last() host.Seq {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.list) == 0 {
		return 0
	}
	return r.list[len(r.list)-1].Seq
}

// watch follows all events, from host to host, to the last one.
func (m *mess) watch(ctx context.Context) {
	for ctx.Err() == nil {
		at := m.now()
		err := at.Watch(ctx, host.WatchOptions{After: m.told.last()}, func(e host.Event) error {
			m.told.add(e)
			if isLast(e) {
				return io.EOF
			}
			return nil
		})
		switch {
		case errors.Is(err, io.EOF), ctx.Err() != nil:
			return
		case closed(at.closing):
			<-at.replaced
		case errors.Is(err, host.ErrUnavailable): // closing has begun
			<-at.replaced
		default:
			m.t.Errorf("watch: %v", err)
			return
		}
	}
}
