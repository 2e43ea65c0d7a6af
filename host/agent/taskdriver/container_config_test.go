package taskdriver

import (
	"context"
	"encoding/json"
	"errors"
	"iter"
	"net"
	"net/http"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/jsonstream"
	"github.com/moby/moby/api/types/mount"

	"holdfast/registry"
)

func configured(t *testing.T, config string) (*container.Config, *container.HostConfig, []string) {
	t.Helper()
	d, err := NewContainer("docker", "unix:///none")
	must(t, err)
	task := Task{ID: "a-t-1", Dir: "/d", Alloc: "/alloc-dir",
		Resources: Resources{CPU: 500, Memory: 64, MemoryMax: 128}}
	warnings, err := d.Configure(&task, json.RawMessage(config))
	must(t, err)
	c, h := task.containerOf()
	return c, h, warnings
}

// The attributes in published files for Nomad's docker and podman drivers reach the engine, in each form that HCL
// allows.
func TestContainerConfigOfPublishedFiles(t *testing.T) {
	c, h, warnings := configured(t, `{
		"image": "docker://registry.example/csi/driver:v1", "args": ["--v=5", 7, true], "entrypoint": "/driver",
		"privileged": true, "network_mode": "host", "ipc_mode": "host", "pid_mode": "host", "interactive": true,
		"volumes": ["/dev:/dev", "local/x:/x", "named:/y:ro"],
		"mounts": [{"type": "bind", "source": "/opt", "target": "/opt", "bind_options": {"propagation": "rshared"}}],
		"mount": [{"type": "bind", "source": "local/conf", "target": "/conf", "readonly": true},
			{"type": "tmpfs", "target": "/t", "tmpfs_options": [{"size": 4096, "mode": "1777"}]},
			{"type": "volume", "source": "v", "target": "/v", "volume_options": [{"no_copy": true,
				"driver_config": [{"name": "d", "options": [{"o": "x"}]}]}]}],
		"devices": [{"host_path": "/dev/fuse"}, "/dev/kvm:/dev/k:r"],
		"dns_servers": ["192.0.2.1"], "dns": ["2001:db8::1"],
		"ulimit": {"nofile": "1024:2048"}, "sysctl": [{"net.core.somaxconn": "16"}],
		"healthchecks": [{"disable": true}],
		"memory_hard_limit": 256, "memory_swap": "512m", "oom_score_adj": -5, "userns": "keep-id", "shm_size": 65536}`)
	if len(warnings) > 0 {
		t.Errorf("warnings: %v", warnings)
	}
	for what, pair := range map[string][2]any{
		"image":   {c.Image, "registry.example/csi/driver:v1"},
		"command": {append(c.Entrypoint, c.Cmd...), []string{"/driver", "--v=5", "7", "true"}},
		"health":  {c.Healthcheck.Test, []string{"NONE"}},
		"binds":   {h.Binds, []string{"/dev:/dev", "/d/local/x:/x", "named:/y:ro"}},
		"dns":     {len(h.DNS), 2},
		"memory":  {[]int64{h.Memory, h.MemoryReservation, h.MemorySwap}, []int64{256 << 20, 64 << 20, 512 << 20}},
		"network": {h.NetworkMode, container.NetworkMode("host")},
		"ipc":     {h.IpcMode, container.IpcMode("host")},
		"users":   {h.UsernsMode, container.UsernsMode("keep-id")},
		"devices": {h.Devices, []container.DeviceMapping{
			{PathOnHost: "/dev/fuse", PathInContainer: "/dev/fuse", CgroupPermissions: "rwm"},
			{PathOnHost: "/dev/kvm", PathInContainer: "/dev/k", CgroupPermissions: "r"}}},
		"sysctl": {h.Sysctls, map[string]string{"net.core.somaxconn": "16"}},
		"ulimit": {*h.Ulimits[0], container.Ulimit{Name: "nofile", Soft: 1024, Hard: 2048}},
	} {
		if !reflect.DeepEqual(pair[0], pair[1]) {
			t.Errorf("%s: %v, want %v", what, pair[0], pair[1])
		}
	}
	want := []string{"/local", "/alloc", "/secrets", "/conf", "/t", "/v", "/opt"}
	var targets []string
	for _, m := range h.Mounts {
		targets = append(targets, m.Target)
	}
	if !slices.Equal(targets, want) || h.Mounts[3].Source != "/d/local/conf" ||
		h.Mounts[4].TmpfsOptions.Mode != 0o1777 ||
		h.Mounts[5].VolumeOptions.DriverConfig.Name != "d" ||
		h.Mounts[6].BindOptions.Propagation != mount.PropagationRShared {
		t.Errorf("mounts %+v", h.Mounts)
	}
}

