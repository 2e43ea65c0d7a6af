package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
)

// expectHealth checks what the controller, its list and the node say of a volume. "" is a healthy volume.
func (p *process) expectHealth(what, id, controller, node string) {
	p.t.Helper()
	reasons := func(h *csi.VolumeHealth) string {
		var list []string
		for _, e := range h.GetHealthStatuses() {
			list = append(list, e.Status.String()+" "+e.Reason)
		}
		return strings.Join(list, ", ")
	}
	got, err := p.ControllerGetVolumeHealth(p.t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: id})
	if err != nil || reasons(got.VolumeHealth) != controller || got.VolumeHealth.VolumeId != id {
		p.t.Errorf("%s: the controller says %v, %v; want %q", what, got, err, controller)
	}
	list, err := p.ControllerListVolumeHealth(p.t.Context(), &csi.ControllerListVolumeHealthRequest{MaxEntries: 1})
	var listed string
	for _, h := range list.GetEntries() {
		listed = reasons(h)
	}
	if err != nil || listed != controller {
		p.t.Errorf("%s: the list is %v, %v; want %q", what, list, err, controller)
	}
	here, err := p.NodeGetVolumeHealth(p.t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id})
	if err != nil || reasons(here.VolumeHealth) != node {
		p.t.Errorf("%s: the node says %v, %v; want %q", what, here, err, node)
	}
}

func TestDamagedVolumesAreReported(t *testing.T) {
	m, p := runLoopfs(t, loopBackend)
	id, s, target := p.create("a", writer).VolumeId, m.staging("s"), m.target("t")
	p.create("healthy", writer)
	image, record := filepath.Join(m.data, "volumes", id, "image"), filepath.Join(m.data, "volumes", id, "meta.json")
	p.expectHealth("new", id, "", "")
	p.bringUp(id, s, target, writer)
	p.expectHealth("published", id, "", "")
	must(t, exec.Command("mount", "-o", "remount,ro", s).Run())
	p.expectHealth("read-only", id, "", "DEGRADED ReadOnly")
	must(t, exec.Command("mount", "-o", "remount,rw", s).Run())
	for _, at := range []string{target, s} {
		must(t, unix.Unmount(at, 0))
	}
	p.expectHealth("unmounted by another program", id, "", "INACCESSIBLE NotMounted")
	p.takeDown(id, s, target)

	kept, err := os.ReadFile(image)
	must(t, err)
	damage := func(change func(text []byte) []byte) {
		t.Helper()
		must(t, os.WriteFile(image, change(append([]byte(nil), kept...)), 0o600))
	}
	damage(func(text []byte) []byte { return text[:8<<20] })
	p.expectHealth("truncated", id, "DATA_LOSS ImageTruncated", "DATA_LOSS ImageTruncated")
	damage(func(text []byte) []byte { clear(text[:4096]); return text })
	p.expectHealth("overwritten", id, "DATA_LOSS FileSystemDamaged", "DATA_LOSS FileSystemDamaged")
	damage(func(text []byte) []byte { text[1024+58] |= 2; return text })
	p.expectHealth("with errors", id, "DEGRADED FileSystemErrors", "DEGRADED FileSystemErrors")
	must(t, os.Remove(image))
	p.expectHealth("without its image", id, "DATA_LOSS ImageMissing", "DATA_LOSS ImageMissing")
	damage(func(text []byte) []byte { return text })
	p.expectHealth("repaired", id, "", "")
	text, err := os.ReadFile(record)
	must(t, err)
	must(t, os.WriteFile(record, []byte("{"), 0o600))
	p.expectHealth("without its record", id, "DATA_LOSS RecordDamaged", "DATA_LOSS RecordDamaged")
	p.kill()
	p = m.start("csi", "--backend", "loop")
	if list, err := p.ListVolumes(t.Context(), &csi.ListVolumesRequest{}); err != nil || len(list.Entries) != 1 {
		t.Errorf("listed beside a damaged record: %v, %v", list, err)
	}
	step(t, "delete without a record", p.delete(id), codes.DataLoss)
	must(t, os.WriteFile(record, text, 0o600))
	step(t, "delete", p.delete(id), codes.OK)
	_, err = p.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id})
	step(t, "health of nothing", err, codes.NotFound)
}

func TestHealthOfDirectories(t *testing.T) {
	m, p := runLoopfs(t, dirBackend)
	id := p.create("a", writer).VolumeId
	must(t, os.RemoveAll(filepath.Join(m.data, "volumes", id, "files")))
	p.expectHealth("without its directory", id, "DATA_LOSS DirectoryMissing", "DATA_LOSS DirectoryMissing")
}

func TestStorageHealth(t *testing.T) {
	need(t, dirBackend)
	m := newMachine(t)
	fs := m.mountData("size=4m")
	p := m.start("csi", "--backend", dirBackend)
	defer p.kill()
	expect := func(what string, want csi.StorageHealthErrorType) {
		t.Helper()
		answer, err := p.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
		must(t, err)
		var got csi.StorageHealthErrorType
		for _, h := range answer.BackendHealth {
			got = h.Status
		}
		if got != want {
			t.Errorf("storage health %s: %v, want %v", what, answer, want)
		}
	}
	expect("at the start", 0)
	filler := filepath.Join(fs, "filler")
	must(t, os.WriteFile(filler, make([]byte, 3<<20), 0o600))
	expect("with a quarter free", 0)
	must(t, os.WriteFile(filler, make([]byte, 4<<20-64<<10), 0o600))
	expect("with less than 2% free", csi.StorageHealthErrorType_STORAGE_DEGRADED)
	must(t, os.RemoveAll(m.data))
	expect("without the data directory", csi.StorageHealthErrorType_STORAGE_UNREACHABLE)
}
