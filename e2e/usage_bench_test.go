package e2e

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/internal/csifake"
)

// BenchmarkVolumeUsage measures the processor time that the usage of one volume costs: in the shim, and with host and
// plugin, which are in one process here. Metrics asks for each volume once a minute; the last figure is for 1000
// volumes.
func BenchmarkVolumeUsage(b *testing.B) {
	e := newEnv(b, csifake.AllCaps...)
	plugin := e.addPlugin("alloc-p", csifake.Monolith)
	e.must(e.create("disk"))
	e.use("alloc-u", request{source: "disk"})
	shim := e.activeShim().PID
	began, shimBegan := processorTime(b, 0), processorTime(b, shim)
	for b.Loop() {
		if _, _, err := e.host.VolumeStats(e.ctx(), volumeName("disk")); err != nil {
			b.Fatal(err)
		}
	}
	inShim := processorTime(b, shim) - shimBegan
	all := (processorTime(b, 0) - began + inShim).Seconds() / float64(b.N)
	b.ReportMetric(float64(inShim.Microseconds())/float64(b.N), "shim-cpu-us/volume")
	b.ReportMetric(all*1e6, "cpu-us/volume")
	b.ReportMetric(100*all*1000/time.Minute.Seconds(), "%core/1000volumes")
	e.must(e.release("alloc-u"))
	e.must(e.delete("disk"))
	e.stopPlugin(plugin)
}

// processorTime returns the processor time of a process; 0 is this one.
func processorTime(b *testing.B, pid int) time.Duration {
	b.Helper()
	clock := int32(unix.CLOCK_PROCESS_CPUTIME_ID)
	if pid != 0 {
		clock = int32(^pid<<3 | 2) // clock_getcpuclockid(3)
	}
	var now unix.Timespec
	if err := unix.ClockGettime(clock, &now); err != nil {
		b.Fatal(err)
	}
	return time.Duration(now.Nano())
}
