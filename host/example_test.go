package host_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"os/exec"
	"path/filepath"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"holdfast/host"
)

const pluginJob = `
task "driver" {
  driver = "raw_exec"
  csi_plugin {
    id   = "loopfs"
    type = "monolith"
  }
}`

const volumeFile = `
id        = "data"
name      = "data"
plugin_id = "loopfs"
capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
capacity_min = "1GiB"`

const volumeJob = `
job "notes" {
  group "notes" {
    volume "data" {
      type            = "csi"
      source          = "data"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }
    task "notes" {
      driver = "raw_exec"
      volume_mount {
        volume      = "data"
        destination = "/data"
      }
    }
  }
}`

// openExample opens a host in a temporary directory. end closes it and removes the directory.
func openExample() (h *host.Host, end func()) {
	dir, err := os.MkdirTemp("", "h-")
	if err != nil {
		log.Fatal(err)
	}
	h, err = host.Open(context.Background(), host.Config{
		StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"), Shim: host.Binary{Path: shimBinary},
		SwapBudget: patience, // these examples run on busy machines; the default is 500 ms
	})
	if err != nil {
		log.Fatal(err)
	}
	return h, func() {
		if err := h.Close(); err != nil {
			log.Fatal(err)
		}
		if root := filepath.Join(dir, "state", "mnt"); os.Getuid() == 0 { // Open makes it a shared mount
			_ = exec.Command("umount", root, filepath.Join(dir, "run")).Run()
		}
		_ = os.RemoveAll(dir)
	}
}

