package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
)

// crowd is the users of one volume, who come and go while everything around them is started anew.
type crowd struct {
	*world
	plugin *pluginTask
	users  []host.AllocGroup
	at     map[host.AllocID]string
}

// joins has one more alloc use the volume, and leave a file of its own.
func (c *crowd) joins(id string) {
	c.t.Helper()
	g := c.asking(id, ask{source: "vol", mode: manyWriters, more: flags("noatime")})
	at, err := c.prepared(c.ctx(), g)
	c.must(err)
	c.users, c.at[g.Alloc] = append(c.users, g), at["DATA"]
	c.write(at["DATA"], id, id)
}

// leaves has an alloc give its volume back. Whoever stays has everybody's files.
func (c *crowd) leaves(id string) {
	c.t.Helper()
	c.must(c.release(id))
	c.users = slices.DeleteFunc(c.users, func(g host.AllocGroup) bool { return g.Alloc == host.AllocID(id) })
	if _, mounted := c.mounted(c.at[host.AllocID(id)]); mounted {
		c.t.Errorf("%s has left, and its mount is there", id)
	}
	for _, g := range c.users {
		c.reads(c.at[g.Alloc], id, id)
	}
}

// Users of one volume come and go while shim, host and plugin are killed and started anew: it is staged for the first and unstaged after
// the last, and each has its own mount as long as it is there.
func TestUseIsCountedOverEveryRestart(t *testing.T) {
	t.Parallel()
	c := &crowd{world: newWorld(t, everything...), at: map[host.AllocID]string{}}
	c.plugin = c.world.plugin("alloc-p", csifake.Monolith)
	c.must(c.create("vol"))
	c.joins("user-1")
	c.killShim()
	c.joins("user-2")
	c.reopened([]*pluginTask{c.plugin}, c.users...)
	c.joins("user-3")
	c.plugin = c.replaced(c.plugin, csifake.Monolith)
	c.leaves("user-1")
	c.killShim()
	c.joins("user-4")
	next := c.world.plugin("alloc-q", csifake.Monolith)
	c.exit(c.plugin)
	c.plugin = next
	c.leaves("user-2")
	c.died(c.plugin)
	c.reopened(nil, c.users...)
	c.plugin = c.world.plugin("alloc-r", csifake.Monolith)
	c.leaves("user-4")
	if n := len(c.sent("NodeUnstageVolume", "ControllerUnpublishVolume")); n > 0 {
		t.Errorf("%d times taken down under a user", n)
	}
	c.killShim()
	c.leaves("user-3")
	for rpc, users := range map[string]int{
		"ControllerPublishVolume": 1, "NodeStageVolume": 1, "NodePublishVolume": 4,
		"NodeUnpublishVolume": 4, "NodeUnstageVolume": 1, "ControllerUnpublishVolume": 1,
	} {
		c.oneSuccessEach(rpc, users)
	}
	c.must(c.delete("vol"))
	c.exit(c.plugin)
}

// oneSuccessEach fails the test unless the plugin got n different requests of the RPC, each of which succeeded. A request
// may be repeated only by a later shim, which cannot know the answer to an earlier one, or after a call that did not succeed.
func (w *world) oneSuccessEach(rpc string, n int) {
	w.t.Helper()
	last := map[string]journal.Call{} // by request
	calls := w.sent(rpc)
	for _, c := range calls {
		if was, repeated := last[c.Hash]; repeated && was.Peer == c.Peer && was.End != nil && was.End.Code == "OK" {
			w.t.Errorf("%s was sent again by process %d, which had got its answer: %+v", rpc, c.Peer, c.Line)
		}
		last[c.Hash] = c
	}
	for _, c := range last {
		if c.End == nil || c.End.Code != "OK" {
			w.t.Errorf("%s did not succeed: %+v", rpc, c)
		}
	}
	if len(last) != n {
		w.t.Errorf("%s: %d different requests, not %d; the calls are %q", rpc, len(last), n, told(calls))
	}
}

