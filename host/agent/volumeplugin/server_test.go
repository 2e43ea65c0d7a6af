package volumeplugin

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/host/agent/control"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

// fakeStorage is a Storage with the volumes of a map. Methods that it does not define must not be called.
type fakeStorage struct {
	Storage
	mu       sync.Mutex
	volumes  map[host.VolumeID]host.VolumeStatus
	removed  []string
	prepared func(ctx context.Context) error // nil: at once
	released chan host.AllocID
	findErr  error
	nodes    []host.NodeStatus
}

func (f *fakeStorage) Volumes(_ context.Context, q host.VolumeQuery) (l []host.VolumeStatus, s host.Seq, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, v := range f.volumes {
		if q.Name.ID == "" || q.Name.ID == id {
			l = append(l, v)
		}
	}
	return l, 1, f.findErr
}

func (f *fakeStorage) add(s host.VolumeSpec, created bool) (host.VolumeStatus, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := host.VolumeStatus{}
	v.VolumeSpec, v.Created, v.State = s, created, registry.VolumeReady
	f.volumes[s.ID] = v
	return v, nil
}

func (f *fakeStorage) CreateVolume(_ context.Context, s host.VolumeSpec) (host.VolumeStatus, error) {
	return f.add(s, true)
}

func (f *fakeStorage) RegisterVolume(_ context.Context, s host.VolumeSpec) (host.VolumeStatus, error) {
	return f.add(s, false)
}

func (f *fakeStorage) remove(how string, n host.VolumeName) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.volumes, n.ID)
	f.removed = append(f.removed, how+" "+string(n.ID))
	return nil
}

func (f *fakeStorage) DeleteVolume(_ context.Context, n host.VolumeName) error {
	return f.remove("delete", n)
}

func (f *fakeStorage) DeregisterVolume(_ context.Context, n host.VolumeName) error {
	return f.remove("deregister", n)
}

func (f *fakeStorage) Plugins(_ context.Context, q host.PluginQuery) (l host.PluginList, s host.Seq, err error) {
	if q.Plugin == "disk" {
		l.Tasks = []host.PluginTask{{Plugin: "disk", Healthy: true}}
	}
	return l, 1, nil
}

func (f *fakeStorage) Parse(context.Context, host.Source, host.ParseOptions) (*host.Job, host.Diagnostics, error) {
	return &host.Job{Groups: []hooks.Group{{Sealed: hooks.Sealed("group")}}}, nil, nil
}

func (f *fakeStorage) ParseVolume(
	context.Context, host.Source, host.ParseOptions,
) (host.VolumeSpec, host.Diagnostics, error) {
	v := host.VolumeSpec{Namespace: registry.DefaultNamespace, ID: "of-the-file", Plugin: "disk", External: "vol-1"}
	return v, nil, nil
}

func (f *fakeStorage) PrepareAlloc(ctx context.Context, _ host.AllocGroup) (map[string]host.Plan, error) {
	if f.prepared != nil {
		if err := f.prepared(ctx); err != nil {
			return nil, err
		}
	}
	return map[string]host.Plan{"engine": {Binds: []hooks.Bind{{Source: "/vol"}}}}, nil
}

func (f *fakeStorage) Nodes(ctx context.Context, q host.NodeQuery) ([]host.NodeStatus, host.Seq, error) {
	if q.MinIndex > 0 {
		<-ctx.Done()
		return nil, 0, context.Cause(ctx)
	}
	return f.nodes, 1, nil
}

func (f *fakeStorage) Allocs(context.Context, host.AllocQuery) (l []host.AllocStatus, s host.Seq, err error) {
	return nil, 1, nil
}

func (f *fakeStorage) ReleaseAlloc(_ context.Context, id host.AllocID) error {
	f.released <- id
	return nil
}

// plugin is a running Server and its socket.
type plugin struct {
	*testing.T
	storage *fakeStorage
	server  *Server
	socket  string
	client  *http.Client
}

