package csifake

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"holdfast/internal/csifake/journal"
)

// client calls a plugin at a socket as a correct client does.
type client struct {
	t *testing.T
	csi.IdentityClient
	csi.ControllerClient
	csi.NodeClient
	conn *grpc.ClientConn
}

func dial(t *testing.T, target string, options ...grpc.DialOption) *client {
	t.Helper()
	conn, err := grpc.NewClient(target, append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return &client{t: t, conn: conn, IdentityClient: csi.NewIdentityClient(conn),
		ControllerClient: csi.NewControllerClient(conn), NodeClient: csi.NewNodeClient(conn)}
}

// start starts a plugin, and a client that has learnt all about it.
func start(t *testing.T, cfg Config) (*Plugin, *client) {
	t.Helper()
	p := Start(t, cfg)
	return p, dial(t, "unix:"+p.Socket()).learn()
}

// learn requests all that a client must know.
func (c *client) learn() *client {
	c.t.Helper()
	ctx := c.t.Context()
	_, err := c.GetPluginCapabilities(ctx, &csi.GetPluginCapabilitiesRequest{})
	must(c.t, err)
	_, err = c.ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})
	must(c.t, err)
	_, err = c.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	must(c.t, err)
	_, err = c.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	must(c.t, err)
	return c
}

func writer() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4"}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}}
}

// places has the paths of one volume.
type places struct{ staging, target string }

func newPaths(t *testing.T) places {
	t.Helper()
	dir := t.TempDir()
	p := places{staging: filepath.Join(dir, "staging"), target: filepath.Join(dir, "alloc", "target")}
	for _, d := range []string{p.staging, filepath.Dir(p.target)} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

// create creates a volume.
func (c *client) create(name string) *csi.Volume {
	c.t.Helper()
	made, err := c.CreateVolume(c.t.Context(), &csi.CreateVolumeRequest{Name: name,
		VolumeCapabilities: []*csi.VolumeCapability{writer()}, Secrets: map[string]string{"token": "canary"}})
	must(c.t, err)
	return made.GetVolume()
}

func (c *client) stage(ctx context.Context, id string, p places) error {
	_, err := c.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: p.staging,
		VolumeCapability: writer()})
	return err
}

func (c *client) unpublish(ctx context.Context, id string, p places) error {
	_, err := c.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: p.target})
	return err
}

func (c *client) unstage(ctx context.Context, id string, p places) error {
	_, err := c.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: p.staging})
	return err
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	for n, err := range errs {
		if err != nil {
			t.Fatalf("step %d: %v", n+1, err)
		}
	}
}

func eventually(t *testing.T, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if is() {
			return
		}
	}
	t.Fatal("what was waited for does not happen")
}

// retryAborted repeats a call while another one for the volume runs, because a call whose connection was cut may not
// have noticed it yet.
func retryAborted(t *testing.T, call func() error) {
	t.Helper()
	var err error
	eventually(t, func() bool { err = call(); return codeName(err) != "ABORTED" })
	must(t, err)
}

func codeName(err error) string { return journal.CodeName(uint32(status.Code(err))) }

func wantCode(t *testing.T, err error, want string) {
	t.Helper()
	if got := codeName(err); got != want {
		t.Fatalf("answer is %s (%v), want %s", got, err, want)
	}
}

// linesOf waits until enough returns true for the lines of the journal, and returns them.
func linesOf(t *testing.T, path string, enough func([]journal.Line) bool) (lines []journal.Line) {
	t.Helper()
	eventually(t, func() bool {
		var err error
		lines, err = journal.Read(path)
		return err == nil && enough(lines)
	})
	return lines
}

// staged reports whether the backend has the volume as staged on the plugin's node.
func staged(t *testing.T, p *Plugin, volume string) bool {
	t.Helper()
	used, err := p.Backend().Volumes()
	must(t, err)
	return used[volume].Staged[p.cfg.NodeID] != ""
}

// wantRules checks which rules the journal breaks. Of one rule there may be several violations.
func wantRules(t *testing.T, p *Plugin, o journal.Options, want ...string) {
	t.Helper()
	var got []string
	for _, v := range p.Check(o) {
		got = append(got, v.Rule)
	}
	if !slices.Equal(got, want) {
		t.Errorf("Check finds %v, want %v", got, want)
	}
}

// wantLegal checks that the calls were legal, and that everything was taken down.
func wantLegal(t *testing.T, p *Plugin) {
	t.Helper()
	for _, v := range p.Check(journal.Options{Settled: true, Strict: true}) {
		t.Error(v)
	}
}

func count(lines []journal.Line, kind journal.Kind, rpc string) (n int) {
	for _, l := range lines {
		if l.Kind == kind && (rpc == "" || l.RPC == rpc) {
			n++
		}
	}
	return n
}
