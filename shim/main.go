// Command holdfast-shim is the sidecar: everything about CSI is in it. A Holdfast host starts it (package host) and
// ends it; it is of no use alone.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"runtime/debug"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"

	"holdfast/internal/tracing/otlp"
	"holdfast/proto/bootstrap"
	"holdfast/shim/internal/lifecycle"
)

// version of this shim.
const version = "0.1.0"

// gcPercent is by how much the heap grows before it is collected, in percent. A shim has few megabytes that live; Go's
// default has it collect them many times a second, beside plugins and tasks that want the processors. With a hundred
// plugins and a thousand volumes it takes 64 to 77 MB so.
const gcPercent = 400

func main() {
	lifecycle.Helper() // this binary is also the process that does what may hang
	level := flag.String("log-level", "info", "what is logged: trace, debug, info, warn or error")
	show := flag.Bool("version", false, "print the version and exit")
	check := flag.String("check", "", "look at a state file, say what is wrong with it, and exit")
	d := doctorFlags()
	moving := flag.String("migrate", "", "move the volumes of -state into the cluster that standard input describes, "+
		"as node NAME, and exit")
	l := leaveFlags()
	flag.Parse()
	if *show {
		fmt.Fprintln(os.Stderr, "holdfast-shim", version) // standard output is the handshake's
		return
	}
	if *check != "" {
		os.Exit(checkState(*check))
	}
	if d.wanted {
		os.Exit(d.run())
	}
	if *moving != "" {
		os.Exit(runOffline(d.state, "migrate",
			func(ctx context.Context, offline lifecycle.Offline, out *json.Encoder) error {
				return migrate(ctx, offline, *moving, out)
			}))
	}
	if l.node != "" {
		os.Exit(runOffline(d.state, "leave", l.run))
	}
	debug.SetGCPercent(gcPercent)
	log := bootstrap.NewLogger(hclog.LevelFromString(*level))
	traces, err := otlp.Start("holdfast-shim", version, func(err error) { log.Warn("spans are lost", "error", err) })
	if err != nil {
		log.Warn(err.Error())
	}
	shim := lifecycle.New(version, log)
	shim.Traces = traces
	register := func(life context.Context, g *grpc.Server) error {
		shim.Register(life, g)
		return nil
	}
	err = bootstrap.Serve(context.Background(), register,
		bootstrap.ServeOptions{Logger: log, Run: shim.Run, Server: shim.ServerOptions()})
	traces.Stop()
	if err != nil {
		log.Error("the shim ends", "error", err) // go-plugin has put a pipe of its own in place of os.Stderr
		log.Flush(time.Second)
		os.Exit(1)
	}
}

// checkState is the exit code of a look at a state file: 1 if something is wrong with it.
func checkState(file string) (code int) {
	err := lifecycle.Check(context.Background(), file, func(wrong error) {
		fmt.Fprintln(os.Stderr, wrong)
		code = 1
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, "holdfast-shim:", err)
		return 1
	}
	return code
}
