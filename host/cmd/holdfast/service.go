package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/docker/go-units"
	"github.com/hashicorp/go-hclog"
	"github.com/spf13/cobra"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/host/agent/control"
	"holdfast/host/agent/metrics"
	"holdfast/host/agent/statuspage"
	"holdfast/host/agent/taskdriver"
	"holdfast/host/agent/volumeplugin"
	"holdfast/internal/mount"
	"holdfast/internal/secretfile"
	"holdfast/registry"
)

// agentFlags are the flags of commands that run an agent.
type agentFlags struct {
	shim   string
	node   string
	driver string
	engine map[string]*string // API of the engine, by container driver

	metrics string // TCP address; empty: none
	http    string // TCP address of the status page; empty: none

	volumePlugin  string // socket for container engines; empty: none
	volumeDefault struct{ plugin, size string }

	// These are as in host.Config; 0 means its default.
	bake, budget, hold time.Duration

	cluster string // HCL text with the cluster block; empty: none
	fence   string // program that fences a node; empty: none

	recover agent.Recovery // as in agent.Config

	traces trace.TracerProvider // nil: no spans
}

func (e *agentFlags) flags(c *cobra.Command) {
	c.Flags().StringVar(&e.shim, "shim", "", "shim binary (default holdfast-shim beside this program or in PATH)")
	c.Flags().StringVar(&e.node, "node", "", "name of this node (default: the host name)")
	c.Flags().StringVar(&e.driver, "driver", "default",
		"task driver for all tasks: exec, raw_exec, or default (set by the job)")
	e.engine = map[string]*string{}
	for name, at := range defaultEngines {
		e.engine[name] = c.Flags().String(name+"-engine", at, "API of the "+name+" driver's engine")
	}
	c.Flags().StringVar(&e.metrics, "metrics", "",
		"serve Prometheus metrics and /healthz on this address, as in 127.0.0.1:9750")
	c.Flags().StringVar(&e.http, "http", "",
		"serve a status page for browsers on this address, as in 127.0.0.1:9751")
	c.Flags().StringVar(&e.volumePlugin, "volume-plugin", "",
		"serve volumes to Docker or Podman on this socket, as in /run/docker/plugins/holdfast.sock")
	c.Flags().StringVar(&e.volumeDefault.plugin, "volume-default-plugin", "",
		"plugin that creates the volumes of docker run -v NAME:/DIR")
	c.Flags().StringVar(&e.volumeDefault.size, "volume-default-size", "",
		"size of the volumes of docker run -v, as in 1G")
	c.Flags().StringVar(&e.fence, "fence-command", "",
		"program that fences the node named by its argument, and exits with 0 once that node cannot write any more")
	c.Flags().DurationVar(&e.bake, "shim-bake", 10*time.Second,
		"how long the previous shim stays on standby after a swap")
	c.Flags().DurationVar(&e.budget, "shim-swap-budget", 500*time.Millisecond,
		"how long a swap may hold calls before it is rolled back")
	c.Flags().DurationVar(&e.hold, "shim-max-hold", 30*time.Second, "how long calls wait for a shim to start")
}

// defaultEngines maps the name of a container driver to the API of its engine.
var defaultEngines = map[string]string{
	"docker": "unix:///var/run/docker.sock", "podman": "unix:///run/podman/podman.sock",
}

// drivers returns all task drivers. Container drivers connect to their engines only when a job needs them.
func (e *agentFlags) drivers() ([]taskdriver.Driver, error) {
	list := []taskdriver.Driver{taskdriver.NewExec(), taskdriver.NewRawExec()}
	for name, at := range defaultEngines {
		if flag := e.engine[name]; flag != nil { // nil: the command has no such flag
			at = *flag
		}
		d, err := taskdriver.NewContainer(name, at)
		if err != nil {
			return nil, badFlag(name+"-engine", ": %v", err)
		}
		list = append(list, d)
	}
	return list, nil
}

// driverOverride returns the driver of all tasks. It is empty if each job sets its own.
func (e *agentFlags) driverOverride() (string, error) {
	switch e.driver {
	case "default", "":
		return "", nil
	case "exec", "raw_exec":
		return e.driver, nil
	}
	return "", badFlag("driver", " %q: use exec, raw_exec or default", e.driver)
}

