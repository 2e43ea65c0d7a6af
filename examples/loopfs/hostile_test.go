package main

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// hostileText holds strings that are no IDs and must not become parts of paths. gRPC itself refuses invalid UTF-8.
var hostileText = []string{
	"", ".", "..", "/", "../victim", "a/../../victim", "/etc/passwd", "a/b", `a\b`, "a\x00b", "a\nb", "\x7f",
	strings.Repeat("a", 129), strings.Repeat("../", 60), "../work/victim",
}

// hostilePaths holds paths where nothing must ever be mounted or removed. %data stands for the data directory.
var hostilePaths = []string{
	"", "/", ".", "..", "relative", "/tmp/../etc", "/tmp/./x", "//tmp", "/a\x00b", "/a//b",
	"/" + strings.Repeat("a", 4096), "/tmp/" + strings.Repeat("b", 256) + "/x",
	"%data", "%data/volumes", "%data/volumes/x/image", "%data/..", "%data/volumes/x/files/y",
}

// Every call refuses hostile ids and names, and calls with paths refuse hostile paths. No file changes.
func TestHostileRequests(t *testing.T) {
	m, p := runLoopfs(t, dirBackend, "--node-id", "n1")
	victim := m.staging("victim") // empty, so that rmdir would succeed
	id := p.create("a", writer).VolumeId
	before := m.tree()
	called := 0
	services := csi.File_csi_proto.Services()
	for i := range services.Len() {
		for j := range services.Get(i).Methods().Len() {
			method := services.Get(i).Methods().Get(j)
			for _, name := range []protoreflect.Name{"name", "volume_id", "snapshot_id", "source_volume_id"} {
				field := method.Input().Fields().ByName(name)
				if field == nil || strings.HasPrefix(string(method.Name()), "List") {
					continue
				}
				for _, text := range hostileText {
					if name == "name" && checkName(text) == nil {
						continue // CSI allows it: TestNamesThatLookLikePaths
					}
					req := m.request(method.Input(), id)
					req.Set(field, protoreflect.ValueOfString(text))
					answer, err := protoregistry.GlobalTypes.FindMessageByName(method.Output().FullName())
					must(t, err)
					full := fmt.Sprintf("/%s/%s", method.Parent().FullName(), method.Name())
					err = p.conn.Invoke(t.Context(), full, req.Interface(), answer.New().Interface())
					if status.Code(err) != codes.Unimplemented {
						called++
						step(t, fmt.Sprintf("%s with %s %q", method.Name(), name, text), err, codes.InvalidArgument)
					}
				}
			}
		}
	}
	if called < 15*len(hostileText) {
		t.Errorf("only %d hostile calls", called)
	}
	for _, path := range hostilePaths {
		path = strings.ReplaceAll(path, "%data", m.data)
		step(t, "stage at "+path, p.stage(id, path, writer), codes.InvalidArgument)
		step(t, "unstage "+path, p.unstage(id, path), codes.InvalidArgument)
		step(t, "publish at "+path, p.publish(id, victim, path, writer, false), codes.InvalidArgument)
		step(t, "unpublish "+path, p.unpublish(id, path), codes.InvalidArgument)
	}
	step(t, "unpublish a foreign directory", p.unpublish(id, victim), codes.OK)
	step(t, "unstage a foreign directory", p.unstage(id, victim), codes.OK)
	if after := m.tree(); !slices.Equal(before, after) {
		t.Errorf("the files are %q, were %q", after, before)
	}
	step(t, "delete", p.delete(id), codes.OK)
}

// CSI allows any text as a name but most control characters. No file but those of the volumes appears.
func TestNamesThatLookLikePaths(t *testing.T) {
	m, p := runLoopfs(t, dirBackend)
	names := []string{".", "..", "/", "../victim", "/etc/passwd", `a\b`, "a\tb\r\n", strings.Repeat("../", 42), "ä/漢"}
	var want []string
	for _, name := range names {
		want = append(want, string(idFor(volumeKind, name)))
		if got := p.create(name, writer).VolumeId; got != want[len(want)-1] {
			t.Errorf("volume %q has the id %q", name, got)
		}
	}
	slices.Sort(want)
	if got := m.volumeFiles(); !slices.Equal(got, want) {
		t.Errorf("the volumes are %q, want %q", got, want)
	}
	for _, name := range []string{"a\bb", "a\vb", "a\x1fb", "a\x7fb", "a\u0085b"} {
		_, err := p.tryCreate(name, "", 0, 0, writer)
		step(t, fmt.Sprintf("create %q", name), err, codes.InvalidArgument)
	}
}

