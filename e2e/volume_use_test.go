package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
)

// users are the allocs that use one volume.
type users struct {
	*env
	groups []host.AllocGroup
	paths  map[host.AllocID]string
}

// add has one more alloc use the volume and write a file of its own.
func (u *users) add(id string) {
	u.t.Helper()
	g := u.group(id, request{source: "vol", mode: manyWriters, lines: mountOptions("", "", "noatime")})
	path, err := u.prepare(g)
	u.must(err)
	u.groups, u.paths[g.Alloc] = append(u.groups, g), path
	u.writeFile(path, id, id)
}

// remove releases an alloc. The others keep their mounts.
func (u *users) remove(id string) {
	u.t.Helper()
	u.must(u.release(id))
	u.groups = slices.DeleteFunc(u.groups, func(g host.AllocGroup) bool { return g.Alloc == host.AllocID(id) })
	if _, mounted := u.mounted(u.paths[host.AllocID(id)]); mounted {
		u.t.Errorf("%s is released, and its mount is there", id)
	}
	for _, g := range u.groups {
		u.wantFile(u.paths[g.Alloc], id, id)
	}
}

// Users of one volume come and go while shim, host and plugin are killed and replaced. The volume is staged for the
// first and unstaged after the last, and each user keeps its mount.
func TestUseIsCountedOverEveryRestart(t *testing.T) {
	t.Parallel()
	u := &users{env: newEnv(t, allCaps...), paths: map[host.AllocID]string{}}
	p := u.addPlugin("alloc-p", csifake.Monolith)
	u.must(u.create("vol"))
	u.add("user-1")
	u.killShim()
	u.add("user-2")
	u.reopen([]*pluginTask{p}, u.groups...)
	u.add("user-3")
	p = u.restartPlugin(p, csifake.Monolith)
	u.remove("user-1")
	u.killShim()
	u.add("user-4")
	next := u.addPlugin("alloc-q", csifake.Monolith)
	u.stopPlugin(p)
	u.remove("user-2")
	u.killPlugin(next)
	u.reopen(nil, u.groups...)
	p = u.addPlugin("alloc-r", csifake.Monolith)
	u.remove("user-4")
	if early := u.calls("NodeUnstageVolume", "ControllerUnpublishVolume"); len(early) > 0 {
		t.Errorf("taken down under a user: %q", answers(early))
	}
	u.killShim()
	u.remove("user-3")
	for rpc, n := range map[string]int{
		"ControllerPublishVolume": 1, "NodeStageVolume": 1, "NodePublishVolume": 4,
		"NodeUnpublishVolume": 4, "NodeUnstageVolume": 1, "ControllerUnpublishVolume": 1,
	} {
		u.wantOneSuccessEach(rpc, n)
	}
	u.must(u.delete("vol"))
	u.stopPlugin(p)
}

// A usage that differs by value is refused before anything is sent, with the name of the holder. An equal one is not,
// however it is written. Once the volume is unused, another usage is accepted.
func TestUseConflictNamesTheHolderAndSendsNothing(t *testing.T) {
	t.Parallel()
	e := newEnv(t, append([]string{"VOLUME_MOUNT_GROUP"}, allCaps...)...)
	p := e.addPlugin("alloc-p", csifake.Monolith)
	e.must(e.createWith(e.ctx(), "vol", capability(manyWriters, "block-device")))
	holder := request{source: "vol", mode: manyWriters, lines: mountOptions("ext4", "1000", "noatime", "sync")}
	e.use("holder", holder)
	before := len(e.calls())
	for name, r := range map[string]request{
		"flags in another order": {mode: manyWriters, lines: mountOptions("ext4", "1000", "sync", "noatime")},
		"no flags":               {mode: manyWriters, lines: mountOptions("ext4", "1000")},
		"another file system":    {mode: manyWriters, lines: mountOptions("xfs", "1000", "noatime", "sync")},
		"another group":          {mode: manyWriters, lines: mountOptions("ext4", "1001", "noatime", "sync")},
		"no group":               {mode: manyWriters, lines: mountOptions("ext4", "", "noatime", "sync")},
		"another access mode":    {lines: mountOptions("ext4", "1000", "noatime", "sync")},
		"a block device":         {mode: manyWriters, block: true},
	} {
		r.source = "vol"
		if err := errOf(e.prepare(e.group("other", r))); !errors.Is(err, host.ErrConflict) ||
			!strings.Contains(err.Error(), "alloc holder") {
			t.Errorf("%s: %v", name, err)
		}
		e.must(e.release("other"))
	}
	e.wantCalls(before)
	holder.lines = mountOptions("ext${2 + 2}", "1000", `no${"atime"}`, "sync")
	e.use("equal", holder)
	e.wantCalls(before, publishOK)
	e.must(e.release("holder"))
	e.must(e.release("equal"))
	e.use("different", request{source: "vol", mode: manyWriters, lines: mountOptions("", "", "noexec")})
	e.must(e.release("different"))
	e.must(e.delete("vol"))
	e.stopPlugin(p)
}

