package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/moby/sys/mountinfo"
	"google.golang.org/protobuf/proto"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
)

// Access modes that tests often ask for.
const (
	oneWriter   = "single-node-writer"
	manyWriters = "multi-node-multi-writer"
)

// Calls that went well, as world.mustHaveSent has them.
const (
	attachOK    = "ControllerPublishVolume OK"
	stageOK     = "NodeStageVolume OK"
	publishOK   = "NodePublishVolume OK"
	unpublishOK = "NodeUnpublishVolume OK"
	unstageOK   = "NodeUnstageVolume OK"
	detachOK    = "ControllerUnpublishVolume OK"
)

// ask is a volume block of a group.
type ask struct {
	name   string // of the request; empty: data
	source string // empty: more says what volume it is
	mode   string // empty: oneWriter
	block  bool   // a block device, not a file system
	more   string // further lines
}

func (a ask) text() string {
	var b strings.Builder
	line := func(name, value string) { fmt.Fprintf(&b, " %s = %q\n", name, value) }
	fmt.Fprintf(&b, "volume %q {\n", a.request())
	line("type", "csi")
	line("access_mode", orElse(a.mode, oneWriter))
	line("attachment_mode", map[bool]string{false: "file-system", true: "block-device"}[a.block])
	if a.source != "" {
		line("source", a.source)
	}
	return b.String() + a.more + "\n}\n"
}

func (a ask) request() string { return orElse(a.name, "data") }