// A usage that is another one by its value is refused, with the name of who holds the volume, before anything is sent. One that is equal is
// not, whichever way it was written.
func TestUseConflictNamesTheHolderAndSendsNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, append([]string{"VOLUME_MOUNT_GROUP"}, everything...)...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.createWith(w.ctx(), "vol", "capability {\n access_mode = \"multi-node-multi-writer\"\n attachment_mode = \"block-device\"\n}\n"))
	w.use("holder", ask{source: "vol", mode: manyWriters, more: options("ext4", "1000", "noatime", "sync")})
	before := len(w.sent())
	for name, a := range map[string]ask{
		"flags in another order": {mode: manyWriters, more: options("ext4", "1000", "sync", "noatime")},
		"no flags":               {mode: manyWriters, more: options("ext4", "1000")},
		"another file system":    {mode: manyWriters, more: options("xfs", "1000", "noatime", "sync")},
		"another group":          {mode: manyWriters, more: options("ext4", "1001", "noatime", "sync")},
		"no group":               {mode: manyWriters, more: options("ext4", "", "noatime", "sync")},
		"another access mode":    {mode: oneWriter, more: options("ext4", "1000", "noatime", "sync")},
		"a block device":         {mode: manyWriters, block: true},
	} {
		a.source = "vol"
		_, err := w.prepared(w.ctx(), w.asking("other", a))
		if !errors.Is(err, host.ErrConflict) || !strings.Contains(err.Error(), "alloc holder") {
			t.Errorf("%s: %v", name, err)
		}
		w.must(w.release("other"))
	}
	w.mustHaveSent(before)
	w.use("equal", ask{source: "vol", mode: manyWriters, more: options("ext${2 + 2}", "1000", `no${"atime"}`, "sync")})
	w.mustHaveSent(before, publishOK)
	w.must(w.release("holder"))
	w.must(w.release("equal"))
	w.must(w.delete("vol"))
	w.exit(p)
}

// A reader and a writer share a volume: one stage, two publishes, and the kernel holds the reader to what it asked for. One alloc may have
// both.
func TestUseReadOnlyBesideReadWrite(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	writes := ask{name: "w", source: "vol", mode: manyWriters}
	reads := ask{name: "r", source: "vol", mode: manyWriters, more: "read_only = true"}
	both, err := w.prepared(w.ctx(), w.asking("alloc-both", writes, reads))
	w.must(err)
	for path, readOnly := range map[string]bool{
		w.use("alloc-w", writes): false, w.use("alloc-r", reads): true, both["W"]: false, both["R"]: true,
	} {
		at, mounted := w.mounted(path)
		if !mounted || slices.Contains(strings.Split(at.Options, ","), "ro") != readOnly {
			t.Errorf("%s is mounted %+v; it should be read-only: %t", path, at, readOnly)
		}
		err := os.WriteFile(filepath.Join(path, "f"), []byte("x"), 0o600)
		if readOnly && !errors.Is(err, unix.EROFS) || !readOnly && err != nil {
			t.Errorf("writing to %s: %v", path, err)
		}
	}
	w.reads(both["R"], "f", "x")
	stages, publishes := w.sent("NodeStageVolume"), w.sent("NodePublishVolume")
	if len(stages) != 1 || len(publishes) != 4 {
		t.Fatalf("the plugin got %q", told(w.sent()))
	}
	readers := 0
	for _, c := range publishes {
		if c.ReadOnly {
			readers++
		}
		if c.Usage != stages[0].Usage || c.Staging != stages[0].Staging {
			t.Errorf("published as %s of %s, and staged as %s at %s", c.Usage, c.Staging, stages[0].Usage, stages[0].Staging)
		}
	}
	if readers != 2 {
		t.Errorf("%d publishes are read-only, not 2", readers)
	}
	for _, id := range []string{"alloc-both", "alloc-r", "alloc-w"} {
		w.must(w.release(id))
	}
	w.must(w.delete("vol"))
	w.exit(p)
}

// Each alloc of a group has the volume of its index.
func TestUsePerAlloc(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	paths := make([]string, 3)
	for i := range paths {
		w.must(w.create(fmt.Sprintf("shard[%d]", i)))
		g := w.asking(fmt.Sprintf("alloc-%d", i), ask{source: "shard", more: "per_alloc = true"})
		g.Index = uint64(i)
		at, err := w.prepared(w.ctx(), g)
		w.must(err)
		paths[i] = at["DATA"]
		w.write(paths[i], "index", fmt.Sprint(i))
	}
	for i, path := range paths {
		w.reads(path, "index", fmt.Sprint(i))
		id := fmt.Sprintf("alloc-%d", i)
		if c := w.claims()[id]; string(c.Name.ID) != fmt.Sprintf("shard[%d]", i) {
			t.Errorf("%s holds %s", id, c.Name)
		}
		w.must(w.release(id))
		w.must(w.delete(fmt.Sprintf("shard[%d]", i)))
	}
	if n := len(w.sent("NodeStageVolume")); n != 3 {
		t.Errorf("staged %d times", n)
	}
	w.exit(p)
}