// check ends the program after an error.
func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func ExampleOpen() {
	dir, err := os.MkdirTemp("", "h-")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	h, err := host.Open(context.Background(), host.Config{
		StateDir: filepath.Join(dir, "state"),            // /var/lib/orchestrator/csi
		RunDir:   filepath.Join(dir, "run"),              // default: below /run
		Shim:     host.Binary{Path: shimBinary},          // /usr/bin/holdfast-shim
		Workload: host.Workload{ /* what still runs */ }, // after a restart of the orchestrator
		Secret: func(_ context.Context, name string) (string, error) {
			return "", errors.New("no secret store is configured")
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("serving:", h.ShimState().Serving)
	if err := h.Close(); err != nil { // tasks and mounts stay
		log.Fatal(err)
	}
	_ = exec.Command("umount", filepath.Join(dir, "state", "mnt"), filepath.Join(dir, "run")).Run()
	// Output: serving: true
}

func ExampleHost_Parse() {
	h, end := openExample()
	defer end()
	job, diags, err := h.Parse(context.Background(), host.Source{Name: "driver.hcl", Text: []byte(pluginJob)},
		host.ParseOptions{})
	check(err) // lists all errors with their positions, as diags does
	task := job.Groups[0].Tasks[0]
	fmt.Println(task.Name, task.Driver, len(diags))

	_, diags, err = h.Parse(context.Background(),
		host.Source{Name: "bad.hcl", Text: []byte("task \"t\" {\n  csi_plugin {}\n}")}, host.ParseOptions{})
	fmt.Println(errors.Is(err, host.ErrInvalid), len(diags) > 0)
	// Output:
	// driver raw_exec 0
	// true true
}

// An orchestrator applies the plan of a plugin's task, starts the task, and reports its life.
func ExampleHost_TaskStarting() {
	h, end := openExample()
	defer end()
	ctx := context.Background()
	job, _, err := h.Parse(ctx, host.Source{Name: "driver.hcl", Text: []byte(pluginJob)}, host.ParseOptions{})
	check(err)
	parsed := job.Groups[0].Tasks[0]
	task := host.AllocTask{Alloc: "alloc-1", Task: parsed.Name, Attempt: 1, Sealed: parsed.Sealed}
	plan, err := h.TaskStarting(ctx, task)
	check(err)
	for _, e := range plan.Env {
		fmt.Println("variable", e.Name)
	}
	cmd := exec.Command("sleep", "60") // the plugin's program
	cmd.Env = plan.Environ(os.Environ())
	check(cmd.Start())
	check(h.TaskStarted(ctx, task.Key(), task.Attempt))
	check(h.TaskStopping(ctx, task.Key(), task.Attempt))
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	check(h.TaskExited(ctx, task.Key(), task.Attempt, 0, 9, true))
	// Output: variable CSI_ENDPOINT
}

// A volume is created once a controller instance of its plugin is healthy.
func ExampleHost_CreateVolume() {
	h, end := openExample()
	defer end()
	ctx := context.Background()
	spec, _, err := h.ParseVolume(ctx, host.Source{Name: "data.hcl", Text: []byte(volumeFile)}, host.ParseOptions{})
	check(err)
	volume, err := h.CreateVolume(ctx, spec)
	check(err)
	fmt.Println(volume.ID, volume.State, volume.Capacity)
	check(h.DeleteVolume(ctx, host.VolumeName{Namespace: "default", ID: "data"}))
}

// The volumes of an alloc are mounted before its tasks start, and released after all of them have ended.
func ExampleHost_PrepareAlloc() {
	h, end := openExample()
	defer end()
	ctx := context.Background()
	text, err := os.ReadFile("notes.nomad.hcl")
	check(err)
	job, _, err := h.Parse(ctx, host.Source{Name: "notes.nomad.hcl", Text: text}, host.ParseOptions{})
	check(err)
	group := job.Groups[0]
	alloc := host.AllocGroup{
		Alloc: "alloc-1", Job: job.ID, Group: group.Name, Namespace: job.Namespace, Sealed: group.Sealed,
	}
	plans, err := h.PrepareAlloc(ctx, alloc)
	check(err)
	for task, plan := range plans {
		for _, bind := range plan.Binds {
			fmt.Println(task, "mounts", bind.Source, "at", bind.Target)
		}
	}
	// ... apply the plans, run the tasks, and wait for their ends ...
	check(h.ReleaseAlloc(ctx, alloc.Alloc))
}

// A scheduler asks a node whether it can take an alloc, before it places the alloc there.
func ExampleHost_Feasible() {
	h, end := openExample()
	defer end()
	ctx := context.Background()
	job, _, err := h.Parse(ctx, host.Source{Name: "job.hcl", Text: []byte(volumeJob)}, host.ParseOptions{})
	check(err)
	group := job.Groups[0]
	reasons, _, err := h.Feasible(ctx, host.AllocGroup{
		Alloc: "alloc-1", Job: job.ID, Group: group.Name, Namespace: job.Namespace, Sealed: group.Sealed,
	})
	check(err)
	for _, r := range reasons {
		fmt.Printf("%s: %s\n", r.Kind, r.Detail)
	}
	// Output: unknown volume: volume data is not known in namespace default; create or register it first
}

func ExampleHost_Watch() {
	h, end := openExample()
	defer end()
	var cursor host.Seq // stored by a watcher that survives restarts
	err := h.Watch(context.Background(), host.WatchOptions{After: cursor, Snapshot: true}, func(e host.Event) error {
		cursor = e.Seq
		if e.Kind == host.EventResync {
			fmt.Println("the current state:", len(e.Snapshot.Instances), "plugin instances")
		}
		return io.EOF // seen enough
	})
	fmt.Println(err)
	// Output:
	// the current state: 0 plugin instances
	// EOF
}

func ExampleHost_Swap() {
	h, end := openExample()
	defer end()
	report, err := h.Swap(context.Background(), host.Binary{Path: shimBinary}) // the path of a new release
	if err != nil {
		log.Fatalf("%v; the step %s failed, and the swap is %s", err, report.Failed, report.Outcome)
	}
	fmt.Println(report.Outcome)
	// Output: baking
}

// The plan that an operator has seen is carried out, or none.
func ExampleHost_Doctor() {
	h, end := openExample()
	defer end()
	ctx := context.Background()
	diagnosis, err := h.Doctor(ctx, false, "")
	check(err)
	fmt.Println(len(diagnosis.Findings), "findings")
	if len(diagnosis.Findings) > 0 {
		if _, err := h.Doctor(ctx, true, diagnosis.Digest); err != nil {
			log.Fatal(err)
		}
	}
	// Output: 0 findings
}

// A CSI client is served while the context lasts.
func ExampleHost_ServeCSI() {
	h, end := openExample()
	defer end()
	dir, err := os.MkdirTemp("", "h-")
	check(err)
	defer os.RemoveAll(dir)
	l, err := net.Listen("unix", filepath.Join(dir, "csi.sock"))
	check(err)
	ctx, stop := context.WithCancel(context.Background())
	served := make(chan error)
	go func() { served <- h.ServeCSI(ctx, "loopfs", l) }()

	client, err := grpc.NewClient("unix://"+l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	check(err)
	err = client.Invoke(ctx, "/csi.v1.Identity/Probe", &emptypb.Empty{}, &emptypb.Empty{})
	fmt.Println(status.Convert(err).Message())
	check(client.Close())
	stop()
	fmt.Println(<-served)
	// Output:
	// plugin loopfs is not running: no task has it in its csi_plugin stanza
	// <nil>
}
