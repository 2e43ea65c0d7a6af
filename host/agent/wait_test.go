package agent

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/host"
	"holdfast/registry"
)

var staging = registry.Wait{
	Volume: registry.VolumeName{Namespace: "default", ID: "disk"}, Step: registry.StepStage, For: "plugin p", RPC: registry.NodeStageRPC,
	Code: "UNAVAILABLE", Detail: "backend is down", Advice: "look at the backend",
}

const stagingLine = "volume disk is not staged yet: plugin p answers NodeStageVolume with UNAVAILABLE: backend is down"

// While the shim has not answered, the alloc says what it waits for; each thing is noted once.
func TestWaitsAreNotedMeanwhile(t *testing.T) {
	inWorld(t, func(w *world) {
		w.shim.hang, w.shim.waiting = true, []registry.Wait{staging}
		w.submit(job("user", "service", withVolumes(tasks("g", task("main", "")))))
		w.await("it says what it waits for", func(all []*AllocRecord) bool { return len(all) == 1 && all[0].Reason == stagingLine })
		time.Sleep(time.Hour)
		synctest.Wait()
		rec, noted := w.agent.Allocs()[0], 0
		for _, n := range rec.Notes {
			if strings.Contains(n.Text, stagingLine) {
				noted++
			}
		}
		if noted != 1 || !rec.Next.IsZero() {
			t.Errorf("noted %d times, next %v", noted, rec.Next)
		}
		w.takeDown()
	})
}

// Between two tries the alloc says what the shim says, and when it asks again; what is hopeless is told with what a person may do.
func TestRefusalsAreToldAsWaits(t *testing.T) {
	inWorld(t, func(w *world) {
		w.shim.waiting = []registry.Wait{staging}
		refuse := registry.ErrConflict
		w.shim.prepare = func(host.AllocGroup) error { return fmt.Errorf("alloc 12345678-1234: %w", refuse) }
		w.submit(job("user", "service", withVolumes(tasks("g", task("main", "")))))
		w.await("it says when it asks again", func(all []*AllocRecord) bool {
			return len(all) == 1 && all[0].Reason == stagingLine && all[0].Next.After(time.Now())
		})
		w.shim.mu.Lock()
		refuse = registry.ErrInvalid
		w.shim.mu.Unlock()
		rec := w.awaitState("user", AllocFailed)
		if want := "volumes cannot be prepared: " + stagingLine + "; look at the backend"; rec.Reason != want {
			t.Errorf("%s\nwant %s", rec.Reason, want)
		}
		w.takeDown()
	})
}