// A reader and a writer share a volume: one stage, two publishes, and the kernel keeps the reader from writing. One
// alloc may have both, at different paths.
func TestUseReadOnlyBesideReadWrite(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	p := e.addPlugin("alloc-p", csifake.Monolith)
	e.must(e.create("vol"))
	writer := request{name: "w", source: "vol", mode: manyWriters}
	reader := request{name: "r", source: "vol", mode: manyWriters, lines: "read_only = true"}
	both, err := e.prepareAll(e.ctx(), e.group("alloc-both", writer, reader))
	e.must(err)
	for path, readOnly := range map[string]bool{
		e.use("alloc-w", writer): false, e.use("alloc-r", reader): true, both["W"]: false, both["R"]: true,
	} {
		m, mounted := e.mounted(path)
		if !mounted || slices.Contains(strings.Split(m.Options, ","), "ro") != readOnly {
			t.Errorf("%s is mounted %+v; want read-only: %t", path, m, readOnly)
		}
		err := os.WriteFile(filepath.Join(path, "f"), []byte("x"), 0o600)
		if readOnly && !errors.Is(err, unix.EROFS) || !readOnly && err != nil {
			t.Errorf("write to %s: %v", path, err)
		}
	}
	e.wantFile(both["R"], "f", "x")
	stages, publishes := e.calls("NodeStageVolume"), e.calls("NodePublishVolume")
	if len(stages) != 1 || len(publishes) != 4 {
		t.Fatalf("the plugin got %q", answers(e.calls()))
	}
	readers := 0
	for _, c := range publishes {
		if c.ReadOnly {
			readers++
		}
		if c.Usage != stages[0].Usage || c.Staging != stages[0].Staging {
			t.Errorf("published as %s of %s, staged as %s at %s",
				c.Usage, c.Staging, stages[0].Usage, stages[0].Staging)
		}
	}
	if readers != 2 {
		t.Errorf("%d publishes are read-only, not 2", readers)
	}
	for _, id := range []string{"alloc-both", "alloc-r", "alloc-w"} {
		e.must(e.release(id))
	}
	e.must(e.delete("vol"))
	e.stopPlugin(p)
}

// An inline volume belongs to one alloc: its publish creates it and its unpublish removes it, over restarts. It is
// neither attached nor staged.
func TestUseOfAnInlineVolume(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	p := e.addPlugin("alloc-p", csifake.Monolith)
	inline := request{name: "scratch", lines: "ephemeral {\n plugin_id = \"fake\"\n context = { size = \"1MiB\" }\n}"}
	log := logRequests(p, "NodePublishVolume")
	first, second := e.use("alloc-1", inline), e.use("alloc-2", inline)
	e.writeFile(first, "f", "x")
	if exists(filepath.Join(second, "f")) {
		t.Error("two allocs share an inline volume")
	}
	for _, logged := range log.of("NodePublishVolume") {
		r := logged.request.(*csi.NodePublishVolumeRequest)
		context := r.GetVolumeContext()
		if r.GetStagingTargetPath() != "" || context["size"] != "1MiB" ||
			context["csi.storage.k8s.io/ephemeral"] != "true" {
			t.Errorf("the plugin got %v", r)
		}
	}
	e.killShim()
	e.must(e.release("alloc-1"))
	e.writeFile(second, "g", "x")
	e.reopen([]*pluginTask{p}) // does not name alloc-2
	e.waitReleased("alloc-2")
	e.wantCalls(0, publishOK, publishOK, unpublishOK, unpublishOK)
	if left := e.volumeStates(); len(left) > 0 {
		t.Errorf("volumes: %v", left)
	}
	e.stopPlugin(p)
}