func orElse(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

// flags is a mount_options block with nothing but mount flags.
func flags(list ...string) string { return options("", "", list...) }

// options is a mount_options block.
func options(fs, group string, flags ...string) string {
	lines := "mount_options {\n"
	if fs != "" {
		lines += fmt.Sprintf(" fs_type = %q\n", fs)
	}
	if group != "" {
		lines += fmt.Sprintf(" mount_group = %q\n", group)
	}
	if len(flags) > 0 {
		lines += fmt.Sprintf(" mount_flags = [\"%s\"]\n", strings.Join(flags, `", "`))
	}
	return lines + "}"
}

// asking is an alloc of a group that asks for volumes, parsed anew: no two allocs share any memory.
func (w *world) asking(alloc string, asks ...ask) host.AllocGroup {
	w.t.Helper()
	var blocks, mounts strings.Builder
	for _, a := range asks {
		blocks.WriteString(a.text())
		fmt.Fprintf(&mounts, "volume_mount {\n volume = %q\n destination = \"/%s\"\n}\n", a.request(), a.request())
	}
	text := fmt.Sprintf("job \"user\" {\n group \"g\" {\n%s task \"t\" {\n driver = \"raw_exec\"\n%s}\n}\n}\n", &blocks, &mounts)
	job, _, err := w.host.Parse(w.ctx(), host.Source{Name: "user.hcl", Text: []byte(text)}, host.ParseOptions{})
	if err != nil {
		w.t.Fatalf("parse: %v\n%s", err, text)
	}
	return host.AllocGroup{Alloc: host.AllocID(alloc), Job: "user", Group: "g", Namespace: "default", Sealed: job.Groups[0].Sealed}
}

// prepared gives the paths of the alloc's volumes on the host, by their requests in capital letters.
func (w *world) prepared(ctx context.Context, g host.AllocGroup) (map[string]string, error) {
	plans, err := w.host.PrepareAlloc(ctx, g)
	if err != nil {
		return nil, err
	}
	at := map[string]string{}
	for _, e := range plans["t"].Env {
		if name, found := strings.CutPrefix(e.Name, "HOLDFAST_VOLUME_"); found {
			at[name] = e.Value
		}
	}
	return at, nil
}

// use has an alloc that asks for one volume prepared, and gives its path.
func (w *world) use(alloc string, a ask) string {
	w.t.Helper()
	at, err := w.prepared(w.ctx(), w.asking(alloc, a))
	w.must(err)
	return at[strings.ToUpper(a.request())]
}

// inVain makes a call for an alloc, gives up once the alloc's status says so, and returns what the caller is told.
func (w *world) inVain(alloc, says string, call func(context.Context) error) error {
	w.t.Helper()
	ctx, leave := context.WithCancel(w.ctx())
	defer leave()
	done := goes(func() error { return call(ctx) })
	w.eventually(alloc+" says: "+says, func() bool { return strings.Contains(w.waits(alloc), says) })
	leave()
	return w.ends("a call that nobody waits for any more", done)
}

// releasedInVain has an alloc released by somebody who gives up once its status says so.
func (w *world) releasedInVain(alloc, says string) error {
	w.t.Helper()
	return w.inVain(alloc, says, func(ctx context.Context) error { return w.host.ReleaseAlloc(ctx, host.AllocID(alloc)) })
}

// goes starts what takes long.
func goes(f func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	return done
}

// arrives waits until a call stands at the gate; done is of who has it sent.
func (w *world) arrives(g *csifake.Gate, done <-chan error) {
	w.t.Helper()
	select {
	case <-g.Arrived():
	case err := <-done:
		w.t.Fatalf("what was to be held was never called: %v", err)
	case <-time.After(patience):
		w.t.Fatal("what was to be held was never called")
	}
}

// ends is what done says, soon.
func (w *world) ends(what string, done <-chan error) error {
	w.t.Helper()
	select {
	case err := <-done:
		return err
	case <-time.After(patience):
		w.t.Fatalf("%s does not end", what)
		return nil
	}
}

// eventually returns once it is so.
func (w *world) eventually(what string, so func() bool) {
	w.t.Helper()
	w.must(until(w.ctx(), what, so))
}

// reopened is a new host on the state of the last one. It names the plugins' tasks, and the allocs that go on.
func (w *world) reopened(plugins []*pluginTask, allocs ...host.AllocGroup) {
	w.t.Helper()
	w.must(w.host.Close())
	w.config.Workload = host.Workload{Allocs: allocs}
	for _, p := range plugins {
		w.config.Workload.Tasks = append(w.config.Workload.Tasks, host.WorkloadTask{AllocTask: p.task, Running: true, Started: w.bootTime()})
	}
	w.open()
}

// replaced kills the plugin and starts its task again.
func (w *world) replaced(p *pluginTask, role csifake.Role) *pluginTask {
	w.t.Helper()
	w.died(p)
	next := w.startPlugin(string(p.task.Alloc), role, p.task.Attempt+1)
	w.eventually("the plugin serves again", func() bool {
		list, _, err := w.host.Plugins(w.ctx(), host.PluginQuery{})
		return err == nil && len(list.Instances) > 0 && !slices.ContainsFunc(list.Instances, func(i host.Instance) bool {
			return i.Alloc == p.task.Alloc && (i.Attempt != next.task.Attempt || i.Health.State != host.Healthy)
		})
	})
	return next
}

// died kills the plugin and says so.
func (w *world) died(p *pluginTask) {
	w.t.Helper()
	p.Kill()
	w.must(w.host.TaskExited(w.ctx(), p.task.Key(), p.task.Attempt, 0, 9, false))
}

// sent is the calls that change something, in the order in which plugins got them; only some RPCs, if any are named.
func (w *world) sent(only ...string) []journal.Call {
	w.t.Helper()
	all, err := csifake.Calls(w.journal, only...)
	w.must(err)
	return slices.DeleteFunc(all, func(c journal.Call) bool { return !journal.Mutates(c.RPC) })
}

// told is the calls in words: what was called, and how it was answered.
func told(calls []journal.Call) (list []string) {
	for _, c := range calls {
		answer := "no answer"
		if c.End != nil {
			answer = c.End.Code
		}
		list = append(list, c.RPC+" "+answer)
	}
	return list
}

// mustHaveSent compares the calls since the first n.
func (w *world) mustHaveSent(n int, want ...string) {
	w.t.Helper()
	if got := told(w.sent()[n:]); !slices.Equal(got, want) {
		w.t.Errorf("the plugin got %q, not %q", got, want)
	}
}

// oneRequest fails the test unless the calls were there, at least so many, and were one request each time.
func (w *world) oneRequest(rpc string, least int) []journal.Call {
	w.t.Helper()
	calls := w.sent(rpc)
	if len(calls) < least {
		w.t.Fatalf("%s was sent %d times, not %d at least", rpc, len(calls), least)
	}
	for _, c := range calls[1:] {
		if c.Hash != calls[0].Hash {
			w.t.Errorf("%s was sent with other fields: %+v after %+v", rpc, c.Line, calls[0].Line)
		}
	}
	return calls
}

// mounted is what the kernel has mounted at the path, the last one.
func (w *world) mounted(path string) (*mountinfo.Info, bool) {
	w.t.Helper()
	found, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(path))
	w.must(err)
	if len(found) == 0 {
		return nil, false
	}
	return found[len(found)-1], true
}

