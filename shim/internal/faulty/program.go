package main

import (
	"context"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"

	"holdfast/internal/fault"
)

// program executes the faults of this shim.
type program struct {
	host   int // the parent process
	faults []fault.Fault

	commits sync.Mutex // held while the faults of a commit are executed

	mu        sync.Mutex // guards timesLeft
	timesLeft []int      // how often each fault may still be executed; not used for a fault without a limit
}

func newProgram(faults []fault.Fault) *program {
	p := &program{host: os.Getppid(), faults: faults}
	for _, f := range faults {
		p.timesLeft = append(p.timesLeft, f.Times)
	}
	return p
}

func (p *program) start() { _ = p.at(nil, func(f fault.Fault) bool { return f.At == "start" }) }

// at executes the faults of a point. The error is the answer to the call that is at the point.
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

// due reports whether a fault is to be executed this time.
func (p *program) due(i int) bool {
	f := p.faults[i]
	if f.Once != "" {
		mark, err := os.OpenFile(f.Once, os.O_CREATE|os.O_EXCL, 0o600)
		return err == nil && mark.Close() == nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.timesLeft[i]--
	return f.Times == 0 || p.timesLeft[i] >= 0
}

// method returns the name of a method in faults: Activate for /holdfast.v1.Control/Activate, and with its service for
// others, as in Allocs.Prepare.
func method(full string) string {
	_, name, _ := strings.Cut(full, "/holdfast.v1.")
	return strings.TrimPrefix(strings.ReplaceAll(name, "/", "."), "Control.")
}

// around executes the faults before and after a method.
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
