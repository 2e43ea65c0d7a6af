package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/hashicorp/go-hclog"

	"holdfast/shim/internal/lifecycle"
)

// Exit codes of all offline commands. -check, -migrate and -leave exit with 1 after an error.
const (
	exitOK          = 0
	exitFound       = 1 // of -check and -doctor: something is wrong, or was not examined
	exitNotExamined = 2 // of -doctor: the state could not be examined or repaired
)

// offlineFlags are the flags of the commands for a node on which no shim runs.
type offlineFlags struct {
	check  string
	doctor bool
	repair bool
	digest string

	migrate     string
	leave       string
	lost        bool
	confirm     string
	state, runs string
}

func (f *offlineFlags) declare() {
	flag.StringVar(&f.check, "check", "", "check a state file, print what is wrong with it, and exit")
	flag.BoolVar(&f.doctor, "doctor", false,
		"compare a state with this machine while no shim runs, print JSON, and exit: 0 if nothing is wrong, 1 if "+
			"something is wrong or was not examined, 2 if the state could not be examined or repaired")
	flag.StringVar(&f.state, "state", "", "of -doctor, -migrate and -leave: the state directory")
	flag.StringVar(&f.runs, "run", "", "of -doctor: the directory of sockets (default the usual one)")
	flag.BoolVar(&f.repair, "repair", false, "of -doctor: repair what needs no plugin")
	flag.StringVar(&f.digest, "digest", "", "of -repair: the digest of the plan to carry out (default any plan)")
	flag.Bool("json", true, "of -doctor: print JSON, which it always does")
	flag.StringVar(&f.migrate, "migrate", "", "move the volumes of -state into the cluster that standard input "+
		"describes, as node NAME, and exit")
	flag.StringVar(&f.leave, "leave", "", "make node NAME, whose state is -state, leave the cluster that "+
		"standard input describes, and exit")
	flag.BoolVar(&f.lost, "lost", false,
		"of -leave: the cluster is gone for good, so nothing is read from standard input")
	flag.StringVar(&f.confirm, "confirm", "", "of -lost: the ID of the cluster")
}

// run runs the selected command, if there is one, and returns its exit code.
func (f *offlineFlags) run() (code int, selected bool) {
	failed := exitFound
	var command func(context.Context, lifecycle.Offline) (code int, err error)
	switch {
	case f.check != "":
		command = f.runCheck
	case f.doctor:
		command, failed = f.runDoctor, exitNotExamined
	case f.migrate != "":
		command = f.runMigrate
	case f.leave != "":
		command = f.runLeave
	default:
		return 0, false
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	log := hclog.New(&hclog.LoggerOptions{Name: "offline", Level: hclog.Warn, Output: os.Stderr})
	code, err := command(ctx, lifecycle.Offline{State: f.state, Run: f.runs, Logger: log})
	if err != nil {
		fmt.Fprintln(os.Stderr, "holdfast-shim:", err)
		return failed, true
	}
	return code, true
}

// printJSON prints an object to standard output.
func printJSON(v any) error { return json.NewEncoder(os.Stdout).Encode(v) }

// runCheck checks the pages and records of a state file.
func (f *offlineFlags) runCheck(ctx context.Context, _ lifecycle.Offline) (code int, err error) {
	err = lifecycle.Check(ctx, f.check, func(wrong error) {
		fmt.Fprintln(os.Stderr, wrong)
		code = exitFound
	})
	return code, err
}

func (f *offlineFlags) runDoctor(ctx context.Context, offline lifecycle.Offline) (int, error) {
	var found lifecycle.Diagnosis
	var err error
	if f.repair {
		found, err = offline.Repair(ctx, f.digest)
	} else {
		found, err = offline.Examine(ctx)
	}
	if err == nil {
		err = printJSON(found)
	}
	if !found.CleanAndComplete() {
		return exitFound, err
	}
	return exitOK, err
}

// runMigrate moves the state into the cluster that standard input describes. It prints two JSON objects: first
// the secrets that other nodes will need, before it moves anything, and then the number of records moved.
func (f *offlineFlags) runMigrate(ctx context.Context, offline lifecycle.Offline) (int, error) {
	cluster, err := io.ReadAll(os.Stdin)
	if err != nil {
		return 0, err
	}
	moved, err := offline.Migrate(ctx, cluster, f.migrate, func(all []lifecycle.SecretUse) {
		_ = printJSON(map[string]any{"secrets": all})
	})
	if err != nil {
		return 0, err
	}
	return exitOK, printJSON(map[string]any{"moved": moved})
}

// runLeave ends the node's membership of its cluster. It prints a JSON object with the ID of the cluster.
func (f *offlineFlags) runLeave(ctx context.Context, offline lifecycle.Offline) (int, error) {
	var id string
	var err error
	if f.lost {
		id, err = offline.LeaveLost(ctx, f.leave, f.confirm)
	} else {
		var cluster []byte
		if cluster, err = io.ReadAll(os.Stdin); err == nil {
			id, err = offline.Leave(ctx, cluster, f.leave)
		}
	}
	if err != nil {
		return 0, err
	}
	return exitOK, printJSON(map[string]string{"left": id})
}