// An alloc keeps its open file while its plugin is killed, absent, started again and replaced, also when shim and host
// restart meanwhile.
func TestUseGoesOnWithoutThePlugin(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	p := e.addPlugin("alloc-p", csifake.Monolith)
	e.must(e.create("vol"))
	user := e.group("alloc-1", request{source: "vol"})
	path, err := e.prepare(user)
	e.must(err)
	file, err := os.Create(filepath.Join(path, "log"))
	e.must(err)
	defer file.Close()
	was, _ := e.mounted(path)
	before := len(e.calls())
	lines := ""
	check := func(what string) {
		t.Helper()
		lines += what + "\n"
		if _, err := file.WriteString(what + "\n"); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if now, mounted := e.mounted(path); !mounted || now.ID != was.ID {
			t.Errorf("%s: the mount is another one: %+v", what, now)
		}
	}
	e.killPlugin(p)
	check("the plugin was killed")
	e.killShim()
	e.activeShim()
	check("the shim was killed")
	e.reopen(nil, user)
	check("the host was restarted")
	list, _, err := e.host.Allocs(e.ctx(), host.AllocQuery{ID: "alloc-1"})
	e.must(err)
	if len(list) != 1 || list[0].State != "ready" || len(list[0].Waiting) > 0 {
		t.Errorf("the alloc is %+v", list)
	}
	p = e.addPlugin("alloc-q", csifake.Monolith)
	check("another plugin task runs")
	next := e.addPlugin("alloc-r", csifake.Monolith)
	e.stopPlugin(p)
	check("the plugin task was replaced")
	e.wantCalls(before)
	e.must(file.Close())
	e.wantFile(path, "log", lines)
	e.must(e.release("alloc-1"))
	e.must(e.delete("vol"))
	e.stopPlugin(next)
}

// Whatever a plugin answers, no secret reaches an error, an event or the state, also from a shim that has just started.
func TestSecretsAppearNowhere(t *testing.T) {
	const secret = "c4n4ry-s3cret-value"
	t.Setenv("HOLDFAST_TEST_SECRET", secret)
	e := newEnv(t, allCaps...)
	p := e.addPlugin("alloc-p", csifake.Monolith)
	failOnce := func(rpcs ...string) {
		for _, rpc := range rpcs {
			p.On(rpc).Times(1).Code(codes.InvalidArgument,
				"bad password "+secret+" c4n4ry YzRuNHJ5LXMzY3JldC12YWx1ZQ==")
		}
	}
	var seen []string
	retry := func(what string, call func() error) {
		t.Helper()
		for range 10 {
			err := call()
			if err == nil {
				return
			}
			seen = append(seen, fmt.Sprintf("%s: %v", what, err))
		}
		t.Errorf("%s does not succeed: %q", what, seen)
	}
	failOnce(slices.Concat(everyCall[:4], everyCall[4:7])...)
	secrets := "secrets {\n password = { env = \"HOLDFAST_TEST_SECRET\" }\n}\n"
	g := e.group("a1", request{source: "vol"})
	retry("create", func() error { return e.createWith(e.ctx(), "vol", secrets) })
	retry("prepare", func() error { return errOf(e.prepare(g)) })
	retry("release", func() error { return e.release("a1") })
	retry("prepare again", func() error { return errOf(e.prepare(g)) })
	e.killShim()
	failOnce(everyCall[4:]...)
	retry("release", func() error { return e.release("a1") })
	retry("delete", func() error { return e.delete("vol") })
	for _, event := range e.eventsUntil(func(event host.Event) bool { return event.Kind == "volume deleted" }) {
		seen = append(seen, event.String())
	}
	all := strings.Join(seen, "\n")
	if strings.Contains(all, secret) || strings.Contains(all, "YzRuNHJ5LXMzY3JldC12YWx1ZQ") {
		t.Errorf("a secret was reported: %s", all)
	}
	for _, rpc := range []string{"NodeUnpublishVolume", "NodeUnstageVolume", "ControllerUnpublishVolume",
		"NodeStageVolume"} {
		if !strings.Contains(all, "bad password ***") || !strings.Contains(all, rpc) {
			t.Errorf("the plugin's answer to %s is lost: %s", rpc, all)
		}
	}
	stored, err := os.ReadFile(filepath.Join(e.config.StateDir, "shim.db"))
	if err != nil || bytes.Contains(stored, []byte(secret)) {
		t.Errorf("a secret is stored: %v", err)
	}
	e.stopPlugin(p)
}

