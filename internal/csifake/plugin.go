package csifake

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/internal/csifake/journal"
)

// errGone ends the calls that still run as the plugin ends.
var errGone = status.Error(codes.Unavailable, "csifake: the plugin has ended")

// Plugin is one CSI plugin on one socket. New makes it, Run serves until the context ends or it dies.
type Plugin struct {
	cfg     Config
	caps    capSets
	journal *journal.Writer
	script  script

	listener *peerListener
	ended    chan struct{} // closed as the plugin stops or dies: what hangs goes on
	quit     chan struct{} // closed to end Run
	once     sync.Once

	alive sync.RWMutex // held for reading while something is written or made to be; see dead
	dead  bool         // nothing is written and nothing takes effect any more

	mu      sync.Mutex // of what follows
	numbers uint64
	open    map[*call]bool

	broken atomic.Pointer[error] // the first failure to write the journal
}

// New opens the socket and the journal. The plugin answers once Run runs.
func New(cfg Config) (*Plugin, error) {
	cfg, caps, err := cfg.filled()
	if err != nil {
		return nil, err
	}
	for _, r := range cfg.Script {
		if err := r.check(); err != nil {
			return nil, err
		}
	}
	p := &Plugin{cfg: cfg, caps: caps, ended: make(chan struct{}), quit: make(chan struct{}),
		open: map[*call]bool{}}
	p.script.file = cfg.ScriptFile
	p.script.add(cfg.Script...)
	if p.journal, err = journal.Open(cfg.Journal, cfg.Name, cfg.Instance); err != nil {
		return nil, err
	}
	if p.listener, err = listen(cfg.Socket); err != nil {
		return nil, errors.Join(err, p.journal.Close())
	}
	p.write(journal.Line{Kind: journal.Start, Role: string(cfg.Role), Node: cfg.NodeID})
	return p, nil
}

// Run serves until the context ends, or Stop, or Kill, and waits for every call. It returns why the journal could not
// be written, if so.
func (p *Plugin) Run(ctx context.Context) error {
	server := grpc.NewServer(grpc.UnaryInterceptor(p.intercept), grpc.UnknownServiceHandler(p.unknown),
		grpc.WaitForHandlers(true), grpc.MaxRecvMsgSize(64<<20), grpc.MaxSendMsgSize(64<<20))
	p.register(server)
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := server.Serve(p.listener); err != nil {
			p.cfg.Log.Debug("server ended", "error", err)
		}
	})
	select {
	case <-ctx.Done():
	case <-p.quit:
	}
	close(p.ended)
	server.Stop() // waits for the calls, and removes the socket file unless this was a kill
	serving.Wait()
	p.finish()
	if err := p.broken.Load(); err != nil {
		return *err
	}
	return nil
}

func (p *Plugin) register(s *grpc.Server) {
	csi.RegisterIdentityServer(s, identity{p: p})
	if p.cfg.serves(Controller) {
		csi.RegisterControllerServer(s, controller{p: p})
		if p.caps.has("service/GROUP_CONTROLLER_SERVICE") {
			csi.RegisterGroupControllerServer(s, group{p: p})
		}
		if p.caps.has("service/SNAPSHOT_METADATA_SERVICE") {
			csi.RegisterSnapshotMetadataServer(s, metadata{p: p})
		}
	}
	if p.cfg.serves(Node) {
		csi.RegisterNodeServer(s, nodeService{p: p})
	}
}

// Stop ends Run as a plugin that was told to: what hangs fails with UNAVAILABLE, the socket goes away.
func (p *Plugin) Stop() { p.once.Do(func() { close(p.quit) }) }

// Kill ends the plugin as SIGKILL would, as seen from outside: every connection is cut, nothing more is written in the
// journal but that it was killed, nothing more takes effect, the socket file stays. It may be called within a call.
func (p *Plugin) Kill() {
	p.alive.Lock()
	if !p.dead {
		p.write(journal.Line{Kind: journal.Stop, Killed: true})
		p.dead = true
	}
	p.alive.Unlock()
	p.listener.abandon()
	p.Stop()
}

func (p *Plugin) finish() {
	p.alive.Lock()
	if !p.dead {
		p.write(journal.Line{Kind: journal.Stop})
		p.dead = true
	}
	p.alive.Unlock()
	if err := p.journal.Close(); err != nil {
		p.failed(err)
	}
}

// write appends to the journal. The journal judges the tests, so a plugin that cannot write it is broken.
func (p *Plugin) write(l journal.Line) {
	if err := p.journal.Write(l); err != nil {
		p.failed(err)
	}
}

func (p *Plugin) failed(err error) {
	p.broken.CompareAndSwap(nil, &err)
	p.cfg.Log.Error("journal", "error", err)
}

// Config is what the plugin runs with, every default filled in: New with it is the same plugin started again.
func (p *Plugin) Config() Config {
	cfg := p.cfg
	for _, s := range []*string{&cfg.NodeID, &cfg.Name, &cfg.Version} {
		if *s == "" {
			*s = Empty
		}
	}
	return cfg
}

// Socket is the path of the socket.
func (p *Plugin) Socket() string { return p.cfg.Socket }

// Journal is the path of the journal.
func (p *Plugin) Journal() string { return p.cfg.Journal }

// Backend is what exists.
func (p *Plugin) Backend() *Backend { return p.cfg.Backend }

// Script puts rules in force.
func (p *Plugin) Script(rules ...Rule) error {
	for _, r := range rules {
		if err := r.check(); err != nil {
			return err
		}
	}
	p.script.add(rules...)
	return nil
}

// ClearScript takes all rules back that are not from the script file.
func (p *Plugin) ClearScript() { p.script.clear() }

// Calls are the calls in the journal, of every instance, for the RPCs named; all for none.
func (p *Plugin) Calls(rpcs ...string) ([]journal.Call, error) { return Calls(p.cfg.Journal, rpcs...) }

// peerListener hands out connections that know who is at the other end.
type peerListener struct {
	*net.UnixListener
	path  string
	mu    sync.Mutex
	conns map[*peerConn]bool
	last  uint64
	ended bool // closed or abandoned, whichever came first
}

// listen makes the socket; a file left over by a killed plugin makes way, as it does for real plugins.
func listen(path string) (*peerListener, error) {
	if st, err := os.Lstat(path); err == nil && st.Mode()&os.ModeSocket != 0 {
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("csifake: stale socket: %w", err)
		}
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("csifake: %w", err)
	}
	l.SetUnlinkOnClose(false) // Close does it, unless it comes after a kill
	return &peerListener{UnixListener: l, path: path, conns: map[*peerConn]bool{}}, nil
}

// end says whether it is the first to end the listener.
func (l *peerListener) end() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	first := !l.ended
	l.ended = true
	return first
}

// Close ends the listener and removes the socket file, before somebody else may have made a new one.
func (l *peerListener) Close() error {
	if l.end() {
		_ = os.Remove(l.path)
	}
	return l.UnixListener.Close()
}

// abandon cuts everything and leaves the socket file behind.
func (l *peerListener) abandon() {
	l.end()
	_ = l.UnixListener.Close() // closed before is as good
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.conns {
		_ = c.UnixConn.Close()
	}
}