// A warning names each attribute that has no effect, also in blocks.
func TestContainerConfigNamesWhatItIgnores(t *testing.T) {
	_, _, warnings := configured(t, `{"image": "i", "ports": ["http"], "logging": [{"type": "syslog"}],
		"auth": [{"username": "u", "email": "e"}], "mount": [{"target": "/x", "source": "/y", "bogus": 1}],
		"devices": [{"host_path": "/dev/fuse", "typo": 1}, "/dev/kvm"]}`)
	var names []string
	for _, w := range warnings {
		names = append(names, strings.Fields(w)[2])
	}
	if want := []string{"auth.email", "devices.typo", "logging", "mount.bogus", "ports"}; !slices.Equal(names, want) {
		t.Errorf("%v, want %v", names, want)
	}
}

func TestContainerConfigErrors(t *testing.T) {
	d, err := NewContainer("docker", "unix:///none")
	must(t, err)
	for config, text := range map[string]string{
		`{}`:                                 "no image; driver docker needs config { image = ... }",
		`{"image": "Hostile Name\u0000"}`:    `image "Hostile Name\x00"`,
		`{"image": "i", "shm_size": "huge"}`: "write it as in 64m",
		`{"image": "i", "ulimit": {"nofile": "x"}}`:                                  "write SOFT or SOFT:HARD",
		`{"image": "i", "image_pull_timeout": "-1s"}`:                                `write it as in "5m"`,
		`{"image": "i", "mount": {"type": "disk", "target": "/x"}}`:                  "use bind, volume or tmpfs",
		`{"image": "i", "mount": {"source": "/x", "target": "x"}}`:                   "not an absolute path",
		`{"image": "i", "dns_servers": ["example.org"]}`:                             "no IP address",
		`{"image": "i", "auth": {"password": "hunter2"}}`:                            `password = { env = "VARIABLE" }`,
		`{"image": "i", "auth": [{"password": {"env": "A", "file": "/b"}}]}`:         "must have one of env and file",
		`{"image": "i", "privileged": "perhaps"}`:                                    "write true or false",
		`{"image": "i", "mount": {"target": "/x", "tmpfs_options": {"mode": "rw"}}}`: "no octal number",
	} {
		_, err := d.Configure(&Task{}, json.RawMessage(config))
		if !errors.Is(err, registry.ErrInvalid) || !strings.Contains(err.Error(), text) ||
			strings.Contains(err.Error(), "\n") || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v, want %q", config, err, text)
		}
	}
}

// Engines refuse a share out of range, and a container gets the share that the exec driver gives.
func TestContainerGetsTheShareOfAnExecTask(t *testing.T) {
	for r, want := range map[Resources]int64{{}: 0, {CPU: 500}: 500, {CPU: 1}: 2, {CPU: 1 << 30}: 262144,
		{Cores: 2}: 2048} {
		var h container.HostConfig
		Task{Resources: r, container: &containerConfig{}}.setLimits(&h)
		if h.CPUShares != want {
			t.Errorf("%+v: %d, want %d", r, h.CPUShares, want)
		}
	}
}