func newPlugin(t *testing.T, d Defaults) *plugin {
	t.Helper()
	p := &plugin{T: t, socket: filepath.Join(t.TempDir(), "p.sock"), storage: &fakeStorage{
		volumes: map[host.VolumeID]host.VolumeStatus{}, released: make(chan host.AllocID, 10),
	}}
	dial := func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", p.socket) }
	p.client = &http.Client{Transport: &http.Transport{DialContext: dial}}
	a, err := agent.New(agent.Config{StateDir: t.TempDir(), Drivers: []taskdriver.Driver{taskdriver.NewRawExec()}})
	if err != nil {
		t.Fatal(err)
	}
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: p.socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	_ = dead.Close()
	l, err := control.Listen(p.socket, hclog.NewNullLogger())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error)
	p.server = NewServer(a, p.storage, d, hclog.NewNullLogger())
	go func() { served <- p.server.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		p.client.CloseIdleConnections()
		if err := errors.Join(<-served, a.Close()); err != nil {
			t.Error(err)
		}
	})
	return p
}

// call sends a request and returns the reply as JSON.
func (p *plugin) call(method, body string) string {
	p.Helper()
	answer, err := p.client.Post("http://plugin/"+method, "application/json", strings.NewReader(body))
	if err != nil {
		p.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if failed := !bytes.Contains(text, []byte(`"Err":""`)); err != nil ||
		failed != (answer.StatusCode != http.StatusOK) {
		p.Errorf("%s: status %s, %s, %v", method, answer.Status, text, err)
	}
	return strings.TrimSpace(string(text))
}

func (p *plugin) want(method, body string, parts ...string) {
	p.Helper()
	got := p.call(method, body)
	for _, part := range parts {
		if !strings.Contains(got, part) {
			p.Errorf("%s %s: %s, want %s", method, body, got, part)
		}
	}
}

func TestVolumePluginProtocol(t *testing.T) {
	p := newPlugin(t, Defaults{})
	const ok = `{"Err":""}`
	p.want("Plugin.Activate", "", `"Implements":["VolumeDriver"]`)
	p.want("VolumeDriver.Capabilities", "{}", `"Capabilities":{"Scope":"local"}`)
	p.want("VolumeDriver.Get", `{"Name":"notes"}`, `no volume \"notes\"`)
	p.want("VolumeDriver.Create", `{"Name":"notes"}`,
		"podman volume create --driver p -o plugin=PLUGIN -o size=1G notes")
	p.want("VolumeDriver.Create", `{"Name":"notes","Opts":{"plugin":"none"}}`, `plugin \"none\" is not running`)
	p.want("VolumeDriver.Create", `{"Name":"notes","Opts":{"plugin":"disk","size":"1M"}}`, ok)
	p.want("VolumeDriver.Create", `{"Name":"notes"}`, ok) // once more
	v := p.storage.volumes["notes"]
	v.State = registry.VolumeUncertain // its creation has failed
	p.storage.volumes["notes"] = v
	p.want("VolumeDriver.Create", `{"Name":"notes","Opts":{"plugin":"disk","size":"1M"}}`, ok)
	if state := p.storage.volumes["notes"].State; state != registry.VolumeReady {
		t.Errorf("the volume is %s after its creation was repeated", state)
	}
	p.storage.volumes["notes"] = v
	p.want("VolumeDriver.Create", `{"Name":"notes"}`, `notes\" is uncertain`, "repeat its creation")
	p.storage.add(v.VolumeSpec, true)
	p.want("VolumeDriver.Mount", `{"Name":"notes","ID":"a"}`, `"Mountpoint":"/vol"`)
	p.want("VolumeDriver.Path", `{"Name":"notes"}`, `"Mountpoint":"/vol"`)
	p.want("VolumeDriver.Get", `{"Name":"notes"}`, `"Volume":{"Name":"notes","Mountpoint":"/vol"`, `"plugin":"disk"`)
	p.want("VolumeDriver.List", `{}`, `"Volumes":[{"Name":"notes"`)
	p.want("VolumeDriver.Unmount", `{"Name":"notes","ID":"a"}`, ok)
	p.want("VolumeDriver.Path", `{"Name":"notes"}`, ok)
	p.want("VolumeDriver.Remove", `{"Name":"notes"}`, ok)
	p.want("VolumeDriver.Remove", `{"Name":"notes"}`, ok) // once more
	p.want("VolumeDriver.Mount", `{"Name":`, "the request's body")
	p.want("VolumeDriver.Create", `{"Name":"old","Opts":{"file":"/dev/null"}}`, ok)
	p.want("VolumeDriver.Remove", `{"Name":"old"}`, ok)
	p.storage.volumes["left"] = host.VolumeStatus{Volume: registry.Volume{VolumeSpec: host.VolumeSpec{Plugin: "gone"},
		Created: true}}
	p.want("VolumeDriver.Remove", `{"Name":"left"}`, `plugin \"gone\" is not running`)
	if want := []string{"delete notes", "deregister old"}; !reflect.DeepEqual(p.storage.removed, want) {
		t.Errorf("removed %q, want %q", p.storage.removed, want)
	}
}

func TestOptionsOfACreate(t *testing.T) {
	p := newPlugin(t, Defaults{Plugin: "disk", Size: 7})
	p.want("VolumeDriver.Create", `{"Name":"v"}`, `{"Err":""}`)
	want := host.VolumeSpec{
		Namespace: registry.DefaultNamespace, ID: "v", Name: "v", Plugin: "disk", CapacityMin: 7,
		Capabilities: capability(registry.SingleNodeWriter),
	}
	if got := p.storage.volumes["v"].VolumeSpec; !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	p.want("VolumeDriver.Create", `{"Name":"w","Opts":{"size":"1k","fs_type":"xfs","mount_flags":"noatime,ro",
		"access_mode":"multi-node-multi-writer","tier":"gold"}}`, `{"Err":""}`)
	want.ID, want.Name, want.CapacityMin, want.Parameters = "w", "w", 1024, map[string]string{"tier": "gold"}
	want.FSType, want.MountFlags = "xfs", registry.FlagsOf([]string{"noatime", "ro"})
	want.Capabilities = capability(registry.MultiNodeMultiWriter)
	if got := p.storage.volumes["w"].VolumeSpec; !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	for opts, want := range map[string]string{
		`{"size":"much"}`:          "option size=much is not a size",
		`{"access_mode":"shared"}`: "use one of: single-node-writer ",
		`{"file":"notes.hcl"}`:     "no absolute path",
		`{"file":"/none/at/all"}`:  "option file",
	} {
		p.want("VolumeDriver.Create", `{"Name":"x","Opts":`+opts+`}`, want)
	}
	if _, known := p.storage.volumes["x"]; known {
		t.Error("a refused volume exists")
	}
}

// Podman gives up after 5 s, and does not unmount then.
func TestTrapD7MountThatItsEngineDidNotWaitFor(t *testing.T) {
	for name, ends := range map[string]error{"while it is prepared": context.Canceled, "just before the answer": nil} {
		t.Run(name, func(t *testing.T) {
			p := newPlugin(t, Defaults{Plugin: "disk"})
			p.want("VolumeDriver.Create", `{"Name":"notes"}`, `{"Err":""}`)
			ctx, cancel := context.WithCancel(t.Context())
			p.storage.prepared = func(served context.Context) error {
				cancel()
				<-served.Done() // the server has seen that the connection is closed
				return ends
			}
			q, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://plugin/VolumeDriver.Mount",
				strings.NewReader(`{"Name":"notes","ID":"a"}`))
			if err != nil {
				t.Fatal(err)
			}
			if _, err = p.client.Do(q); !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			select {
			case <-p.storage.released:
			case <-time.After(time.Minute):
				t.Error("the volume stays mounted")
			}
		})
	}
}

