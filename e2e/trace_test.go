package e2e

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/metadata"

	"holdfast/host"
	"holdfast/internal/tracing/tracetest"
)

// link is a span of a chain of spans, each the parent of the next.
type link struct{ service, name string }

// chain returns the spans of a chain whose first span has the parent.
func chain(spans []tracetest.Span, parent string, links []link) (found [][]tracetest.Span) {
	if len(links) == 0 {
		return [][]tracetest.Span{nil}
	}
	for _, s := range spans {
		if s.Parent == parent && s.Service == links[0].service && s.Name == links[0].name {
			for _, rest := range chain(spans, s.ID, links[1:]) {
				found = append(found, append([]tracetest.Span{s}, rest...))
			}
		}
	}
	return found
}

// createVolume is the chain of the command, up to the shim and from there on.
var createVolume = [][]link{
	{{"holdfast", "holdfast volume create"}, {"holdfast", "HTTP POST"},
		{"holdfast-agent", "POST /v1/volumes/create"}, {"holdfast-agent", "host CreateVolume"},
		{"holdfast-agent", "holdfast.v1.Volumes/Create"}, {"holdfast-shim", "holdfast.v1.Volumes/Create"}},
	{{"holdfast-shim", "CreateVolume"}, {"holdfast-shim", "csi.v1.Controller/CreateVolume"}},
}

// One trace has the spans of a command, the agent, the shims before and after a swap, and the calls to the plugin. The
// trace of a client of the CSI endpoint has those of the shim and of the plugin's call.
func TestTraceLeadsFromTheCommandToTheCSICall(t *testing.T) {
	collector := tracetest.New(t)
	a := newAgentEnvWith(t, []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + collector.HTTP, "OTEL_BSP_SCHEDULE_DELAY=100"})
	a.must(a.runJob("fake.hcl"))
	shims, err := alternateShims()
	a.must(err)
	file := a.path("go")
	rule := fmt.Sprintf(`[{"rpc": "CreateVolume", "when": "before", "until": %q}]`, file)
	a.must(os.WriteFile(a.path("script"), []byte(rule), 0o600))
	whole := false
	for try := 0; try < 5 && !whole; try++ { // a command waits for a busy collector for half a second only
		a.must(os.RemoveAll(file))
		seen, _ := collector.Spans()
		done := background(func() error { return errOf(a.holdfast("volume", "create", a.diskFile())) })
		a.waitInTheMiddle(middle{"CreateVolume", "before"}, done)
		a.swap(shims[try%2].Path)
		a.must(os.WriteFile(file, nil, 0o600))
		a.must(a.result("the command", done))
		var spans []tracetest.Span
		a.waitUntil("agent and shims have exported their spans", func() bool {
			spans, _ = collector.Spans()
			spans = spans[len(seen):]
			ended := map[string]int{} // spans of requests, which end last
			for _, s := range spans {
				ended[s.Service+" "+s.Name]++
			}
			return ended["holdfast-agent POST /v1/volumes/create"] == 1 &&
				ended["holdfast-shim holdfast.v1.Volumes/Create"] > 1 && len(tracedCalls(spans)) > 1
		})
		whole = a.checkTrace(spans)
		a.must(a.delete("disk"))
	}
	if !whole {
		t.Error("no whole trace")
	}
	a.traceOfAClient(collector)
	a.must(a.stopJob("fake"))
}

// tracedCalls returns the CSI calls of the spans, with the spans before them.
func tracedCalls(spans []tracetest.Span) (found [][]tracetest.Span) {
	for _, s := range spans {
		if s.Name == "CreateVolume" {
			found = append(found, chain(spans, s.Parent, createVolume[1])...)
		}
	}
	return found
}

// checkTrace checks the spans of a command during which the shim was replaced. It reports whether none is missing.
func (a *agentEnv) checkTrace(spans []tracetest.Span) (whole bool) {
	a.t.Helper()
	shims, made := map[string]bool{}, map[string]bool{}
	operation := ""
	for _, c := range chain(spans, "", createVolume[0]) {
		shims[c[5].Attributes["process.pid"]] = true
		operation = c[3].Attributes["holdfast.operation"]
	}
	if len(shims) == 0 {
		return false
	}
	for _, c := range tracedCalls(spans) {
		of, at := c[0].Attributes, c[1].Attributes
		made[at["process.pid"]] = true
		if of["holdfast.operation"] != operation || of["holdfast.volume"] != "disk" ||
			at["holdfast.plugin"] != "fake" ||
			!strings.HasSuffix(at["holdfast.instance"], "/fake") || at["rpc.system.name"] != "grpc" ||
			at["rpc.method"] != "csi.v1.Controller/CreateVolume" {
			a.t.Errorf("a call of operation %q has the attributes %v, then %v", operation, of, at)
		}
	}
	if len(shims) != 2 || !maps.Equal(shims, made) {
		a.t.Errorf("shims %v were called, and made the calls %v", shims, made)
	}
	// The other shim may have repeated the call without its caller, in a trace of its own.
	complete := chain(spans, "", slices.Concat(createVolume...))
	for _, c := range complete {
		for _, s := range c {
			if s.Trace != c[0].Trace {
				a.t.Errorf("span %q has the trace %s, not %s", s.Name, s.Trace, c[0].Trace)
			}
		}
	}
	return len(complete) > 0
}

// diskFile writes the file of the volume "disk" for commands.
func (a *agentEnv) diskFile() (path string) {
	a.t.Helper()
	src, err := a.hclFile("disk.volume.hcl")
	a.must(err)
	path = a.path("disk.volume.hcl")
	a.must(os.WriteFile(path, src.Text, 0o600))
	return path
}

// traceOfAClient checks that the trace of a client of the CSI endpoint reaches the calls of the plugin.
func (a *agentEnv) traceOfAClient(collector *tracetest.Collector) {
	a.t.Helper()
	client := newCSIVolume(a.serveCSI(), "traced", a.path("csi"))
	const trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	ctx := metadata.AppendToOutgoingContext(a.ctx(), "traceparent", "00-"+trace+"-"+span+"-01")
	a.must(a.retry("create a volume over the endpoint", func() error { return client.create(ctx) }))
	a.must(client.delete(ctx))
	a.waitUntil("the plugin's call is in the trace of the client", func() bool {
		spans, _ := collector.Spans()
		create := "csi.v1.Controller/CreateVolume"
		return len(chain(spans, span, []link{{"holdfast-agent", create}, {"holdfast-agent", create},
			{"holdfast-shim", create}, {"holdfast-shim", create}})) == 1
	})
}

// A collector that accepts connections and never answers delays no call, no swap and no end.
func TestSilentCollectorHindersNothing(t *testing.T) {
	const hour = "3600000" // in ms
	a := newAgentEnvWith(t, []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + tracetest.Silent(t),
		"OTEL_EXPORTER_OTLP_TIMEOUT=" + hour, "OTEL_BSP_EXPORT_TIMEOUT=" + hour, "OTEL_BSP_SCHEDULE_DELAY=1"})
	a.must(a.runJob("fake.hcl"))
	shims, err := alternateShims()
	a.must(err)
	for _, shim := range shims {
		a.wantOutput(true, []string{"disk"}, "volume", "create", a.diskFile())
		if report := a.swap(shim.Path); report.Outcome != host.SwapBaking {
			t.Errorf("the swap: %+v", report)
		}
		a.wantOutput(true, []string{"disk"}, "volume", "delete", "disk")
	}
	a.must(a.stopJob("fake"))
}