// claims is the claims that are held, by alloc.
func (w *world) claims() map[string]host.Claim {
	w.t.Helper()
	list, _, err := w.host.Claims(w.ctx())
	w.must(err)
	held := map[string]host.Claim{}
	for _, c := range list {
		held[string(c.Alloc)] = c
	}
	return held
}

// waits is what the alloc waits for, in words.
func (w *world) waits(alloc string) string {
	w.t.Helper()
	list, _, err := w.host.Allocs(w.ctx(), host.AllocID(alloc))
	w.must(err)
	var words []string
	for _, a := range list {
		for _, one := range a.Waiting {
			words = append(words, one.String())
		}
	}
	return strings.Join(words, "; ")
}

// forgotten waits until nothing is known of the alloc any more: what it had is taken back.
func (w *world) forgotten(alloc string) {
	w.t.Helper()
	w.eventually(alloc+" is taken down", func() bool {
		list, _, err := w.host.Allocs(w.ctx(), host.AllocID(alloc))
		return err == nil && len(list) == 0
	})
	if c, held := w.claims()[alloc]; held {
		w.t.Errorf("%s is forgotten and holds %s", alloc, c.Name)
	}
}

// conflicts fails the test unless the error is a conflict that says all the words.
func (w *world) conflicts(err error, words ...string) {
	w.t.Helper()
	if !errors.Is(err, host.ErrConflict) {
		w.t.Errorf("it should conflict: %v", err)
		return
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			w.t.Errorf("the conflict does not say %q: %v", word, err)
		}
	}
}

// write writes a file of a volume.
func (w *world) write(path, name, text string) {
	w.t.Helper()
	w.must(os.WriteFile(filepath.Join(path, name), []byte(text), 0o600))
}

// reads fails the test unless the file of a volume is so.
func (w *world) reads(path, name, text string) {
	w.t.Helper()
	if got, err := os.ReadFile(filepath.Join(path, name)); err != nil || string(got) != text {
		w.t.Errorf("%s of %s is %q, %v; it should be %q", name, path, got, err, text)
	}
}

// ear keeps the requests of some calls, word for word, and by when they have to be answered.
type ear struct {
	mu    sync.Mutex // guards heard
	heard map[string][]heard
}

type heard struct {
	request proto.Message
	left    time.Duration // until the call's deadline; 0: it has none
}

// listen hears the calls of the RPCs that no other rule acts on.
func listen(p *pluginTask, rpcs ...string) *ear {
	e := &ear{heard: map[string][]heard{}}
	for _, rpc := range rpcs {
		p.On(rpc).Answer(func(ctx context.Context, req, reply proto.Message, err error) (proto.Message, error) {
			h := heard{request: proto.Clone(req)}
			if end, has := ctx.Deadline(); has {
				h.left = time.Until(end)
			}
			e.mu.Lock()
			defer e.mu.Unlock()
			e.heard[rpc] = append(e.heard[rpc], h)
			return reply, err
		})
	}
	return e
}

func (e *ear) of(rpc string) []heard {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.heard[rpc])
}