// All containers of Podman have one ID. The second container may have mounted the volume before the answer of the first
// one is lost.
func TestTrapD7LostErrorTakesNoMountBack(t *testing.T) {
	p := newPlugin(t, Defaults{Plugin: "disk"})
	p.want("VolumeDriver.Create", `{"Name":"notes"}`, `{"Err":""}`)
	r, q := httptest.NewRequest(http.MethodPost, "/VolumeDriver.Mount", nil), request{Name: "notes", ID: "constant"}
	p.storage.prepared = func(context.Context) error { return errors.New("no such device") }
	failed, err := p.server.mount(r, q)
	if err == nil {
		t.Fatal("the mount succeeded")
	}
	<-p.storage.released
	p.storage.prepared = nil
	mounted, err := p.server.mount(r, q)
	if err != nil {
		t.Fatal(err)
	}
	failed.answered(false)
	if len(p.storage.released) > 0 {
		t.Error("the mount of the second try is released")
	}
	mounted.answered(false)
	if len(p.storage.released) != 1 {
		t.Error("a mount whose answer was lost stays")
	}
}

func TestTrapD11StaleSocket(t *testing.T) {
	newPlugin(t, Defaults{}).want("Plugin.Activate", "", "VolumeDriver") // newPlugin leaves a dead socket there
}

