// Command embed is a small orchestrator: embed STATE-DIR SHIM JOB-FILE PLUGIN-PROGRAM [ARGUMENT...] runs one plugin.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/exec"
	"syscall"

	"holdfast/host"
)

func main() {
	config := host.Config{StateDir: os.Args[1], Shim: host.Binary{Path: os.Args[2]}}
	run(context.Background(), config, os.Args[3], os.Args[4:])
}

func run(ctx context.Context, config host.Config, jobFile string, command []string) {
	h, err := host.Open(ctx, config)
	must(err)
	text, err := os.ReadFile(jobFile)
	must(err)
	job, _, err := h.Parse(ctx, host.Source{Name: jobFile, Text: text}, host.ParseOptions{})
	must(err)
	parsed := job.Groups[0].Tasks[0]
	task := host.AllocTask{Alloc: "alloc-1", Task: parsed.Name, Attempt: 1, Sealed: parsed.Sealed}
	plan, err := h.TaskStarting(ctx, task)
	must(err)
	plugin := exec.Command(command[0], command[1:]...)
	plugin.Env = plan.Environ(os.Environ())
	must(plugin.Start())
	must(h.TaskStarted(ctx, task.Key(), task.Attempt))
	var query host.PluginQuery
	var list host.PluginList
	for len(list.Instances) == 0 { // the plugin is registered once it is healthy
		list, query.MinIndex, err = h.Plugins(ctx, query) // waits for a change
		must(err)
	}
	for _, p := range list.Instances {
		fmt.Printf("%s: %s %s\n", p.Plugin, p.Fingerprint.Provider, p.Fingerprint.Version)
	}
	must(plugin.Process.Signal(syscall.SIGTERM))
	_ = plugin.Wait()
	must(h.TaskExited(ctx, task.Key(), task.Attempt, 0, 0, true))
	must(h.Close())
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
