// Command holdfast-shim is the sidecar that does everything about CSI. A Holdfast host (package host) starts and ends
// it. Its flags for a node without a running shim are in offline.go.
package main

import (
	"context"
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

// gcPercent is the value of GOGC. A shim has a live heap of a few megabytes. With Go's default, it would be collected
// many times a second, and plugins and tasks need the processors. With 100 plugins and 1000 volumes a shim takes 64 to
// 77 MB.
const gcPercent = 400

func main() {
	lifecycle.Helper() // does not return in a helper process
	level := flag.String("log-level", "info", "what is logged: trace, debug, info, warn or error")
	show := flag.Bool("version", false, "print the version and exit")
	var offline offlineFlags
	offline.declare()
	flag.Parse()
	if *show {
		fmt.Fprintln(os.Stderr, "holdfast-shim", version) // standard output is the handshake's
		return
	}
	if code, selected := offline.run(); selected {
		os.Exit(code)
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
		log.Error("the shim ends", "error", err) // not to os.Stderr, which go-plugin has replaced by its own pipe
		log.Flush(time.Second)
		os.Exit(1)
	}
}