func TestTrapD12HostileNames(t *testing.T) {
	p := newPlugin(t, Defaults{})
	p.want("VolumeDriver.Create", `{"Name":"","Opts":{"plugin":"disk"}}`, "names no volume")
	p.want("VolumeDriver.Create", `{"Name":"a;rm -rf $HOME"}`, `-o size=1G 'a;rm -rf $HOME'`)
	p.storage.findErr = registry.Invalid("volume id is bad") // the shim checks IDs
	for _, method := range []string{"Create", "Get", "Mount", "Path", "Remove"} {
		p.want("VolumeDriver."+method, `{"Name":"../a","ID":"x"}`, `{"Err":"volume id is bad"`)
	}
}

// Another node of the cluster can create and delete a volume. Only a mount needs the plugin on this node.
func TestVolumeOfAPluginOnAnotherNode(t *testing.T) {
	p := newPlugin(t, Defaults{})
	node := func(name, plugin string, alive, local bool) (n host.NodeStatus) {
		n.Name, n.Alive = host.NodeName(name), alive
		n.Plugins = []registry.NodePluginStatus{{NodePlugin: registry.NodePlugin{Plugin: host.PluginID(plugin),
			Controller: true, Local: local}}}
		return n
	}
	p.storage.nodes = []host.NodeStatus{node("a", "far", true, false), node("b", "loop", true, true),
		node("c", "dead", false, false)}
	const ok = `{"Err":""}`
	p.want("VolumeDriver.Create", `{"Name":"notes","Opts":{"plugin":"far"}}`, ok)
	p.want("VolumeDriver.Mount", `{"Name":"notes","ID":"a"}`, `plugin \"far\" is not running; start its job`)
	p.want("VolumeDriver.Remove", `{"Name":"notes"}`, ok)
	p.want("VolumeDriver.Create", `{"Name":"notes","Opts":{"plugin":"dead"}}`, `plugin \"dead\" is not running`)
	p.want("VolumeDriver.Create", `{"Name":"notes","Opts":{"plugin":"loop"}}`,
		"it runs on node b, but its volumes stay on their node")
	there := registry.Volume{Created: true, VolumeSpec: host.VolumeSpec{ID: "there", Plugin: "loop", Node: "b"}}
	p.storage.volumes["there"] = host.VolumeStatus{Volume: there}
	p.want("VolumeDriver.Remove", `{"Name":"there"}`, ok)
}
