package cluster

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"holdfast/config"
	"holdfast/registry"
)

// Node is this node as a member of its cluster.
type Node struct {
	State     *State
	Executors *Executors
	Remote    *Remote

	session   *session
	changes   broadcast // fires after changes of nodes, claims and attachments, of leases, and of mounts on this node
	plugins   Plugins
	client    *clientv3.Client
	version   string
	fence     func(context.Context, registry.NodeName) error // nil: lost nodes are not fenced
	log       hclog.Logger
	described broadcast // fires after changes of what describe writes
	expects   reports   // logs that this node expects another number of nodes than the cluster
}

// Options are the arguments of NewNode.
type Options struct {
	Cluster config.Cluster
	Node    registry.NodeName
	Version string         // of the shim
	Local   registry.State // the node's store
	Plugins Plugins
	// Serve carries out a call of another node.
	Serve func(ctx context.Context, method string, request []byte) (reply []byte, err error)
	// Fence returns once a lost node cannot write any more.
	Fence func(context.Context, registry.NodeName) error
	// Repeat repeats a call that this node began while it was the executor. It returns nil once an answer of the
	// instance shows that the call has ended there.
	Repeat func(context.Context, registry.Instance, registry.LateCall) error
	// Sending is called with each change directly before it is sent to etcd; nil: nothing is called. Tests end the
	// process there.
	Sending func(registry.Change)
	Now     func() time.Time
	Logger  hclog.Logger
}

// NewNode returns the node. It makes no request; Run does.
func NewNode(o Options) (*Node, error) {
	state, err := dial(o.Cluster, o.Local, o.Node)
	if err != nil {
		return nil, err
	}
	n := &Node{State: state, plugins: o.Plugins, client: state.client, version: o.Version,
		log: o.Logger}
	if o.Sending != nil {
		n.State.sending = o.Sending
	}
	n.session = newSession(n.State, o.Cluster.LeaseTTL.Truncate(time.Second)) // etcd counts whole seconds
	if o.Cluster.LostNodes == config.LostFence {
		n.fence = o.Fence
	}
	n.Executors = newExecutors(n.session, o.Plugins, o.Now, o.Logger)
	n.Executors.repeat = o.Repeat
	n.Remote = &Remote{state: n.State, executors: n.Executors, serve: o.Serve, log: o.Logger}
	return n, nil
}

// dial returns the state of a node, with its own etcd client. The node's certificate is read for each connection.
func dial(c config.Cluster, local registry.State, node registry.NodeName) (*State, error) {
	health := &etcdHealth{began: time.Now()}
	cfg := clientv3.Config{Endpoints: c.Endpoints, DialTimeout: tryTimeout, DialKeepAliveTime: c.LeaseTTL,
		DialKeepAliveTimeout: tryTimeout, Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{
			grpc.WithChainUnaryInterceptor(health.intercept), grpc.WithConnectParams(connecting),
		}}
	if c.CAFile != "" || c.CertFile != "" {
		secure, err := tlsOf(c)
		if err != nil {
			return nil, err
		}
		cfg.TLS = secure
		health.advice = func() string { return certificateProblem(c.CertFile, time.Now()) }
	}
	client, err := clientv3.New(cfg)
	if err != nil {
		return nil, registry.Errorf(registry.ErrUnavailable, "etcd client: %w", err)
	}
	s := New(local, client, c.ID, node)
	s.health, s.expect = health, c.Expect
	return s, nil
}

// connecting shortens how long a node stays suspect after the network between it and etcd works again. By default gRPC
// waits up to two minutes between two attempts to connect.
var connecting = grpc.ConnectParams{MinConnectTimeout: tryTimeout, Backoff: backoff.Config{
	BaseDelay: time.Second, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 3 * time.Second}}

