package main

import (
	"os"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
)

func TestInlineVolume(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m := newMachine(t)
		p := m.start("csi", "--backend", backend)
		one, two := m.target("one"), m.target("two")
		for range 2 {
			step(t, "publish", p.publishInline("csi-1", one, "", writer, false), codes.OK)
		}
		write(t, one, "kept")
		step(t, "publish another", p.publishInline("csi-2", two, "20MiB", mountOf(writer, "", "4321"), false), codes.OK)
		for id, at := range map[string]string{"csi-1": one, "csi-2": two} {
			usage, _, err := p.stats(id, at)
			if want := map[string]int64{"csi-1": 64 << 20, "csi-2": 20 << 20}[id]; err != nil || usage.Total > want ||
				usage.Total < want*3/4 {
				t.Errorf("%s has %v, %v", id, usage, err)
			}
		}
		var st unix.Stat_t
		if err := unix.Stat(two, &st); err != nil || st.Gid != 4321 || st.Mode&0o2070 != 0o2070 {
			t.Errorf("the volume is of %d:%d, mode %o, %v", st.Uid, st.Gid, st.Mode, err)
		}
		p.kill()
		p = m.start("csi", "--backend", backend)
		step(t, "publish again", p.publishInline("csi-1", one, "", writer, false), codes.OK)
		step(t, "publish otherwise", p.publishInline("csi-1", one, "", writer, true), codes.AlreadyExists)
		step(t, "publish at a second target", p.publishInline("csi-1", m.target("x"), "", writer, false),
			codes.AlreadyExists)
		step(t, "unpublish elsewhere", p.unpublish("csi-1", m.target("x")), codes.OK)
		step(t, "unpublish at another's target", p.unpublish("csi-1", two), codes.FailedPrecondition)
		step(t, "expand", p.expandOnNode("csi-1", one), codes.NotFound)
		expectText(t, one, "kept")
		if answer, err := p.ListVolumes(t.Context(), &csi.ListVolumesRequest{}); err != nil || len(answer.Entries) > 0 {
			t.Errorf("listed are %v, %v", answer, err)
		}
		for range 2 {
			step(t, "unpublish", p.unpublish("csi-1", one), codes.OK)
			step(t, "unpublish", p.unpublish("csi-2", two), codes.OK)
		}
		expectGone(t, one)
		m.expectNoVolumes()
		step(t, "publish anew", p.publishInline("csi-1", one, "", writer, true), codes.OK)
		expectGone(t, one+"/f")
		expectReadOnly(t, one)
		step(t, "unpublish", p.unpublish("csi-1", one), codes.OK)
	})
}

func TestRefusedInlineVolumes(t *testing.T) {
	need(t, loopBackend)
	m := newMachine(t)
	p := m.start("csi", "--backend", "loop", "--capacity", "400MiB")
	vol, dir, file, x := p.create("a", writer).VolumeId, m.staging("dir"), m.target("file"), m.target("x")
	must(t, os.WriteFile(file, []byte("precious"), 0o600))
	for what, c := range map[string]struct {
		id, to, size string
		cap          *csi.VolumeCapability
		want         codes.Code
	}{
		"another's id":  {vol, x, "", writer, codes.InvalidArgument},
		"no parent":     {"csi-1", m.target("no/x"), "", writer, codes.FailedPrecondition},
		"no capability": {"csi-1", x, "", nil, codes.InvalidArgument},
		"block":         {"csi-1", x, "", blockOf(writer), codes.InvalidArgument},
		"no number":     {"csi-1", x, "much", writer, codes.InvalidArgument},
		"negative size": {"csi-1", x, "-1", writer, codes.InvalidArgument},
		"too large":     {"csi-1", x, "1GiB", writer, codes.OutOfRange},
		"no room":       {"csi-1", x, "390MiB", writer, codes.ResourceExhausted},
		"at a file":     {"csi-1", file, "", writer, codes.InvalidArgument},
		"wrong flags":   {"csi-1", x, "", capability(writer.AccessMode.Mode, "commit=nonsense"), codes.InvalidArgument},
	} {
		step(t, what, p.publishInline(c.id, c.to, c.size, c.cap, false), c.want)
	}
	if text, err := os.ReadFile(file); string(text) != "precious" || err != nil {
		t.Errorf("the file at the target: %q, %v", text, err)
	}
	if left := m.volumeFiles(); len(left) != 1 {
		t.Errorf("refused publishes left %q", left)
	}
	step(t, "at an existing directory", p.publishInline("csi-1", dir, "1", writer, false), codes.OK)
	step(t, "unpublish", p.unpublish("csi-1", dir), codes.OK)
}
