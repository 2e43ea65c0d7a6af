package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/hashicorp/go-hclog"

	"holdfast/shim/internal/lifecycle"
)

// Exit codes of a doctor.
const (
	isWell   = 0
	isIll    = 1
	isHidden = 2 // it could not be looked, or repaired
)

// doctor is a look at a node on which no shim runs.
type doctor struct {
	wanted, repair, json  bool
	state, runDir, digest string
}

func doctorFlags() *doctor {
	d := &doctor{}
	flag.BoolVar(&d.wanted, "doctor", false,
		"compare a state with this machine while no shim runs, and exit: 0 it is well, 1 it is not or was not all "+
			"examined, 2 it cannot be said")
	flag.StringVar(&d.state, "state", "", "of -doctor, -migrate and -leave: the state directory")
	flag.StringVar(&d.runDir, "run", "", "of -doctor: the directory of sockets (default the usual one)")
	flag.BoolVar(&d.repair, "repair", false, "of -doctor: put right what needs no plugin")
	flag.StringVar(&d.digest, "digest", "", "of -repair: the plan to carry out; none other is (default whatever it is)")
	flag.BoolVar(&d.json, "json", false, "of -doctor: print JSON")
	return d
}

// run is the exit code.
func (d *doctor) run() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	log := hclog.New(&hclog.LoggerOptions{Name: "doctor", Level: hclog.Warn, Output: os.Stderr})
	offline := lifecycle.Offline{State: d.state, Run: d.runDir, Logger: log}
	look := offline.Examine
	if d.repair {
		look = func(ctx context.Context) (lifecycle.Diagnosis, error) { return offline.Repair(ctx, d.digest) }
	}
	found, err := look(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "holdfast-shim:", err)
		return isHidden
	}
	if err := d.print(found); err != nil {
		fmt.Fprintln(os.Stderr, "holdfast-shim:", err)
		return isHidden
	}
	if found.CleanAndComplete() {
		return isWell
	}
	return isIll
}

func (d *doctor) print(found lifecycle.Diagnosis) error {
	if d.json {
		return json.NewEncoder(os.Stdout).Encode(found)
	}
	for _, f := range found.Findings {
		fmt.Println(f)
		for _, more := range []string{f.Advice, f.Result} {
			if more != "" {
				fmt.Println("   ", more)
			}
		}
	}
	return nil
}
