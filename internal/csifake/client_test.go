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

// client talks CSI to a socket as a good client does.
type client struct {
	t *testing.T
	csi.IdentityClient
	csi.ControllerClient
	csi.NodeClient
	conn *grpc.ClientConn
}

func dial(t *testing.T, socket string) *client {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return &client{t: t, conn: conn, IdentityClient: csi.NewIdentityClient(conn),
		ControllerClient: csi.NewControllerClient(conn),
		NodeClient:       csi.NewNodeClient(conn)}
}

// learn asks for everything that a client has to know.
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

// places are the paths of one volume.
type places struct{ staging, target string }

func makePlaces(t *testing.T) places {
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

func wantCode(t *testing.T, err error, want string) {
	t.Helper()
	if got := journal.CodeName(uint32(status.Code(err))); got != want {
		t.Fatalf("answer is %s (%v), want %s", got, err, want)
	}
}

// linesOf waits until the journal has what enough tells, and returns it.
func linesOf(t *testing.T, path string, enough func([]journal.Line) bool) []journal.Line {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
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
