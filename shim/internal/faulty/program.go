package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/tap"

	"holdfast/internal/fault"
)

// program is what this shim does beside its work.
type program struct {
	host     int    // who has started it
	versions []int  // of the protocol; empty: those of a good shim
	arrivals string // the file that calls are noted in; empty: they are not

	mu     sync.Mutex // guards left
	faults []fault.Fault
	left   []int // how often each may still be done, if that is limited
}

func newProgram(faults []fault.Fault) *program {
	p := &program{host: os.Getppid(), faults: faults}
	for _, f := range faults {
		p.left = append(p.left, f.Times)
	}
	return p
}

func (p *program) start() { _ = p.at(nil, func(f fault.Fault) bool { return f.At == "start" }) }

// at does what is to be done at a point. The error is the answer of the call that is at this point.
func (p *program) at(req any, here func(fault.Fault) bool) error {
	for i, f := range p.faults {
		if !here(f) || !p.due(i) {
			continue
		}
		time.Sleep(f.Later)
		if err := p.do(f, req); err != nil {
			return err
		}
	}
	return nil
}

// due says whether a fault is to be done this time.
func (p *program) due(i int) bool {
	f := p.faults[i]
	if f.Once != "" {
		mark, err := os.OpenFile(f.Once, os.O_CREATE|os.O_EXCL, 0o600)
		return err == nil && mark.Close() == nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left[i]--
	return f.Times == 0 || p.left[i] >= 0
}

// method is how a fault names what gRPC calls /holdfast.v1.Control/Activate: Activate, or for another service
// Allocs.Prepare.
func method(full string) string {
	_, name, _ := strings.Cut(full, "/holdfast.v1.")
	return strings.TrimPrefix(strings.ReplaceAll(name, "/", "."), "Control.")
}

// arrives notes a call. It is called by who reads the connection, so in the order in which the calls were sent.
func (p *program) arrives(ctx context.Context, call *tap.Info) (context.Context, error) {
	if p.arrivals == "" {
		return ctx, nil
	}
	waits := "for-ever"
	if end, limited := ctx.Deadline(); limited {
		waits = time.Until(end).String()
	}
	file, err := os.OpenFile(p.arrivals, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	must(err)
	_, err = fmt.Fprintln(file, method(call.FullMethodName), waits)
	must(err)
	must(file.Close())
	return ctx, nil
}

// around does the faults of a method around its work.
func (p *program) around(full string, req any, work func() error) error {
	name := method(full)
	if err := p.at(req, func(f fault.Fault) bool { return f.At == name && !f.After }); err != nil {
		return err
	}
	if err := work(); err != nil {
		return err
	}
	if err := p.at(req, func(f fault.Fault) bool { return f.At == name && f.After }); err != nil {
		return err
	}
	if name == "Activate" {
		go func() { _ = p.at(nil, func(f fault.Fault) bool { return f.At == "serving" }) }()
	}
	return nil
}

func (p *program) unary(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, work grpc.UnaryHandler,
) (reply any, err error) {
	err = p.around(info.FullMethod, req, func() (err error) {
		reply, err = work(ctx, req)
		return err
	})
	if err != nil {
		return nil, err
	}
	return reply, nil
}

func (p *program) stream(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, work grpc.StreamHandler) error {
	return p.around(info.FullMethod, nil, func() error { return work(srv, s) })
}