// certificateProblem says if the certificate in a file is not valid at a time, because etcd does not tell its clients
// why it rejects them. The text is empty if the certificate is valid, or if there is none.
func certificateProblem(file string, now time.Time) string {
	text, _ := os.ReadFile(file)
	block, _ := pem.Decode(text)
	if block == nil {
		return ""
	}
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil || now.After(c.NotBefore) && now.Before(c.NotAfter) {
		return ""
	}
	return fmt.Sprintf("the certificate in cert_file %s is valid from %s to %s", file,
		c.NotBefore.UTC().Format(time.RFC3339), c.NotAfter.UTC().Format(time.RFC3339))
}

// tlsOf returns the TLS configuration of the cluster block. The client certificate is read again for each connection.
func tlsOf(c config.Cluster) (*tls.Config, error) {
	secure := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.CAFile != "" {
		text, err := os.ReadFile(c.CAFile)
		if err != nil {
			return nil, registry.Invalid("ca_file: %w", err)
		}
		if secure.RootCAs = x509.NewCertPool(); !secure.RootCAs.AppendCertsFromPEM(text) {
			return nil, registry.Invalid("ca_file %s holds no certificate", c.CAFile)
		}
	}
	if c.CertFile != "" {
		load := func() (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
			return &pair, err
		}
		if _, err := load(); err != nil {
			return nil, registry.Invalid("certificate of this node: %w", err)
		}
		secure.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return load() }
	}
	return secure, nil
}

// Run keeps the node in its cluster until ctx ends or one of the node's loops fails, and returns the cause.
func (n *Node) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var all sync.WaitGroup
	for name, run := range map[string]func(context.Context) error{
		"copy": n.State.Run, "lease": n.session.Run, "executors": n.Executors.Run, "remote calls": n.Remote.Run,
		"node": n.describe, "lost nodes": n.fenceLost,
	} {
		all.Go(func() {
			if err := run(ctx); ctx.Err() == nil {
				cancel(fmt.Errorf("%s: %w", name, err))
			}
		})
	}
	all.Go(func() { n.warnUnjoined(ctx) })
	all.Go(func() { n.warnOfVersions(ctx) })
	all.Wait()
	return context.Cause(ctx)
}

// warnUnjoined logs a warning if the node cannot join its cluster soon.
func (n *Node) warnUnjoined(ctx context.Context) {
	select {
	case <-n.State.ready:
	case <-ctx.Done():
	case <-time.After(tryTimeout):
		why := errors.New(n.State.silence())
		if known := n.State.notReady.Load(); known != nil {
			why = *known
		}
		n.log.Warn("this node has not joined its cluster; volumes cannot be claimed or changed until it has", "etcd",
			n.client.Endpoints(), "error", why)
	}
}

// Ready waits until this node's copy has everything that its earlier shims have written to etcd. An earlier shim may
// have died before its copy had its last commits.
func (n *Node) Ready(ctx context.Context) error { return n.State.awaitReady(ctx) }

// Close ends the connection to etcd.
func (n *Node) Close() error { return n.client.Close() }

// Applied wakes the loops that depend on the changed records.
func (n *Node) Applied(a registry.Applied) {
	n.Executors.Applied(a)
	if a.Change.Touches(registry.BucketNodes, registry.BucketNodeLeases, registry.BucketExecutors,
		registry.BucketClaims, registry.BucketAttachments, registry.BucketRefs, registry.BucketStagings) {
		n.changes.fire()
	}
	if a.Change.Touches(registry.BucketInstances, registry.BucketNodes) {
		n.described.fire()
	}
}

// describe keeps the plugins in the node's record up to date. It ends with an ErrInvalid if the node must not join.
func (n *Node) describe(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	const failing = "cannot describe this node to the cluster"
	return n.session.runSteps(ctx, &n.described, n.log, failing, func(ctx context.Context) error {
		err := n.describeNow(ctx)
		if errors.Is(err, registry.ErrInvalid) { // trying again does not help
			cancel(err)
		}
		return err
	})
}