// request returns a request that loopfs accepts, or refuses only because it is out of order.
func (m *machine) request(message protoreflect.MessageDescriptor, id string) protoreflect.Message {
	m.t.Helper()
	kind, err := protoregistry.GlobalTypes.FindMessageByName(message.FullName())
	must(m.t, err)
	req := kind.New()
	for _, valid := range []proto.Message{
		&csi.CreateVolumeRequest{Name: "x", VolumeCapabilities: []*csi.VolumeCapability{writer},
			CapacityRange: &csi.CapacityRange{RequiredBytes: 1}},
		&csi.CreateSnapshotRequest{SourceVolumeId: id},
		&csi.NodeExpandVolumeRequest{VolumePath: m.target("victim")},
		&csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: m.target("victim"), TargetPath: m.target("t"),
			VolumeCapability: writer},
	} {
		valid.ProtoReflect().Range(func(field protoreflect.FieldDescriptor, v protoreflect.Value) bool {
			if same := message.Fields().ByName(field.Name()); same != nil {
				req.Set(same, v)
			}
			return true
		})
	}
	return req
}

// tree lists every file below the test's directory.
func (m *machine) tree() (found []string) {
	m.t.Helper()
	must(m.t, filepath.WalkDir(m.base, func(path string, _ fs.DirEntry, err error) error {
		found = append(found, path)
		return err
	}))
	return found
}

func TestHostileCapabilities(t *testing.T) {
	m, p := runLoopfs(t, loopBackend)
	id, s := p.create("a", writer).VolumeId, m.staging("s")
	mode := writer.AccessMode
	for what, c := range map[string]*csi.VolumeCapability{
		"none":         nil,
		"empty":        {},
		"no type":      {AccessMode: mode},
		"no mode":      {AccessType: writer.AccessType},
		"many nodes":   capability(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER),
		"unknown mode": capability(99),
		"btrfs":        mountOf(writer, "btrfs", ""),
		"a group":      mountOf(writer, "", "1234"),
		"path flag":    capability(mode.Mode, "journal_path=/etc/passwd"),
		"remount flag": capability(mode.Mode, "remount"),
	} {
		step(t, what, p.stage(id, s, c), codes.InvalidArgument)
		_, err := p.tryCreate("b", "", 0, 0, c)
		step(t, "create with "+what, err, codes.InvalidArgument)
	}
	_, err := p.tryCreate("b", "", 0, 0)
	step(t, "create without capabilities", err, codes.InvalidArgument)
	step(t, "delete: nothing was staged", p.delete(id), codes.OK)
}

func TestSymbolicLinks(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m, p := runLoopfs(t, backend)
		id, victim, s := p.create("a", multi).VolumeId, m.staging("victim"), m.staging("s")
		link, parent := m.target("link"), m.target("parent")
		must(t, os.Symlink(victim, link))
		must(t, os.Symlink(m.work, parent))
		step(t, "stage on a link", p.stage(id, link, multi), codes.InvalidArgument)
		step(t, "stage below a link", p.stage(id, filepath.Join(parent, "s"), multi), codes.OK)
		step(t, "stage by the real path", p.stage(id, s, multi), codes.OK)
		step(t, "publish on a link", p.publish(id, s, link, multi, false), codes.InvalidArgument)
		step(t, "publish below a link", p.publish(id, s, filepath.Join(parent, "t"), multi, false), codes.OK)
		if got := m.mounted(); !slices.Equal(got, []string{s, m.target("t")}) {
			t.Errorf("mounted at %q", got)
		}
		_, err := os.Readlink(link)
		must(t, err)
		p.takeDown(id, filepath.Join(parent, "s"), m.target("t"))
	})
}
