package csi

import (
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/internal/csifake"
	"holdfast/registry"
)

// Calls are counted by the code of their end. They have the plugin's own name as soon as the plugin has reported it.
func TestEachCallIsCountedOnce(t *testing.T) {
	fake, f := start(t, csifake.Config{Name: "disk.example.org"})
	c := open(t, f)
	fake.On("ListVolumes").Rule(csifake.Rule{Code: "INTERNAL"})
	for range 3 {
		if _, err := c.Probe(patient(t)); err != nil {
			t.Fatal(err)
		}
		_, _ = f.ListVolumes(patient(t), controllerKey, "")
	}
	got := map[callKind]uint64{}
	for _, m := range f.observer.Metrics.List() {
		for _, n := range m.Buckets {
			got[callKind{m.Plugin, m.Driver, m.Method, m.Code}] += n
		}
	}
	for k, want := range map[callKind]uint64{
		{"disk", "disk.example.org", "/csi.v1.Identity/Probe", "OK"}:               3,
		{"disk", "disk.example.org", "/csi.v1.Controller/ListVolumes", "Internal"}: 3,
		{"disk", "unknown-driver", "/csi.v1.Identity/GetPluginInfo", "OK"}:         1,
	} {
		if got[k] != want {
			t.Errorf("%d calls of %+v, want %d; all: %v", got[k], k, want, got)
		}
	}
}

func TestCallIsCountedInTheBucketOfItsDuration(t *testing.T) {
	var m CallMetrics
	k := callKind{"disk", "disk.example.org", "/csi.v1.Identity/Probe", "OK"}
	for _, d := range []time.Duration{time.Millisecond, 5 * time.Millisecond, 6 * time.Millisecond, time.Hour} {
		m.observe(k, d)
	}
	got := m.List()[0]
	last := len(registry.CallBuckets)
	if got.Buckets[0] != 2 || got.Buckets[1] != 1 || got.Buckets[last] != 1 || got.Seconds != 3600.012 {
		t.Errorf("counted %+v", got)
	}
}

func TestKindsOfCallsAreBounded(t *testing.T) {
	var m CallMetrics
	for i := range 2 * maxKinds {
		m.observe(callKind{"disk", "disk.example.org", fmt.Sprint("/csi.v1.Node/Invented", i), "OK"}, 0)
	}
	m.observe(callKind{"twin", "disk.example.org", "/csi.v1.Identity/Probe", "OK"}, 0)
	sum, twin := uint64(0), false
	for _, c := range m.List() {
		sum += c.Buckets[0]
		twin = twin || c.Plugin == "twin" && c.Method == "/csi.v1.Identity/Probe"
	}
	if kinds := len(m.List()); kinds != maxKinds+2 || sum != 2*maxKinds+1 || !twin {
		t.Errorf("%d kinds of %d calls; another plugin's call is kept: %t", kinds, sum, twin)
	}
}

func TestCodesOfPluginsMakeNoLabels(t *testing.T) {
	for err, want := range map[error]string{
		nil: "OK", status.Error(codes.DeadlineExceeded, "x"): "DeadlineExceeded", status.Error(4711, "x"): "Unknown",
	} {
		if got := codeLabel(err); got != want {
			t.Errorf("%v has the label %q, want %q", err, got, want)
		}
	}
}