// describeNow updates the record of this node. If this node is the last one that the cluster expects, it also records
// that the cluster has formed. A new node that expects another number of nodes is not recorded. A forgotten node joins
// again as out of service.
func (n *Node) describeNow(ctx context.Context) error {
	if err := n.State.awaitReady(ctx); err != nil {
		return err
	}
	plugins := PluginsOf(n.plugins.All().Instances)
	var expectErr error // set if the cluster expects another number of nodes
	_, err := registry.Ensure(ctx, n.State, func(v registry.View) (change registry.Change, err error) {
		record, found := v.Node(n.State.node)
		expectErr = v.Formation().Check(n.State.expect)
		isForgotten := record.State == registry.NodeForgotten
		joins := !found || isForgotten
		switch {
		case joins && expectErr != nil:
			return change, expectErr
		case isForgotten:
			record.State = registry.NodeOutOfService
		case !found:
			record = registry.Node{Name: n.State.node, State: registry.NodeReady, Since: n.Executors.now()}
		}
		if joins || record.Version != n.version || !slices.EqualFunc(record.Plugins, plugins, samePlugin) {
			record.Version, record.Plugins = n.version, plugins
			change.Put = append(change.Put, record)
		}
		n.form(v, &change)
		return change, nil
	})
	if err == nil {
		n.expects.log(n.log, "this node stays in its cluster, but is configured otherwise", expectErr)
	}
	return err
}

// form adds the formation to the change if there is no record of it yet, or if this node is the last one expected. The
// first node decides how many nodes the cluster expects.
func (n *Node) form(v registry.View, change *registry.Change) {
	f := v.Formation()
	if f.Formed {
		return
	}
	names := []string{string(n.State.node)}
	for _, node := range v.Nodes() {
		if node.Name != n.State.node {
			names = append(names, string(node.Name))
		}
	}
	expect := cmp.Or(f.Expect, n.State.expect)
	formed := len(names) >= expect
	if f.Expect != 0 && !formed {
		return
	}
	f.Cluster, f.Expect, f.Formed = n.State.id, expect, formed
	if formed {
		f.Since = n.Executors.now()
		slices.Sort(names)
		change.Events = append(change.Events, registry.Event{Kind: registry.EventFormed, At: f.Since,
			Detail: fmt.Sprintf("cluster %s by nodes %s", f.Cluster, strings.Join(names, ", "))})
	}
	change.Put = append(change.Put, f)
}

// samePlugin reports whether two descriptions are equal. An empty list or map equals nil.
func samePlugin(a, b registry.NodePlugin) bool {
	sameLists := slices.Equal(a.Capabilities, b.Capabilities) && maps.Equal(a.Topology, b.Topology)
	a.Capabilities, a.Topology, b.Capabilities, b.Topology = nil, nil, nil, nil
	return sameLists && reflect.DeepEqual(a, b)
}

// PluginsOf describes the plugins of this node, sorted by name.
func PluginsOf(instances []registry.Instance) (list []registry.NodePlugin) {
	positions := map[registry.PluginID]int{} // in list
	for _, i := range instances {
		at, found := positions[i.Plugin]
		if !found {
			at = len(list)
			positions[i.Plugin] = at
			list = append(list, registry.NodePlugin{Plugin: i.Plugin})
		}
		p := &list[at]
		healthy := i.Health.State == registry.Healthy
		p.Local = p.Local || i.Local()
		switch {
		case i.Role == registry.RoleController:
			p.Controller = p.Controller || healthy
			p.ControllerUnhealthy = !p.Controller
		case healthy || !p.Node: // an unhealthy instance does not replace a healthy one
			p.Node, p.NodeUnhealthy = healthy, !healthy
			p.NodeID, p.Topology = i.Fingerprint.NodeID, i.Fingerprint.Topology
			p.MaxVolumes, p.Capabilities = i.Fingerprint.MaxVolumes, i.Fingerprint.Capabilities
		}
	}
	slices.SortFunc(list, func(a, b registry.NodePlugin) int { return cmp.Compare(a.Plugin, b.Plugin) })
	return list
}