// volumeDefaults returns the defaults for a volume that docker run -v NAME:/DIR creates.
func (e *agentFlags) volumeDefaults() (d volumeplugin.Defaults, err error) {
	d.Plugin = host.PluginID(e.volumeDefault.plugin)
	if size := e.volumeDefault.size; size != "" {
		if d.Size, err = units.RAMInBytes(size); err != nil || d.Size <= 0 {
			return d, badFlag("volume-default-size", "=%s is not a size; use one such as 1G", size)
		}
	}
	return d, nil
}

// service is an agent in this process with its shim and its control socket.
type service struct {
	agent  *agent.Agent
	host   *host.Host
	server *control.Server
	socket string
	listen net.Listener
	layout hooks.Layout

	metrics net.Listener                  // nil: no metrics are served
	page    net.Listener                  // nil: no status page is served
	volumes net.Listener                  // nil: container engines are not served
	others  []func(context.Context) error // further servers
}

// openService opens the agent, the host and the sockets. ctx applies only to the opening.
func openService(ctx context.Context, l hooks.Layout, e *agentFlags, log hclog.Logger) (*service, error) {
	st := &service{layout: l}
	if err := st.open(ctx, e, log); err != nil {
		return nil, errors.Join(err, st.close())
	}
	return st, nil
}

func (st *service) open(ctx context.Context, e *agentFlags, log hclog.Logger) error {
	override, err := e.driverOverride()
	if err != nil {
		return err
	}
	defaults, err := e.volumeDefaults()
	if err != nil {
		return err
	}
	shim, err := findShim(e.shim)
	if err != nil {
		return err
	}
	fence, err := fenceFunc(e.fence)
	if err != nil {
		return err
	}
	drivers, err := e.drivers()
	if err != nil {
		return err
	}
	if st.metrics, err = listenTCP("metrics", e.metrics, "127.0.0.1:9750"); err != nil {
		return err
	}
	if st.page, err = listenTCP("http", e.http, "127.0.0.1:9751"); err != nil {
		return err
	}
	if err := makeState(st.layout); err != nil {
		return err
	}
	state, run := st.layout.State, st.layout.Run
	st.agent, err = agent.New(agent.Config{
		StateDir: state, Name: e.node, Drivers: drivers,
		Override: override, Logger: log.Named("agent"), Recover: e.recover,
	})
	if err != nil {
		if pid, held := host.LockHolder(state); held && errors.Is(err, registry.ErrConflict) {
			err = fmt.Errorf("%w (process %s)", err, pid)
		}
		return err
	}
	if os.Geteuid() != 0 {
		log.Warn("not running as root: the exec driver and plugins that mount need root or a user namespace, " +
			"for example: unshare -Urm holdfast ...")
	}
	workload, err := st.agent.Workload(ctx)
	if err != nil {
		return err
	}
	st.host, err = host.Open(ctx, host.Config{
		StateDir: state, RunDir: run, Shim: shim, Node: st.agent.Node().Name, Workload: workload, Logger: log,
		Cluster: e.cluster, Fence: fence,
		TracerProvider: e.traces, File: readForJob, Bake: e.bake, SwapBudget: e.budget, MaxHold: e.hold,
	})
	if err != nil {
		return err
	}
	st.socket = control.Socket(run)
	if st.listen, err = control.Listen(st.socket, log.Named("control")); err != nil {
		return err
	}
	if err := st.openVolumePlugin(e, defaults, log.Named("volumes")); err != nil {
		return err
	}
	st.server = control.NewServer(st.agent, st.host, control.Self{StateDir: state, RunDir: run}, log.Named("control"))
	st.server.TracerProvider = e.traces
	st.openPage(st.openMetrics(log.Named("metrics")), log.Named("http"))
	return nil
}

// makeState makes the state directory, after it has checked the length of all paths.
func makeState(l hooks.Layout) error {
	if err := l.Check(); err != nil {
		return err
	}
	err := os.MkdirAll(l.State, 0o700)
	switch {
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("state directory: %w; run the command as root, or set --state-dir", err)
	case err != nil:
		return fmt.Errorf("state directory: %w; set --state-dir to a directory", err)
	}
	return nil
}