// Two tasks of an alloc never share a container, whatever their names.
func TestContainerNames(t *testing.T) {
	a, b := containerName("alloc-a b-1"), containerName("alloc-a_b-1")
	if a == b || b != "holdfast-alloc-a_b-1" || strings.Trim(a, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
		t.Errorf("%q, %q", a, b)
	}
}

// A server that is not an engine, at the socket of one, is recognized, and counts as an unavailable engine.
func TestContainerNeedsAnEngine(t *testing.T) {
	dir := tempDir(t)
	page := listenAt(t, filepath.Join(dir, "page"))
	go func() { _ = http.Serve(page, http.NotFoundHandler()) }()
	other := listenAt(t, filepath.Join(dir, "other"))
	go func() {
		for c, err := other.Accept(); err == nil; c, err = other.Accept() {
			_, _ = c.Read(make([]byte, 1)) // a client that has sent nothing reports another error
			_, _ = c.Write([]byte("220 ready\r\n"))
			c.Close()
		}
	}()
	for name, text := range map[string]string{
		"page": "404 page not found", "other": "malformed HTTP", "none": "no such file",
	} {
		d, err := NewContainer("docker", "unix://"+filepath.Join(dir, name))
		must(t, err)
		err = d.Prepare(t.Context(), Task{ID: "a", container: &containerConfig{Image: "i"}}, func(string) {})
		if !errors.Is(err, registry.ErrUnavailable) || !strings.Contains(err.Error(), text) ||
			!strings.HasSuffix(err.Error(), "start it, or set --docker-engine") {
			t.Errorf("%s: %v", name, err)
		}
	}
	for host, text := range map[string]string{
		"/run/docker.sock":                    "write it as in unix:///run/docker.sock",
		"ftp://engine":                        "only unix and tcp are supported",
		"unix:///" + strings.Repeat("x", 120): "is too long",
	} {
		if _, err := NewContainer("docker", host); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v", host, err)
		}
	}
}

func listenAt(t *testing.T, path string) net.Listener {
	t.Helper()
	l, err := net.Listen("unix", path)
	must(t, err)
	t.Cleanup(func() { l.Close() })
	return l
}

// download simulates a pull of two layers that takes ten seconds.
type download struct{}

func (download) Read([]byte) (int, error)   { panic("not used") }
func (download) Close() error               { return nil }
func (download) Wait(context.Context) error { panic("not used") }
func (download) JSONMessages(context.Context) iter.Seq2[jsonstream.Message, error] {
	return func(yield func(jsonstream.Message, error) bool) {
		for i := range int64(11) {
			for _, id := range []string{"a", "b"} {
				p := &jsonstream.Progress{Current: i << 20, Total: 10 << 20}
				if !yield(jsonstream.Message{ID: id, Status: "Downloading", Progress: p}, nil) {
					return
				}
			}
			time.Sleep(time.Second)
		}
	}
}

func TestPullReportsItsProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lines []string
		must(t, followPull(t.Context(), download{}, func(text string) { lines = append(lines, text) }))
		if want := []string{"9MiB of 20MiB", "19MiB of 20MiB"}; !slices.Equal(lines, want) {
			t.Errorf("%q, want %q", lines, want)
		}
	})
}

func TestDecodeSaysWhatToWrite(t *testing.T) {
	for text, want := range map[string]string{
		`{"labels":"x"}`:           "config: labels cannot be a JSON string; write a block",
		`{"mount":["x"]}`:          "write a block",
		`{"args":"x"}`:             "write a list",
		`{"oom_score_adj":"x"}`:    "write a whole number",
		`{"image":{}}`:             "write a string",
		`{"args":[{}],"init":"x"}`: "config: args: {} is not a string; config: init cannot be",
		`{"init":"x"}`:             "write true or false",
	} {
		var into containerConfig
		if err := Decode("config", json.RawMessage(text), &into); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}
