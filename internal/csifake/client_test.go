package csifake

import (
	"context"
	"os"
	"path/filepath"
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
	conn *grpc.ClientConn // nil at a Port
	to   grpc.ClientConnInterface
}

func dial(t *testing.T, socket string) *client {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	c := clientOf(t, conn)
	c.conn = conn
	return c
}

func clientOf(t *testing.T, to grpc.ClientConnInterface) *client {
	return &client{t: t, to: to, IdentityClient: csi.NewIdentityClient(to),
		ControllerClient: csi.NewControllerClient(to),
		NodeClient:       csi.NewNodeClient(to)}
}

// inBothForms runs a test at a socket and at a Port.
func inBothForms(t *testing.T, f func(t *testing.T, start func(Config) (*Plugin, *client))) {
	t.Run("socket", func(t *testing.T) {
		f(t, func(cfg Config) (*Plugin, *client) {
			p := Start(t, cfg)
			return p, dial(t, p.Socket())
		})
	})
	t.Run("port", func(t *testing.T) {
		f(t, func(cfg Config) (*Plugin, *client) {
			if cfg.Port == nil {
				cfg.Port = &Port{}
			}
			return Start(t, cfg), clientOf(t, cfg.Port)
		})
	})
}

// learn requests all that a client must know.
func (c *client) learn() *client {
	c.t.Helper()
	ctx := c.t.Context()
	if _, err := c.GetPluginCapabilities(ctx, &csi.GetPluginCapabilitiesRequest{}); err != nil {
		c.t.Fatal(err)
	}
	if _, err := c.ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{}); err != nil {
		c.t.Fatal(err)
	}
	if _, err := c.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{}); err != nil {
		c.t.Fatal(err)
	}
	if _, err := c.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{}); err != nil {
		c.t.Fatal(err)
	}
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

func (c *client) stage(ctx context.Context, id string, p places) error {
	_, err := c.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: p.staging,
		VolumeCapability: writer()})
	return err
}

func (c *client) publish(ctx context.Context, id string, p places) error {
	_, err := c.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: p.staging,
		TargetPath: p.target, VolumeCapability: writer()})
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

func statusOf(t *testing.T, err error) *status.Status {
	t.Helper()
	s, ok := status.FromError(err)
	if !ok || err == nil {
		t.Fatalf("%v is no status", err)
	}
	return s
}

func wantCode(t *testing.T, err error, want string) {
	t.Helper()
	if got := codeName(err); got != want {
		t.Fatalf("answer is %s (%v), want %s", got, err, want)
	}
}

// linesOf waits until enough returns true for the lines of the journal, and returns them.
func linesOf(t *testing.T, path string, enough func([]journal.Line) bool) []journal.Line {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if lines, err := journal.Read(path); err == nil && enough(lines) {
			return lines
		}
	}
	t.Fatalf("%s never tells what was waited for", path)
	return nil
}

func count(lines []journal.Line, kind journal.Kind, rpc string) (n int) {
	for _, l := range lines {
		if l.Kind == kind && (rpc == "" || l.RPC == rpc) {
			n++
		}
	}
	return n
}