// Each alloc of a group has the volume of its index.
func TestUsePerAlloc(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	p := e.addPlugin("alloc-p", csifake.Monolith)
	paths := make([]string, 3)
	for i := range paths {
		e.must(e.create(fmt.Sprintf("shard[%d]", i)))
		g := e.group(fmt.Sprintf("alloc-%d", i), request{source: "shard", lines: "per_alloc = true"})
		g.Index = uint64(i)
		path, err := e.prepare(g)
		e.must(err)
		paths[i] = path
		e.writeFile(path, "index", fmt.Sprint(i))
	}
	for i, path := range paths {
		e.wantFile(path, "index", fmt.Sprint(i))
		alloc, volume := fmt.Sprintf("alloc-%d", i), fmt.Sprintf("shard[%d]", i)
		if c := e.claims()[alloc]; string(c.Name.ID) != volume {
			t.Errorf("%s holds %s", alloc, c.Name)
		}
		e.must(e.release(alloc))
		e.must(e.delete(volume))
	}
	if n := len(e.calls("NodeStageVolume")); n != 3 {
		t.Errorf("staged %d times", n)
	}
	e.stopPlugin(p)
}

// While a plugin hangs in any mutating call, a volume of another plugin lives its whole life.
func TestUseIsNotHeldUpByAnotherPlugin(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	hanging := e.addPlugin("alloc-hangs", csifake.Monolith)
	other := e.addOtherPlugin("other", "alloc-other")
	gates := make([]*csifake.Gate, len(everyCall))
	for i, rpc := range everyCall {
		gates[i] = hanging.On(rpc).Times(1).Hold()
	}
	g := e.group("alloc-1", request{source: "vol"})
	slow := background(func() error { return e.lifeCycle(e.ctx(), "vol", g, "") })
	for i, rpc := range everyCall {
		e.waitHeld(gates[i], slow)
		id := fmt.Sprint("other-", i)
		e.must(createText(e.ctx(), e.host, volumeText("other", id, "")))
		e.writeFile(e.use("user-"+id, request{source: id}), "f", "x")
		e.must(e.release("user-" + id))
		e.must(e.delete(id))
		held := e.calls(rpc)
		if at := slices.IndexFunc(held, func(c journal.Call) bool { return c.Instance == "alloc-hangs" }); at < 0 ||
			held[at].End != nil {
			t.Errorf("%s does not hang any more: %q", rpc, answers(held))
		}
		gates[i].Open()
	}
	e.must(e.result("the life of the volume", slow))
	if n := len(e.calls()); n != len(everyCall)*(len(everyCall)+1) {
		t.Errorf("the plugins got %d calls: %q", n, answers(e.calls()))
	}
	e.stopPlugin(other)
	e.stopPlugin(hanging)
}

// addOtherPlugin starts the task of another plugin, with its own storage.
func (e *env) addOtherPlugin(id, alloc string) *pluginTask {
	e.t.Helper()
	source := host.Source{Name: "plugin.hcl", Text: []byte(pluginText(id, csifake.Monolith, ""))}
	job, _, err := e.host.Parse(e.ctx(), source, host.ParseOptions{})
	e.must(err)
	task := host.AllocTask{Alloc: host.AllocID(alloc), Task: "plugin", Attempt: 1,
		Sealed: job.Groups[0].Tasks[0].Sealed}
	plan, err := e.host.TaskStarting(e.ctx(), task)
	e.must(err)
	p := csifake.Start(e.t, csifake.Config{
		Name: id + ".example.org", Caps: e.caps, Socket: csifake.SocketPath(planEnv(plan, "CSI_ENDPOINT")),
		Journal: e.journal,
		Mounts:  true, DataDir: filepath.Join(e.dir, "data-"+id), Instance: alloc,
	})
	e.must(e.host.TaskStarted(e.ctx(), task.Key(), 1))
	e.waitRegistered(alloc)
	return &pluginTask{p, task}
}