// An inline volume is nobody else's: it is made by its publish and gone with its unpublish, over restarts, and is neither attached nor
// staged.
func TestUseOfAnInlineVolume(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	inline := ask{name: "scratch", more: "ephemeral {\n plugin_id = \"fake\"\n context = { size = \"1MiB\" }\n}"}
	calls := listen(p, "NodePublishVolume")
	first, second := w.use("alloc-1", inline), w.use("alloc-2", inline)
	w.write(first, "f", "x")
	if _, err := os.Stat(filepath.Join(second, "f")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("two allocs share an inline volume: %v", err)
	}
	for _, c := range calls.of("NodePublishVolume") {
		r := c.request.(*csi.NodePublishVolumeRequest)
		context := r.GetVolumeContext()
		if r.GetStagingTargetPath() != "" || context["size"] != "1MiB" || context["csi.storage.k8s.io/ephemeral"] != "true" {
			t.Errorf("the plugin got %v", r)
		}
	}
	w.killShim()
	w.must(w.release("alloc-1"))
	w.write(second, "g", "x")
	w.reopened([]*pluginTask{p}) // does not name alloc-2
	w.forgotten("alloc-2")
	w.mustHaveSent(0, publishOK, publishOK, unpublishOK, unpublishOK)
	if left := w.states(); len(left) > 0 {
		t.Errorf("volumes: %v", left)
	}
	w.exit(p)
}

// What stands in a volume's file and in a job's block about mounting reaches the plugin with each stage and each publish alike, also when a
// later shim repeats them; a device has none of it.
func TestUseMountOptionsReachStageAndPublishAlike(t *testing.T) {
	t.Parallel()
	w := newWorld(t, append([]string{"VOLUME_MOUNT_GROUP"}, everything...)...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.createWith(w.ctx(), "vol", options("ext4", "", "noatime")))
	a := ask{source: "vol", mode: manyWriters, more: options("", "1000", "nodev", "noexec", "x-p=a,b")}
	gate := p.On("NodePublishVolume").Times(1).Hold()
	g := w.asking("alloc-1", a)
	prepared := goes(func() error { return second(w.prepared(w.ctx(), g)) })
	w.arrives(gate, prepared)
	calls := listen(p, "ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume")
	w.killShim() // the next one publishes again
	gate.Open()
	w.must(w.ends("prepare", prepared))
	w.use("alloc-2", a)
	w.must(w.release("alloc-1"))
	w.must(w.release("alloc-2"))
	w.use("alloc-3", a)
	w.must(w.release("alloc-3"))

	mount := &csi.VolumeCapability_MountVolume{FsType: "ext4", MountFlags: []string{"nodev", "noexec", "x-p=a,b"}, VolumeMountGroup: "1000"}
	want := &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: mount},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER},
	}
	seen := map[string]int{}
	for _, rpc := range []string{"ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume"} {
		for _, c := range calls.of(rpc) {
			seen[rpc]++
			if got := c.request.(interface{ GetVolumeCapability() *csi.VolumeCapability }).GetVolumeCapability(); !proto.Equal(got, want) {
				t.Errorf("%s asks for %v, not %v", rpc, got, want)
			}
		}
	}
	if seen["ControllerPublishVolume"] < 1 || seen["NodeStageVolume"] < 1 || seen["NodePublishVolume"] < 3 {
		t.Errorf("not all calls were heard: %v", seen)
	}
	w.must(w.delete("vol"))
	w.exit(p)
}

