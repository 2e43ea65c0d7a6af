package main

import (
	"os"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"holdfast/examples/loopfs/internal/disk"
	"holdfast/internal/installed"
)

func TestEphemeralVolume(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m := newMachine(t)
		p := m.start("csi", "--backend", backend, "--attach") // nobody attaches an inline volume
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
			t.Errorf("the group's volume is of %d:%d, mode %o, %v", st.Uid, st.Gid, st.Mode, err)
		}
		p.kill()
		p = m.start("csi", "--backend", backend, "--attach")
		step(t, "publish again", p.publishInline("csi-1", one, "", writer, false), codes.OK)
		expectText(t, one, "kept")
		step(t, "publish otherwise", p.publishInline("csi-1", one, "", writer, true), codes.AlreadyExists)
		step(t, "publish larger", p.publishInline("csi-1", one, "65MiB", writer, false), codes.AlreadyExists)
		step(t, "publish at a second target", p.publishInline("csi-1", m.target("x"), "", writer, false),
			codes.FailedPrecondition)
		step(t, "unpublish elsewhere", p.unpublish("csi-1", m.target("x")), codes.OK)
		step(t, "unpublish where another is", p.unpublish("csi-1", two), codes.FailedPrecondition)
		expectText(t, one, "kept")
		if ids, _ := p.list(0, ""); len(ids) > 0 {
			t.Errorf("it is listed: %q", ids)
		}
		for range 2 {
			step(t, "unpublish", p.unpublish("csi-1", one), codes.OK)
			step(t, "unpublish", p.unpublish("csi-2", two), codes.OK)
		}
		expectGone(t, one)
		if left := m.volumeFiles(); len(left) > 0 {
			t.Errorf("left are %q", left)
		}
		step(t, "publish anew", p.publishInline("csi-1", one, "", writer, true), codes.OK)
		expectGone(t, one+"/f")
		expectReadOnly(t, one)
		step(t, "unpublish", p.unpublish("csi-1", one), codes.OK)
	})
}

func TestEphemeralTable(t *testing.T) {
	need(t, disk.LoopBackend)
	m := newMachine(t)
	p := m.start("csi", "--backend", "loop", "--capacity", "400MiB")
	vol, dir, file := p.create("a", writer).VolumeId, m.staging("dir"), m.target("file")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	x := m.target("x")
	for what, c := range map[string]struct {
		id, to, size string
		cap          *csi.VolumeCapability
		want         codes.Code
	}{
		"no id":           {"", x, "", writer, codes.InvalidArgument},
		"a path as id":    {"../x", x, "", writer, codes.InvalidArgument},
		"another's id":    {vol, x, "", writer, codes.InvalidArgument},
		"no target":       {"csi-1", "", "", writer, codes.InvalidArgument},
		"no parent":       {"csi-1", m.target("no/x"), "", writer, codes.FailedPrecondition},
		"no capability":   {"csi-1", x, "", nil, codes.InvalidArgument},
		"block":           {"csi-1", x, "", blockOf(writer), codes.InvalidArgument},
		"size of nothing": {"csi-1", x, "much", writer, codes.InvalidArgument},
		"negative size":   {"csi-1", x, "-1", writer, codes.InvalidArgument},
		"too large":       {"csi-1", x, "1GiB", writer, codes.OutOfRange},
		"no room":         {"csi-1", x, "390MiB", writer, codes.ResourceExhausted},
		"at a file":       {"csi-1", file, "", writer, codes.InvalidArgument},
		"ill flags": {"csi-1", x, "", capability(writer.AccessMode.Mode, "commit=nonsense"),
			codes.InvalidArgument},
	} {
		step(t, what, p.publishInline(c.id, c.to, c.size, c.cap, false), c.want)
	}
	if text, err := os.ReadFile(file); string(text) != "precious" || err != nil {
		t.Errorf("the file in the way: %q, %v", text, err)
	}
	if left := m.volumeFiles(); len(left) != 2 {
		t.Errorf("refused publishes left %q", left)
	}
	step(t, "at a directory that is there", p.publishInline("csi-1", dir, "1", writer, false), codes.OK)
	t.Run("xfs is larger", func(t *testing.T) {
		installed.FileSystem(t, "xfs")
		step(t, "publish", p.publishInline("csi-2", x, "", mountOf(writer, "xfs", ""), false), codes.OK)
		if size := bytesAt(t, x); size < 200<<20 {
			t.Errorf("xfs has %d bytes", size)
		}
	})
	step(t, "expand", p.expandOnNode("csi-1", dir), codes.NotFound)
	step(t, "unpublish", p.unpublish("csi-1", dir), codes.OK)
	step(t, "unpublish", p.unpublish("csi-2", x), codes.OK)
}

// What a reboot, or somebody, unmounted is removed by the next start: nobody could come back to it.
func TestStartRemovesEphemeralVolumes(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m := newMachine(t)
		p := m.start("n", "--backend", backend, "--mode", "node", "--node-id", "n1")
		target := m.target("t")
		step(t, "publish", p.publishInline("csi-1", target, "", writer, false), codes.OK)
		p.kill()
		if err := unix.Unmount(target, 0); err != nil {
			t.Fatal(err)
		}
		m.awaitNoLoops()
		other := m.start("n2", "--backend", backend, "--mode", "node", "--node-id", "n2")
		if left := m.volumeFiles(); len(left) != 2 {
			t.Errorf("another node's start left %q", left)
		}
		other.stop()
		p = m.start("n", "--backend", backend, "--mode", "node", "--node-id", "n1")
		if left := m.volumeFiles(); len(left) > 0 {
			t.Errorf("left are %q", left)
		}
		expectGone(t, target)
		step(t, "unpublish", p.unpublish("csi-1", target), codes.OK)
	})
}
