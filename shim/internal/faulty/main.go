// Command faulty is the shim with faults, for tests. Package holdfast/internal/fault explains them and makes binaries
// with faults.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"

	"holdfast/internal/fault"
	"holdfast/proto/bootstrap"
	"holdfast/shim/internal/lifecycle"
)

func main() {
	lifecycle.Helper()
	level := flag.String("log-level", "info", "what is logged")
	flag.Parse()
	faults, err := fault.Read("/proc/self/exe")
	if err != nil {
		fmt.Fprintln(os.Stderr, "faulty:", err)
		os.Exit(1)
	}
	p := newProgram(faults)
	p.start()
	log := bootstrap.NewLogger(hclog.LevelFromString(*level))
	shim := lifecycle.New("0.1.0-faulty", log)
	shim.Committing = p.commit
	register := func(life context.Context, g *grpc.Server) error {
		shim.Register(life, g)
		return nil
	}
	options := bootstrap.ServeOptions{Logger: log, Run: shim.Run, Server: append(shim.ServerOptions(),
		grpc.ChainUnaryInterceptor(p.unary), grpc.ChainStreamInterceptor(p.stream),
	)}
	if err := bootstrap.Serve(context.Background(), register, options); err != nil {
		log.Error("the shim ends", "error", err)
		log.Flush(time.Second)
		os.Exit(1)
	}
}