// Whoever has a file of a volume open goes on with it while its plugin is killed, away, and started again or replaced.
func TestUseGoesOnWithoutThePlugin(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	user := w.asking("alloc-1", ask{source: "vol"})
	at, err := w.prepared(w.ctx(), user)
	w.must(err)
	path := at["DATA"]
	file, err := os.Create(filepath.Join(path, "log"))
	w.must(err)
	defer file.Close()
	was, _ := w.mounted(path)
	before := len(w.sent())
	lines := ""
	step := func(what string) {
		t.Helper()
		lines += what + "\n"
		if _, err := file.WriteString(what + "\n"); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if now, mounted := w.mounted(path); !mounted || now.ID != was.ID {
			t.Errorf("%s: the mount is another one: %+v", what, now)
		}
	}
	step("it serves")
	w.died(p)
	step("it is dead")
	w.killShim()
	_, err = w.host.Status(w.ctx())
	w.must(err)
	step("it is dead, and the shim is a new one")
	w.reopened(nil, user)
	step("it is dead, and so was the host")
	list, _, err := w.host.Allocs(w.ctx(), "alloc-1")
	w.must(err)
	if len(list) != 1 || list[0].State != "ready" || len(list[0].Waiting) > 0 {
		t.Errorf("the alloc is %+v", list)
	}
	p = w.plugin("alloc-p2", csifake.Monolith)
	step("it is there again")
	next := w.plugin("alloc-q", csifake.Monolith)
	w.exit(p)
	step("another one is there")
	w.mustHaveSent(before)
	w.must(file.Close())
	w.reads(path, "log", lines)
	w.must(w.release("alloc-1"))
	w.must(w.delete("vol"))
	w.exit(next)
}

// A plugin that hangs, in whatever it is asked, holds up its own volumes and nobody else's: the whole life of another plugin's volume
// passes while one call stands still.
func TestUseIsNotHeldUpByAnotherPlugin(t *testing.T) {
	for _, rpc := range everyCall {
		t.Run(rpc, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, everything...)
			sick := w.plugin("alloc-sick", csifake.Monolith)
			well := w.otherPlugin("well", "alloc-well")
			gate := sick.On(rpc).Times(1).Hold()
			g := w.asking("alloc-1", ask{source: "vol"})
			slow := goes(func() error { return w.life(w.ctx(), "vol", g) })
			w.arrives(gate, slow)
			quick := w.otherLife(well, "other")
			for _, c := range quick {
				if c.End == nil || c.End.Code != "OK" {
					t.Errorf("%s at the other plugin: %+v", c.RPC, c.End)
				}
			}
			if n := len(quick); n != len(everyCall) {
				t.Errorf("the other plugin got %d calls: %q", n, told(quick))
			}
			held := w.sent(rpc)
			if i := slices.IndexFunc(held, func(c journal.Call) bool { return c.Instance == "alloc-sick" }); i < 0 || held[i].End != nil {
				t.Errorf("%s does not stand still any more: %q", rpc, told(held))
			}
			gate.Open()
			w.must(w.ends("the life of the other volume", slow))
			w.exit(well)
			w.exit(sick)
		})
	}
}

// otherPlugin starts the task of another plugin, with a storage system of its own.
func (w *world) otherPlugin(id, alloc string) *pluginTask {
	w.t.Helper()
	text := fmt.Sprintf("task \"plugin\" {\n driver = \"raw_exec\"\n csi_plugin {\n id = %q\n type = \"monolith\"\n }\n}\n", id)
	job, _, err := w.host.Parse(w.ctx(), host.Source{Name: "plugin.hcl", Text: []byte(text)}, host.ParseOptions{})
	w.must(err)
	task := host.AllocTask{Alloc: host.AllocID(alloc), Task: "plugin", Attempt: 1, Sealed: job.Groups[0].Tasks[0].Sealed}
	plan, err := w.host.TaskStarting(w.ctx(), task)
	w.must(err)
	p := csifake.Start(w.t, csifake.Config{
		Name: id + ".example.org", Caps: w.caps, Socket: csifake.SocketPath(env(plan, "CSI_ENDPOINT")), Journal: w.journal,
		Mounts: true, DataDir: filepath.Join(w.dir, "data-"+id), Instance: alloc,
	})
	w.must(w.host.TaskStarted(w.ctx(), task.Key(), 1))
	w.registered(alloc)
	return &pluginTask{p, task}
}

// otherLife is the whole life of a volume of another plugin, and gives the calls that it took.
func (w *world) otherLife(p *pluginTask, id string) []journal.Call {
	w.t.Helper()
	text := fmt.Sprintf("id = %q\nplugin_id = \"well\"\ncapability {\n access_mode = %q\n attachment_mode = \"file-system\"\n}\n", id, oneWriter)
	spec, _, err := w.host.ParseVolume(w.ctx(), host.Source{Name: "v.hcl", Text: []byte(text)}, host.ParseOptions{})
	w.must(err)
	w.must(second(w.host.CreateVolume(w.ctx(), spec)))
	w.write(w.use("user-"+id, ask{source: id}), "f", "x")
	w.must(w.release("user-" + id))
	w.must(w.delete(id))
	return slices.DeleteFunc(w.sent(), func(c journal.Call) bool { return c.Instance != string(p.task.Alloc) })
}
