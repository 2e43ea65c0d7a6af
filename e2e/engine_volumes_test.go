package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host/agent/control"
	"holdfast/internal/enginetest"
)

// engineVolumes is an agent whose volumes a container engine mounts.
type engineVolumes struct {
	*agentEnv
	engine *enginetest.Engine
	driver string // the name of the volume plugin at the engine
	socket string // of the volume plugin
	killer *podmanKiller
}

// volumesOfEngine are created by the engine with the test, and shared by all containers.
var volumesOfEngine = []string{"v1", "v2", "v3", "v4"}

// containersOfEngine is the number of containers, a few at a time: 200 in all.
var containersOfEngine = map[string]int{"docker": 111, "podman": 90}

// Containers are started and killed while the shim is swapped, the agent is killed, and the daemon of the engine is
// killed. Nothing is lost, and nothing stays mounted. The oracles are the files of the containers, the engine's
// answers, the kernel's mount table and the plugin's journal.
func TestContainersOfEnginesMountVolumes(t *testing.T) {
	slow(t)
	t.Parallel()
	for _, name := range []string{"docker", "podman"} {
		t.Run(name, func(t *testing.T) {
			v := newEngineVolumes(t, name)
			stop := v.swapEachSecond()
			v.work(1, func() {})
			v.work(2, func() {
				v.killAgent()
				v.must(v.startAgent(v.flags()...))
			})
			v.run(volumesOfEngine[0], "survivor")
			v.work(3, func() {
				v.engine.Kill()
				v.engine.Start()
			})
			stop()
			v.checkFiles()
			v.settle()
			v.commands()
			v.takeDown()
		})
	}
}

func (v *engineVolumes) flags() []string {
	return []string{"--volume-plugin", v.socket, "--volume-default-plugin", "fake", "--volume-default-size", "1M"}
}

func newEngineVolumes(t *testing.T, name string) *engineVolumes {
	v := &engineVolumes{driver: fmt.Sprintf("holdfast-%s-%d", name, os.Getpid())}
	// dockerd looks for plugins here only.
	v.socket = filepath.Join("/run/docker/plugins", v.driver+".sock")
	t.Cleanup(func() { _ = os.Remove(v.socket) }) // a killed agent leaves it, and each dockerd would wait for it
	v.agentEnv = newAgentEnv(t, v.flags()...)
	if name == "docker" {
		v.engine = enginetest.Docker(t)
	} else {
		v.killer = v.newPodmanKiller()
		v.engine = enginetest.Podman(t, fmt.Sprintf("volume_plugins = {%q = %q}", v.driver, v.killer.socket),
			`infra_image = "localhost/box"`)
	}
	v.engine.Import("box", nil)
	v.must(v.runJob("fake.hcl"))
	v.engine.CLI("volume", "create", "--driver", v.driver, "-o", "plugin=fake", "-o", "size=2M", volumesOfEngine[0])
	for _, id := range volumesOfEngine[1:] {
		v.engine.CLI("volume", "create", "--driver", v.driver, id) // of the default plugin
	}
	return v
}

// run starts a container that writes a file of its own. It repeats what a death of agent or engine has cut off.
func (v *engineVolumes) run(volume, name string) {
	v.t.Helper()
	v.must(v.retry("run "+name, func() error {
		_ = v.engine.Remove(name)
		_, err := v.engine.Try("run", "-d", "--network", "none", "--name", name, "-v", volume+":/data", "box", "sh",
			"-c", "echo "+name+" >/data/"+name+"; sync; exec sleep 1000")
		return err
	}))
	v.waitFile(volume, name)
}

// work starts and kills a third of the containers, three at a time.
func (v *engineVolumes) work(round int, meanwhile func()) {
	v.t.Helper()
	names := make(chan int)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for i := range names {
				name := fmt.Sprintf("c%d-%d", round, i)
				v.run(volumesOfEngine[i%len(volumesOfEngine)], name)
				v.must(v.retry("kill "+name, func() error { return v.engine.Remove(name) }))
			}
		})
	}
	ended := make(chan struct{})
	go func() { wg.Wait(); close(ended) }()
	for i := range containersOfEngine[v.engine.Name] / 3 {
		select {
		case names <- i:
		case <-ended:
			v.t.FailNow() // all of them have failed
		}
		if i == 3 {
			meanwhile()
		}
	}
	close(names)
	<-ended
}

// swapEachSecond swaps the shim until stop, also over deaths of the agent.
func (v *engineVolumes) swapEachSecond() (stop func()) {
	ctx, cancel := context.WithCancel(v.ctx())
	v.t.Cleanup(cancel)
	swaps := 0
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			path := filepath.Join(bin, []string{"holdfast-shim-faulty", "holdfast-shim"}[i%2])
			if _, err := v.client.Swap(ctx, control.SwapRequest{Path: path}); err == nil {
				swaps++
			}
			select {
			case <-time.After(time.Second):
			case <-ctx.Done():
			}
		}
	})
	return func() {
		cancel()
		wg.Wait()
		v.t.Logf("%d swaps", swaps)
		if swaps < 5 {
			v.t.Errorf("only %d swaps succeeded", swaps)
		}
	}
}

// checkFiles reads the file of each container.
func (v *engineVolumes) checkFiles() {
	v.t.Helper()
	found := 0
	for _, id := range volumesOfEngine {
		text := v.engine.CLI("run", "--rm", "--network", "none", "-v", id+":/data", "box", "sh", "-c", "cat /data/c*")
		lines := strings.Fields(text)
		slices.Sort(lines)
		found += len(slices.Compact(lines))
	}
	if want := containersOfEngine[v.engine.Name]; found != want {
		v.t.Errorf("%d containers have their file, want %d", found, want)
	}
}

// settle removes the last container, and waits until nothing is mounted.
func (v *engineVolumes) settle() {
	v.t.Helper()
	v.must(v.engine.Remove("survivor"))
	for _, id := range volumesOfEngine {
		// Podman counts on if its unmount failed because the agent was killed.
		for v.engine.Name == "podman" && v.engine.CLI("volume", "inspect", "--format", "{{.MountCount}}", id) != "0" {
			v.engine.CLI("volume", "unmount", id)
		}
	}
	v.waitUntil("nothing is mounted", func() bool {
		list, err := v.client.Volumes(v.ctx(), "")
		v.must(err)
		return !slices.ContainsFunc(list, func(vol control.Volume) bool { return len(vol.Holders) > 0 })
	})
}

// takeDown removes the volumes. The rest is checked by agentEnv.close.
func (v *engineVolumes) takeDown() {
	v.t.Helper()
	for _, id := range volumesOfEngine {
		v.must(v.retry("remove "+id, func() error { return errOf(v.engine.Try("volume", "rm", id)) }))
	}
	v.wantOutput(true, nil, "doctor")
	v.must(v.stopJob("fake"))
	if list, err := v.client.Volumes(v.ctx(), ""); err != nil || len(list) > 0 {
		v.t.Errorf("volumes are left: %v, %v", list, err)
	}
	v.must(v.endAgent(unix.SIGTERM))
	v.must(v.startAgent(v.flags()...)) // agentEnv.close ends it
}
