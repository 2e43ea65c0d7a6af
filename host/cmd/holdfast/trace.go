package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"go.opentelemetry.io/otel/codes"

	"holdfast/host"
	"holdfast/internal/tracing"
	"holdfast/internal/tracing/otlp"
)

// servers are the commands that serve until they are ended. They have no span, so each of their calls begins a trace.
var servers = map[string]bool{"holdfast agent": true, "holdfast run": true, "holdfast csi-endpoint": true}

// startTrace begins the span of a command, if traces are exported.
func (p *program) startTrace(c *cobra.Command) {
	if strings.HasPrefix(c.Name(), cobra.ShellCompRequestCmd) { // a shell completes a command
		return
	}
	name, service := c.CommandPath(), "holdfast"
	if servers[name] {
		service = "holdfast-agent"
	}
	var err error
	p.traces, err = otlp.Start(service, host.Version, func(err error) {
		if servers[name] {
			p.warn(fmt.Sprint("traces are lost: ", err))
		}
	})
	if err != nil {
		p.warn(err.Error())
	}
	if p.traces == nil || servers[name] {
		return
	}
	ctx, span := p.traces.Provider().Tracer(tracing.Scope).Start(c.Context(), name)
	c.SetContext(ctx)
	p.end = func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, err.Error())
		}
		span.End()
	}
}

// warn prints a problem that does not end the command.
func (p *program) warn(text string) {
	if !p.json {
		text = "holdfast: " + text
	}
	p.remark(text)
}

// remark prints a remark about the answer of a command on standard error.
func (p *program) remark(text string) {
	if p.json {
		writeJSONLine(p.errs, map[string]string{"warning": text})
		return
	}
	fmt.Fprintln(p.errs, text)
}

// endTrace ends the span of the command, and exports the remaining spans.
func (p *program) endTrace(err error) {
	if p.end != nil {
		p.end(err)
	}
	p.traces.Stop()
}
