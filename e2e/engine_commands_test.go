package e2e

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"holdfast/host/agent/control"
	"holdfast/internal/installed"
	"holdfast/internal/proc"
)

// commands are what users do apart from running a container.
func (v *engineVolumes) commands() {
	v.t.Helper()
	v.cp(volumesOfEngine[2])
	if v.engine.Name == "docker" {
		v.liveRestore(volumesOfEngine[1])
		v.compose()
	} else {
		v.podmanIsKilled(volumesOfEngine[1])
		v.kube()
		v.quadlet()
	}
}

// podmanKiller is a volume plugin that passes requests on, and kills the process that sent one: after the answer of the
// plugin, and before Podman has stored its count.
type podmanKiller struct {
	socket string
	path   atomic.Value // of the requests whose sender is killed, as in /VolumeDriver.Mount; or ""
	kills  atomic.Int32
}

type podmanPID struct{}

func (v *engineVolumes) newPodmanKiller() *podmanKiller {
	k := &podmanKiller{socket: v.path("podman.sock")}
	k.path.Store("")
	l, err := net.Listen("unix", k.socket)
	v.must(err)
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: "plugin"})
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		if k.path.Load() != "" {
			return relay(v.socket)
		}
		return (&net.Dialer{}).DialContext(ctx, "unix", v.socket)
	}, DisableKeepAlives: true}
	proxy.Transport = transport
	proxy.ModifyResponse = func(r *http.Response) error {
		if k.path.Load() == r.Request.URL.Path {
			k.kills.Add(1)
			return unix.Kill(r.Request.Context().Value(podmanPID{}).(int), unix.SIGKILL)
		}
		return nil
	}
	// Without the agent's answer, the request has none either.
	proxy.ErrorHandler = func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) }
	server := &http.Server{Handler: proxy, ConnContext: func(ctx context.Context, c net.Conn) context.Context {
		cred, err := proc.Peer(c)
		if err != nil {
			return ctx
		}
		return context.WithValue(ctx, podmanPID{}, int(cred.Pid))
	}}
	served := make(chan struct{})
	go func() { defer close(served); _ = server.Serve(l) }()
	v.t.Cleanup(func() { _ = server.Close(); <-served })
	return k
}

// relayVariable makes this test program a relay: it holds the socket to connect to.
const relayVariable = "HOLDFAST_E2E_RELAY"

// relay connects to a socket through a process of its own, which ends with the connection as a killed Podman does: the
// agent looks whether the process that has sent a request still runs.
func relay(socket string) (net.Conn, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	here, there := os.NewFile(uintptr(pair[0]), "here"), os.NewFile(uintptr(pair[1]), "there")
	defer func() { _ = here.Close(); _ = there.Close() }()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), relayVariable+"="+socket)
	cmd.ExtraFiles = []*os.File{there}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() { _ = cmd.Wait() }()
	return net.FileConn(here)
}

// relayMain is the process of relay.
func relayMain(socket string) int {
	from, err := net.FileConn(os.NewFile(3, "there"))
	if err != nil {
		return 1
	}
	to, err := net.Dial("unix", socket)
	if err != nil {
		return 1
	}
	go func() { _, _ = io.Copy(from, to) }()
	_, _ = io.Copy(to, from)
	return 0
}

// during kills the processes that send a request, until done reports true.
func (k *podmanKiller) during(v *engineVolumes, path string, begin func(), done func() bool) {
	v.t.Helper()
	before := k.kills.Load()
	k.path.Store(path)
	begin()
	v.waitUntil("podman is killed at "+path, func() bool { return k.kills.Load() > before && done() })
	k.path.Store("")
}

