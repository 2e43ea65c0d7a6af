package csifake

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/internal/csifake/journal"
)

// errGone ends the calls that still run when the plugin ends.
var errGone = status.Error(codes.Unavailable, "csifake: the plugin has ended")

// Plugin is one CSI plugin on one socket. New makes it, Run serves until the context ends or it dies.
type Plugin struct {
	cfg     Config
	caps    capSets
	version version
	journal *journal.Writer
	script  script

	listener *listener
	ended    chan struct{} // closed when the plugin stops or dies; Run and hanging calls then end
	once     sync.Once     // closes ended
	fuses    fuses         // mounts that live as long as this plugin

	effects sync.RWMutex // held for reading during a write or an effect; see dead
	dead    bool         // nothing is written any more, and nothing takes effect

	killed atomic.Bool // the plugin was killed

	mu      sync.Mutex // guards numbers and open
	numbers uint64
	open    map[*call]bool

	broken atomic.Pointer[error] // the first failure to write the journal
}

// New opens the socket and the journal. The plugin answers once Run is called.
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
	p := &Plugin{cfg: cfg, caps: caps, ended: make(chan struct{}), open: map[*call]bool{}}
	p.version, _ = parseVersion(cfg.Spec) // filled has checked the version
	p.script.file = cfg.ScriptFile
	p.script.add(cfg.Script...)
	if p.journal, err = cfg.openJournal(); err != nil {
		return nil, err
	}
	if p.listener, err = listen(cfg); err != nil {
		return nil, errors.Join(err, p.journal.Close())
	}
	p.write(journal.Line{Kind: journal.Start, Role: string(cfg.Role), Node: cfg.NodeID, Endpoint: cfg.Endpoint})
	if err := p.registerRun(); err != nil {
		return nil, errors.Join(err, p.listener.Close(), p.journal.Close())
	}
	return p, nil
}

// registerRun records the start of a forgetful plugin, which loses its records if its last process was killed. It also
// records the node of a plugin that serves Node.
func (p *Plugin) registerRun() error {
	if p.cfg.Forgetful {
		forgot, err := p.cfg.Backend.start(p.cfg.process())
		if err != nil {
			return err
		}
		if forgot {
			p.write(journal.Line{Kind: journal.Forgot, Node: p.cfg.NodeID})
		}
	}
	if !p.cfg.serves(Node) {
		return nil
	}
	return p.cfg.Backend.change(func(c *contents) error {
		if c.NodeIDs == nil {
			c.NodeIDs = map[string]bool{}
		}
		c.NodeIDs[p.cfg.NodeID] = true
		return nil
	})
}

// KillProcess kills this process, as a crash does. It is the Config.Die of a plugin that runs as a separate process.
func KillProcess() {
	_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	select {}
}

// Run serves until ctx ends, or until Stop or Kill, and waits for every call. It returns an error if the journal could
// not be written.
func (p *Plugin) Run(ctx context.Context) error {
	interceptors := []grpc.UnaryServerInterceptor{p.intercept}
	if p.cfg.Intercept != nil {
		interceptors = []grpc.UnaryServerInterceptor{p.cfg.Intercept, p.intercept}
	}
	server := grpc.NewServer(grpc.ChainUnaryInterceptor(interceptors...), grpc.UnknownServiceHandler(p.unknown),
		grpc.ForceServerCodecV2(garbling{}), grpc.WaitForHandlers(true),
		grpc.MaxRecvMsgSize(64<<20), grpc.MaxSendMsgSize(64<<20))
	p.register(server)
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := server.Serve(p.listener); err != nil {
			p.cfg.Log.Debug("server ended", "error", err)
		}
	})
	select {
	case <-ctx.Done():
		p.Stop()
	case <-p.ended:
	}
	server.Stop() // waits for the calls, and removes the socket file unless the plugin was killed
	serving.Wait()
	p.listener.cutAll() // connections that grpc does not know
	p.fuses.closeAll()
	p.fuses.served.Wait()
	p.finish()
	if err := p.broken.Load(); err != nil {
		return *err
	}
	return nil
}

func (p *Plugin) register(s grpc.ServiceRegistrar) {
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

// Stop ends Run as SIGTERM ends a plugin: hanging calls fail with UNAVAILABLE, and the socket is removed.
func (p *Plugin) Stop() { p.once.Do(func() { close(p.ended) }) }

// over reports whether the plugin is ending or has ended.
func (p *Plugin) over() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// Kill ends the plugin as SIGKILL would. Every connection is cut, and nothing takes effect any more. The journal gets
// only the line that the plugin was killed, and the socket file stays. Kill may be called within a call.
func (p *Plugin) Kill() {
	p.effects.Lock()
	if !p.dead {
		p.write(journal.Line{Kind: journal.Stop, Killed: true})
		p.dead = true
		p.killed.Store(true)
	}
	p.effects.Unlock()
	p.listener.abandon()
	p.fuses.closeAll()
	p.Stop()
}

func (p *Plugin) finish() {
	p.effects.Lock()
	if !p.dead {
		if p.cfg.Forgetful {
			if err := p.cfg.Backend.stop(p.cfg.process()); err != nil {
				p.failed(err)
			}
		}
		p.write(journal.Line{Kind: journal.Stop})
		p.dead = true
	}
	p.effects.Unlock()
	if err := p.journal.Close(); err != nil {
		p.failed(err)
	}
}

// write appends to the journal. The tests rely on the journal, so a plugin that cannot write it has failed.
func (p *Plugin) write(l journal.Line) {
	if err := p.journal.Write(l); err != nil {
		p.failed(err)
	}
}

func (p *Plugin) failed(err error) {
	p.broken.CompareAndSwap(nil, &err)
	p.cfg.Log.Error("journal", "error", err)
}

// Config returns the plugin's configuration with all defaults filled in. New with it starts the same plugin again.
func (p *Plugin) Config() Config {
	cfg := p.cfg
	for _, s := range []*string{&cfg.NodeID, &cfg.Name, &cfg.Version} {
		if *s == "" {
			*s = Empty
		}
	}
	return cfg
}

// Socket returns the path of the socket. It is empty for a plugin with a Listener.
func (p *Plugin) Socket() string { return p.cfg.Socket }

// Journal returns the path of the journal. It is empty if the journal is in memory.
func (p *Plugin) Journal() string { return p.cfg.Journal }

// Backend returns the storage system of the plugin.
func (p *Plugin) Backend() *Backend { return p.cfg.Backend }

// Script adds rules.
func (p *Plugin) Script(rules ...Rule) error {
	for _, r := range rules {
		if err := r.check(); err != nil {
			return err
		}
	}
	p.script.add(rules...)
	return nil
}

// ClearScript removes all rules that are not from the script file.
func (p *Plugin) ClearScript() { p.script.clear() }

// Calls returns the calls in the journal, of every instance, for the given RPCs. Without RPCs it returns all.
func (p *Plugin) Calls(rpcs ...string) ([]journal.Call, error) {
	lines, err := p.Lines()
	return callsOf(lines, rpcs), err
}

// Lines returns the present lines of the journal.
func (p *Plugin) Lines() ([]journal.Line, error) {
	if p.cfg.Memory != nil {
		return p.cfg.Memory.Lines(), nil
	}
	return journal.Read(p.cfg.Journal)
}

// Check checks the journal against the automaton. A journal that cannot be read violates R0.
func (p *Plugin) Check(o journal.Options) []journal.Violation {
	lines, err := p.Lines()
	if err != nil {
		return []journal.Violation{{Rule: "R0", Text: err.Error()}}
	}
	return journal.Check(lines, o)
}
