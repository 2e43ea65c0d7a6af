package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/config"
	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/intent"
)

// parts is everything that allocs need of others, in memory. It keeps a journal of what it was asked, and an account of
// what is attached, staged, published and claimed, which it uses to notice what must not be.
type parts struct {
	t       *testing.T
	log     *registrytest.Log
	mu      sync.Mutex
	journal []string
	inside  map[registry.VolumeKey]int // calls under way
	fail    map[string]int             // by step, of all volumes or of one ("stage x-a"): how many times it fails
	gate    map[string]chan struct{}   // by step, of all volumes or of one ("stage x-a"): waits until closed
	plugin  chan struct{}              // closed: the plugin is there
}

func newParts(t *testing.T) *parts {
	p := &parts{
		t: t, log: registrytest.NewLog(time.Now), inside: map[registry.VolumeKey]int{}, fail: map[string]int{},
		gate:   map[string]chan struct{}{},
		plugin: make(chan struct{}),
	}
	close(p.plugin)
	return p
}

// step is one call for a volume: they come one at a time.
func (p *parts) step(ctx context.Context, v registry.VolumeKey, format string, args ...any) error {
	what := fmt.Sprintf(format, args...)
	p.mu.Lock()
	p.inside[v]++
	if p.inside[v] > 1 {
		p.t.Errorf("%s: %d things are under way for %s", what, p.inside[v], v)
	}
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		p.inside[v]--
		p.mu.Unlock()
	}()
	return p.act(ctx, what)
}

func (p *parts) act(ctx context.Context, what string) error {
	p.mu.Lock()
	gate := p.gate[about(p.gate, what)]
	p.mu.Unlock()
	if gate != nil {
		select {
		case <-gate:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if failing := about(p.fail, what); p.fail[failing] > 0 {
		p.fail[failing]--
		p.journal = append(p.journal, what+" failed")
		return registry.Errorf(registry.ErrUnavailable, "%s is refused", failing)
	}
	p.journal = append(p.journal, what)
	return nil
}

// about is which of the steps, of all volumes ("stage") or of one ("stage x-a"), is meant by what is done.
func about[T any](steps map[string]T, what string) string {
	for step := range steps {
		if strings.HasPrefix(what+" ", step+" ") {
			return step
		}
	}
	return ""
}

// holdUp has the step hang for one volume: "stage x-a".
func (p *parts) holdUp(step string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.gate[step] = make(chan struct{})
}

func (p *parts) said() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.journal)
}

func (p *parts) commit(records []registry.Record, keys ...registry.Key) error {
	_, err := registrytest.Write(context.Background(), p.log, registry.Change{Put: records, Delete: keys})
	return err
}

func (p *parts) Claim(_ context.Context, c registry.Claim) (registry.Claim, error) {
	p.mu.Lock()
	p.journal = append(p.journal, fmt.Sprintf("claim %s %s", c.Name, c.Alloc))
	p.mu.Unlock()
	return c, p.commit([]registry.Record{c})
}

func (p *parts) Unclaim(ctx context.Context, k registry.ClaimKey, _ bool) (bool, error) {
	if err := p.act(ctx, fmt.Sprintf("unclaim %s %s", k.Volume.External, k.Alloc)); err != nil {
		return false, err
	}
	return true, p.commit(nil, k.ClaimRecord())
}

func (p *parts) Attach(
	ctx context.Context, _ intent.Caller, v registry.Volume, _ registry.Usage, to intent.AttachTo,
) error {
	return p.step(ctx, v.VolumeKey(), "attach %s %s", v.External, to.ID)
}

func (p *parts) Detach(ctx context.Context, _ intent.Caller, v registry.VolumeKey, _ registry.NodeName) error {
	if err := p.step(ctx, v, "detach %s", v.External); err != nil {
		return err
	}
	return p.commit(nil, registry.AttachmentKey{Volume: v, Node: us.Node}.Key())
}

func (p *parts) Stage(ctx context.Context, _ intent.Caller, v registry.Volume, _ registry.Usage) error {
	return p.step(ctx, v.VolumeKey(), "stage %s", v.External)
}

func (p *parts) AwaitAttach(context.Context, registry.Volume, intent.AttachTo, func(string)) error {
	return nil
}
func (p *parts) AwaitDetach(context.Context, intent.Caller, registry.VolumeKey, registry.NodeName, func(string)) error {
	return nil
}

// Settle has the open call end.
func (p *parts) Settle(ctx context.Context, _ intent.Caller, open registry.Intent) error {
	if err := p.step(ctx, open.Volume, "settle %s", open.RPC); err != nil {
		return err
	}
	return p.commit(nil, open.Key())
}

func (p *parts) Publish(
	ctx context.Context, _ intent.Caller, v registry.Volume, k registry.ClaimKey, u registry.Usage,
) (hooks.Published, error) {
	if err := p.step(ctx, v.VolumeKey(), "publish %s %s", v.External, k.Alloc); err != nil {
		return hooks.Published{}, err
	}
	at := registry.Tree{Host: "/host/" + string(v.External), Task: "/task/" + string(v.External)}
	return hooks.Published{Target: at, Usage: u}, p.commit([]registry.Record{registry.Ref{Volume: v.VolumeKey(),
		Alloc: k.Alloc, Request: k.Request, Usage: u, Target: at, Publish: registry.MarkDone}})
}