// Podman is killed before it has stored its count. No later container gets a directory without the volume.
func (v *engineVolumes) podmanIsKilled(id string) {
	v.t.Helper()
	k := v.killer
	v.run(id, "cut")
	k.during(v, "/VolumeDriver.Unmount", func() { v.engine.CLI("kill", "cut") }, func() bool { return !v.mounted(id) })
	v.engineUse(id, "echo >/data/wrong", "no such file or directory")
	v.engine.CLI("volume", "unmount", id)
	v.engineUse(id, "[ -e /data/cut ] && [ ! -e /data/wrong ]", "")
	v.must(v.engine.Remove("cut"))
	mounted := func() bool { return v.mounted(id) }
	k.during(v, "/VolumeDriver.Mount", func() { _ = v.engineTry(id, "true", "--name", "lost") }, mounted)
	v.engineUse(id, "true", "")
	v.waitUntil("nothing uses the volume", func() bool { return !v.mounted(id) })
	v.must(v.retry("remove lost", func() error { return v.engine.Remove("lost") }))
}

// mounted reports whether the agent has mounted a volume for an engine.
func (v *engineVolumes) mounted(id string) bool {
	vol, err := v.client.Volume(v.ctx(), volumeName(id))
	v.must(err)
	return len(vol.Holders) > 0
}

// engineTry runs a script in a container with a volume at /data.
func (v *engineVolumes) engineTry(id, script string, flags ...string) error {
	args := append([]string{"run", "--rm", "--network", "none", "-v", id + ":/data"}, flags...)
	return errOf(v.engine.Try(append(args, "box", "sh", "-c", script)...))
}

// engineUse is engineTry, and fails the test unless it succeeds, or fails with a message.
func (v *engineVolumes) engineUse(id, script, message string) {
	v.t.Helper()
	err := v.engineTry(id, script)
	if (err == nil) != (message == "") || err != nil && !strings.Contains(err.Error(), message) {
		v.t.Errorf("%s: error %v, want %q", script, err, message)
	}
}

// waitFile waits for a file in a mounted volume.
func (v *engineVolumes) waitFile(volume, name string) {
	v.t.Helper()
	v.waitUntil(name+" is written", func() bool {
		vol, err := v.client.Volume(v.ctx(), volumeName(volume))
		return err == nil && len(vol.Holders) == 1 && len(vol.Holders[0].Engines) > 0 &&
			errOf(os.Stat(filepath.Join(vol.Holders[0].Target, name))) == nil
	})
}

// cp copies beside a running container and with a stopped one.
func (v *engineVolumes) cp(volume string) {
	v.t.Helper()
	v.run(volume, "copied")
	file := v.path("file")
	v.must(os.WriteFile(file, nil, 0o600))
	v.engine.CLI("cp", file, "copied:/data/beside")
	v.engineUse(volume, "ls /data/beside", "")
	if !v.mounted(volume) {
		v.t.Error("a copy beside a running container has unmounted its volume")
	}
	v.engine.CLI("kill", "copied")
	v.waitUntil("the stopped container has no volume", func() bool { return !v.mounted(volume) })
	_, err := v.engine.Try("cp", file, "copied:/data/stopped")
	if v.engine.Name == "podman" { // it mounts only for containers that run
		if err == nil || !strings.Contains(err.Error(), "is not mounted, cannot copy into it") {
			v.t.Errorf("copy into the volume of a stopped container: %v", err)
		}
	} else {
		v.must(err)
		v.engineUse(volume, "ls /data/stopped", "")
	}
	v.must(v.engine.Remove("copied"))
	v.waitUntil("nothing uses the volume", func() bool { return !v.mounted(volume) })
}

// liveRestore kills dockerd while its container keeps running.
func (v *engineVolumes) liveRestore(volume string) {
	v.t.Helper()
	restart := func() {
		v.engine.Kill()
		v.engine.Start("--live-restore")
	}
	state := func() string {
		return v.engine.CLI("inspect", "--format", "{{.State.Pid}} {{.State.StartedAt}}", "lives")
	}
	restart()
	v.run(volume, "lives")
	before := state()
	restart()
	v.engine.CLI("exec", "lives", "sh", "-c", "echo >/data/after")
	if after := state(); after != before || !v.mounted(volume) {
		v.t.Errorf("the container is %s, was %s", after, before)
	}
	v.must(v.engine.Remove("lives"))
	v.waitUntil("nothing uses the volume", func() bool { return !v.mounted(volume) })
	v.engineUse(volume, "ls /data/after", "")
}