// openVolumePlugin listens for container engines, if the flags say so.
func (st *service) openVolumePlugin(e *agentFlags, defaults volumeplugin.Defaults, log hclog.Logger) (err error) {
	switch d := e.volumeDefault; {
	case e.volumePlugin == "" && (d.plugin != "" || d.size != ""):
		log.Warn("--volume-default-plugin and --volume-default-size have no effect without --volume-plugin")
	case d.plugin == "" && d.size != "":
		log.Warn("--volume-default-size has no effect without --volume-default-plugin")
	}
	if e.volumePlugin == "" {
		return nil
	}
	if st.volumes, err = control.Activated(e.volumePlugin, log); err != nil {
		return fmt.Errorf("--volume-plugin=%s: %w", e.volumePlugin, err)
	}
	server := volumeplugin.NewServer(st.agent, st.host, defaults, log)
	st.others = append(st.others, func(ctx context.Context) error { return server.Serve(ctx, st.volumes) })
	return nil
}

// openMetrics serves metrics on the control socket and, if the flags say so, on a TCP address.
func (st *service) openMetrics(log hclog.Logger) *metrics.Metrics {
	m := metrics.New(st.host, log)
	m.Failed = st.agent.FailedPlugins
	st.server.Metrics = m.Handler()
	st.others = append(st.others, m.Run)
	if st.metrics != nil {
		log.Info("serving metrics", "address", st.metrics.Addr().String())
		st.others = append(st.others, func(ctx context.Context) error { return m.Serve(ctx, st.metrics) })
	}
	return m
}

// openPage serves the status page, if the flags say so.
func (st *service) openPage(m *metrics.Metrics, log hclog.Logger) {
	if st.page == nil {
		return
	}
	log.Info("serving the status page", "address", "http://"+st.page.Addr().String())
	page := statuspage.New(statuspage.Sources{Overview: st.server.Overview, Usage: m.Usage, Status: st.host.Status,
		Watch: st.host.Watch}, log)
	st.others = append(st.others, func(ctx context.Context) error { return page.Serve(ctx, st.page) })
}

// listenTCP opens the address of a flag. It returns nil if the address is empty.
func listenTCP(flag, address, example string) (net.Listener, error) {
	if address == "" {
		return nil, nil
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("--%s=%s: %w; use a free address, as in %s", flag, address, err, example)
	}
	return l, nil
}

// readForJob reads a file for file() in a job. Users of the control socket may read all files that the agent can read.
func readForJob(ctx context.Context, path string) ([]byte, error) {
	text, err := secretfile.ReadAll(ctx, path)
	if errors.Is(err, fs.ErrNotExist) {
		err = registry.Errorf(registry.ErrNotFound, "%w", err)
	}
	return text, err
}

// serve runs the agent and its servers until ctx ends, and returns their errors.
func (st *service) serve(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	work := append([]func(context.Context) error{
		func(ctx context.Context) error { return st.agent.Run(ctx, st.host) },
		func(ctx context.Context) error { return st.server.Serve(ctx, st.listen) },
	}, st.others...)
	errs := make([]error, len(work))
	for i, do := range work {
		wg.Go(func() {
			defer cancel()
			errs[i] = do(ctx)
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// close closes the agent, the host and the sockets. Tasks and mounts stay.
func (st *service) close() error {
	var errs []error
	for _, l := range []net.Listener{st.listen, st.metrics, st.page, st.volumes} {
		if l == nil {
			continue
		}
		if err := l.Close(); !errors.Is(err, net.ErrClosed) { // a server has closed it
			errs = append(errs, err)
		}
	}
	if st.host != nil {
		errs = append(errs, st.host.Close())
	}
	if st.agent != nil {
		errs = append(errs, st.agent.Close())
	}
	return errors.Join(errs...)
}

// removeSelfMounts unmounts the self-binds that a shim has made at the mount root and the run directory, so that the
// state directory can be removed. It refuses if there are other mounts below the two. A mount of the operator at one of
// the two stays.
func removeSelfMounts(l hooks.Layout) error {
	own := []string{l.MountRoot(), l.Run}
	if inner := runDirs(l.State)[1]; inner != l.Run { // run directory of an earlier run
		own = append(own, inner)
	}
	table, err := mount.Table(0)
	if err != nil {
		return err
	}
	for _, m := range append(table.Below(l.State), table.Below(l.Run)...) {
		if m.Point != l.State && !slices.Contains(own, m.Point) {
			return registry.Errorf(registry.ErrConflict, "%s is still mounted", m.Point)
		}
	}
	for _, m := range table {
		if !slices.Contains(own, m.Point) || !table.SelfBind(m) {
			continue
		}
		if err := unix.Unmount(m.Point, unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("unmount %s: %w", m.Point, err)
		}
	}
	return nil
}