func (p *parts) MountParts(ctx context.Context, k registry.ClaimKey, wanted []hooks.Part) (map[string]string, error) {
	at := map[string]string{}
	for _, w := range wanted {
		if err := p.step(ctx, k.Volume, "mount-part %s of %s, read-only %v", w.Path, k.Volume.External,
			w.ReadOnly); err != nil {
			return nil, err
		}
		at[w.Path] = "/part/" + w.Path
	}
	return at, nil
}

// Grow has nothing to do: no volume here is expanded.
func (p *parts) Grow(context.Context, intent.Caller, registry.VolumeKey, bool) (registry.NodeExpansion, error) {
	return registry.NodeExpansion{}, nil
}

// Down finds nothing up.
func (p *parts) Down(context.Context, registry.ClaimKey) error { return nil }

// LeaveExpansion stands for that of the controller and that of the node.
func (p *parts) LeaveExpansion(ctx context.Context, k registry.VolumeKey) (left bool, err error) {
	var open registry.Intent
	err = p.log.View(ctx, func(v registry.View) error { open, left = registry.OpenIntent(v, k); return nil })
	if err != nil || !left || !open.RPC.Expands() {
		return false, err
	}
	return true, p.commit(nil, open.Key())
}

func (p *parts) NodeExpanded(context.Context, registry.VolumeKey, registry.NodeExpansion) error {
	return nil
}

func (p *parts) Unpublish(ctx context.Context, _ intent.Caller, k registry.ClaimKey) error {
	if err := p.step(ctx, k.Volume, "unpublish %s %s", k.Volume.External, k.Alloc); err != nil {
		return err
	}
	return p.commit(nil, k.RefRecord())
}

func (p *parts) Unstage(ctx context.Context, _ intent.Caller, v registry.VolumeKey) error {
	if err := p.step(ctx, v, "unstage %s", v.External); err != nil {
		return err
	}
	return p.commit(nil, v.StagingRecord())
}

func (p *parts) Find(registry.Role, registry.PluginID) (registry.Instance, bool) {
	select {
	case <-p.plugin:
		return registry.Instance{Fingerprint: registry.Fingerprint{NodeID: "n1"},
			Health: registry.Health{State: registry.Healthy}}, true
	default:
		return registry.Instance{}, false
	}
}

func (p *parts) Await(ctx context.Context, role registry.Role, id registry.PluginID) (registry.Instance, error) {
	select {
	case <-p.plugin:
		return registry.Instance{Fingerprint: registry.Fingerprint{NodeID: "n1"}}, nil
	case <-ctx.Done():
		return registry.Instance{}, registry.Errorf(registry.ErrUnavailable, "plugin %s: %w", id, context.Cause(ctx))
	}
}

var us = Host{Node: "node-1", Operations: hooks.Operations}

// allocs is a running Allocs; end ends it, as a shim's end does.
func (p *parts) allocs() (a *Allocs, end func()) {
	a = NewAllocs(intent.Calls{
		Sender: intent.Sender{State: p.log, Now: time.Now}, Plugins: p, Locks: &intent.Locks{},
	}, p, p, us, hclog.NewNullLogger())
	return a, running(a.Run)
}

func running(run func(context.Context) error) (end func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = run(ctx) })
	return func() { cancel(errors.New("the shim ends")); wg.Wait() }
}

// volume registers a volume, ready to be used.
func (p *parts) volume(id string) {
	p.t.Helper()
	err := p.commit([]registry.Record{registry.Volume{
		VolumeSpec: registry.VolumeSpec{Namespace: "default", ID: registry.VolumeID(id), Plugin: "p",
			External: registry.ExternalID("x-" + id)},
		State: registry.VolumeReady,
	}})
	if err != nil {
		p.t.Fatal(err)
	}
}

// group is an alloc of a group whose task mounts the volumes.
func group(t *testing.T, alloc string, volumes ...string) hooks.AllocGroup {
	t.Helper()
	text := "job \"j\" {\n group \"g\" {\n"
	mounts := ""
	for _, v := range volumes {
		text += fmt.Sprintf("volume %q {\n type = \"csi\"\n source = %q\n access_mode = \"multi-node-multi-writer\"\n attachment_mode = \"file-system\"\n}\n", v, v)
		mounts += fmt.Sprintf("volume_mount {\n volume = %q\n destination = \"/%s\"\n}\n", v, v)
	}
	text += "task \"t\" {\n driver = \"exec\"\n" + mounts + "}\n}\n}\n"
	job, diags := config.ParseJob(config.Source{Name: "j.hcl", Text: []byte(text)}, config.Options{})
	if err := diags.Err(); err != nil {
		t.Fatal(err)
	}
	return hooks.AllocGroup{
		Alloc: registry.AllocID(alloc), Namespace: "default", Sealed: job.Groups[0].Sealed,
		Isolated: map[string]bool{"t": true},
	}
}

func expect(t *testing.T, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("got\n\t%s\nwant\n\t%s", strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
}