// compose runs a file whose volume has options.
func (v *engineVolumes) compose() {
	v.t.Helper()
	installed.Tool(v.t, "docker-compose", "docker-compose")
	file := v.path("compose.yaml")
	v.must(os.WriteFile(file, []byte(`version: "3"
services:
  web:
    image: box
    network_mode: none
    command: [sh, -c, "echo composed > /data/composed; exec sleep 1000"]
    stop_signal: SIGKILL
    volumes: ["notes:/data"]
volumes:
  notes:
    driver: `+v.driver+`
    driver_opts: {plugin: fake, size: 1M}
`), 0o600))
	compose := func(args ...string) {
		v.t.Helper()
		v.must(errOf(v.engine.Run(append([]string{"docker-compose", "-p", "h", "-f", file}, args...)...)))
	}
	compose("up", "-d")
	v.waitFile("h_notes", "composed")
	compose("down", "-v")
	list, err := v.client.Volumes(v.ctx(), "")
	v.must(err)
	if slices.ContainsFunc(list, func(vol control.Volume) bool { return vol.ID == "h_notes" }) {
		v.t.Error("docker-compose down -v has left the volume")
	}
}

// kube plays a pod whose volume is created by its file, and again when the volume exists.
func (v *engineVolumes) kube() {
	v.t.Helper()
	const pod = `apiVersion: v1
kind: Pod
metadata:
  name: web
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - name: box
    image: localhost/box
    imagePullPolicy: Never
    command: [sh, -c, "echo >>/data/kube; exec sleep 1000"]
    volumeMounts: [{name: data, mountPath: /data}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: kube}}]
`
	claim := `apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: kube
  annotations: {volume.podman.io/driver: ` + v.driver + `}
spec:
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 1Mi}}
---
`
	file := v.path("pod.yaml")
	for _, text := range []string{claim + pod, pod} {
		v.must(os.WriteFile(file, []byte(text), 0o600))
		v.engine.CLI("kube", "play", "--network", "none", file)
		v.waitFile("kube", "kube")
		vol, err := v.client.Volume(v.ctx(), volumeName("kube"))
		v.must(err)
		want := v.engine.CLI("inspect", "--format", "{{.Id}}", "web-box")
		if users := vol.Holders[0].Containers; !slices.Equal(users, []string{want}) {
			v.t.Errorf("containers %q, want %s", users, want)
		}
		v.engine.CLI("kube", "down", file)
	}
	v.engineUse("kube", `[ "$(cat /data/kube | wc -l)" = 2 ]`, "")
	v.engine.CLI("volume", "rm", "kube")
}

// quadlet runs what Quadlet generates for the units of docs/containers.md. Podman 4.3 has no Quadlet, and no --ignore.
func (v *engineVolumes) quadlet() {
	v.t.Helper()
	id := v.path("web.cid")
	v.engine.CLI("volume", "create", "--driver", v.driver, "--opt", "plugin=fake", "--opt", "size=1M", "notes")
	v.engine.CLI("run", "--name", "systemd-web", "--cidfile="+id, "--replace", "--rm", "--sdnotify=conmon", "-d",
		"--network", "none", "--stop-signal", "KILL", "-v", "notes:/data", "box",
		"sh", "-c", "echo >/data/web; exec sleep 1000")
	v.waitFile("notes", "web")
	v.engine.CLI("rm", "-v", "-f", "-i", "--cidfile="+id)
	v.waitUntil("nothing uses the volume", func() bool { return !v.mounted("notes") })
	v.engine.CLI("volume", "rm", "notes")
}
