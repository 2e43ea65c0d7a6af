package csi

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

var ebs = registry.Instance{InstanceKey: registry.InstanceKey{
	Role: registry.RoleController, Plugin: "ebs", Alloc: "p", Task: "p",
}}

// dieDuringListVolumes makes the plugin die during n concurrent calls of ListVolumes, and returns the events.
func dieDuringListVolumes(t *testing.T, c *Suspensions, n int) (events []string) {
	t.Helper()
	log := registrytest.NewLog(time.Now)
	lost := &registry.CallError{
		RPC: registry.ListVolumesRPC, Code: "UNAVAILABLE", Kind: registry.ErrUnavailable, Lost: true,
	}
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() { _ = c.SuspendFailed(t.Context(), log, ebs, lost, time.Now()) })
	}
	wg.Wait()
	err := log.View(t.Context(), func(v registry.View) error {
		all, _ := v.Events(0, registry.MaxEvents)
		for _, e := range all {
			events = append(events, e.Detail)
		}
		return nil
	})
	must(t, err)
	return events
}

// Doctor and the shim may make the same call at the same time.
func TestOneDeathIsRecordedOnce(t *testing.T) {
	if events := dieDuringListVolumes(t, NewSuspensions(t.TempDir()), 3); len(events) != 1 {
		t.Errorf("events: %q", events)
	}
}

// If a suspension could not be written, its advice names no file to remove.
func TestUnwrittenSuspensionIsEndedByARestart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "suspended")
	if err := os.WriteFile(dir, nil, 0o600); err != nil { // nothing can be written below a file
		t.Fatal(err)
	}
	c := NewSuspensions(dir)
	dieDuringListVolumes(t, c, 1)
	must(t, os.Remove(dir))
	why, advice := c.Reason(registry.ListVolumesRPC, ebs)
	if !strings.Contains(why, "died") || !strings.Contains(advice, "restart the agent") ||
		strings.Contains(advice, "rm ") {
		t.Errorf("%q, %q", why, advice)
	}
	if why, _ := NewSuspensions(dir).Reason(registry.ListVolumesRPC, ebs); why != "" {
		t.Errorf("after a restart: %q", why)
	}
	newer := ebs
	newer.Fingerprint.Version = "2"
	if why, _ := c.Reason(registry.ListVolumesRPC, newer); why != "" {
		t.Errorf("another version: %q", why)
	}
}

func TestSuspensionNamesTheWaysOut(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "it's here")
	c := NewSuspensions(dir)
	dieDuringListVolumes(t, c, 1)
	_, advice := c.Reason(registry.ListVolumesRPC, ebs)
	file := filepath.Join(dir, "ebs.ListVolumes.json")
	quoted := "'" + strings.ReplaceAll(file, "'", `'\''`) + "'"
	for _, way := range []string{"update the plugin", "rm " + quoted, "list_volumes = false"} {
		if !strings.Contains(advice, way) {
			t.Errorf("%q is not in %q", way, advice)
		}
	}
	must(t, os.Remove(file))
	if why, _ := c.Reason(registry.ListVolumesRPC, ebs); why != "" {
		t.Errorf("after rm: %q", why)
	}
}
