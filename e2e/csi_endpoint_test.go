package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/registry"
)

// serveCSI serves plugin fake to CSI clients until stop is called or the test ends, and returns a client's connection.
func (e *env) serveCSI() (client *grpc.ClientConn, stop func()) {
	e.t.Helper()
	socket := filepath.Join(e.dir, "csi.sock")
	l, err := net.Listen("unix", socket)
	e.must(err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(e.t.Context()))
	served := background(func() error { return e.host.ServeCSI(ctx, "fake", l) })
	client, err = grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	e.must(err)
	stop = sync.OnceFunc(func() {
		e.must(client.Close())
		cancel()
		if err := e.result("the end of the endpoint", served); !errors.Is(err, host.ErrUnavailable) {
			e.must(err) // that error means that the host was closed first
		}
	})
	e.t.Cleanup(stop)
	return client, stop
}

// csiVolume is a volume of a CSI client.
type csiVolume struct {
	conn       *grpc.ClientConn
	name, dir  string // dir has the staging and the target path
	capability *csi.VolumeCapability
	id         string
	context    map[string]string // of the volume
	published  map[string]string // context of ControllerPublishVolume
}

func newCSIVolume(conn *grpc.ClientConn, name, dir string) *csiVolume {
	return &csiVolume{conn: conn, name: name, dir: dir, capability: &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	}}
}

func (v *csiVolume) staging() string { return filepath.Join(v.dir, v.name, "staging") }
func (v *csiVolume) target() string  { return filepath.Join(v.dir, v.name, "target") }

func (v *csiVolume) create(ctx context.Context) error {
	made, err := csi.NewControllerClient(v.conn).CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: v.name, VolumeCapabilities: []*csi.VolumeCapability{v.capability}})
	v.id, v.context = made.GetVolume().GetVolumeId(), made.GetVolume().GetVolumeContext()
	return err
}

func (v *csiVolume) attach(ctx context.Context) error {
	info, err := csi.NewNodeClient(v.conn).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if err != nil {
		return err
	}
	attached, err := csi.NewControllerClient(v.conn).ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
		VolumeId: v.id, NodeId: info.NodeId, VolumeCapability: v.capability, VolumeContext: v.context})
	v.published = attached.GetPublishContext()
	return err
}

func (v *csiVolume) stage(ctx context.Context) error {
	if err := os.MkdirAll(v.staging(), 0o700); err != nil {
		return err
	}
	_, err := csi.NewNodeClient(v.conn).NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: v.id,
		StagingTargetPath: v.staging(), VolumeCapability: v.capability, VolumeContext: v.context,
		PublishContext: v.published})
	return err
}

func (v *csiVolume) publish(ctx context.Context) error {
	_, err := csi.NewNodeClient(v.conn).NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: v.id,
		StagingTargetPath: v.staging(), TargetPath: v.target(), VolumeCapability: v.capability,
		VolumeContext: v.context, PublishContext: v.published})
	return err
}

func (v *csiVolume) unpublish(ctx context.Context) error {
	_, err := csi.NewNodeClient(v.conn).NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{
		VolumeId: v.id, TargetPath: v.target()})
	return err
}

func (v *csiVolume) unstage(ctx context.Context) error {
	_, err := csi.NewNodeClient(v.conn).NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging()})
	return err
}

func (v *csiVolume) detach(ctx context.Context) error {
	info, err := csi.NewNodeClient(v.conn).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if err != nil {
		return err
	}
	_, err = csi.NewControllerClient(v.conn).ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{
		VolumeId: v.id, NodeId: info.NodeId})
	return err
}

func (v *csiVolume) delete(ctx context.Context) error {
	_, err := csi.NewControllerClient(v.conn).DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.id})
	return err
}

// write writes a file into the published volume, which must be a mount of its own.
func (v *csiVolume) write(context.Context) error {
	if found, err := mountinfo.Mounted(v.target()); err != nil || !found {
		return fmt.Errorf("%s is not mounted: %v", v.target(), err)
	}
	return os.WriteFile(filepath.Join(v.target(), "f"), []byte(v.name), 0o600)
}

// life makes each call for the volume once.
func (v *csiVolume) life(ctx context.Context) error {
	for i, step := range []func(context.Context) error{
		v.create, v.attach, v.stage, v.publish, v.write, v.unpublish, v.unstage, v.detach, v.delete,
	} {
		if err := step(ctx); err != nil {
			return fmt.Errorf("step %d of volume %s: %w", i, v.name, err)
		}
	}
	return nil
}

// A volume belongs to Holdfast or to clients of the endpoint.
func TestEndpointAndHoldfastExcludeEachOther(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	plugin := e.addPlugin("alloc-p", csifake.Monolith)
	conn, stop := e.serveCSI()
	refused := func(what string, err error) {
		t.Helper()
		if status.Code(err) != codes.FailedPrecondition {
			t.Errorf("%s: %v", what, err)
		}
	}

	e.must(e.create("own"))
	own := newCSIVolume(conn, "own", filepath.Join(e.dir, "clients"))
	own.id = csifake.VolumeID("own")
	refused("stage", own.stage(e.ctx()))
	refused("delete", own.delete(e.ctx()))
	_, err := csi.NewControllerClient(conn).ValidateVolumeCapabilities(e.ctx(),
		&csi.ValidateVolumeCapabilitiesRequest{VolumeId: own.id,
			VolumeCapabilities: []*csi.VolumeCapability{own.capability},
			VolumeContext:      map[string]string{"csifake/name": "own", "pool": "p"}})
	if err != nil {
		t.Errorf("a call that only reads: %v", err)
	}
	e.must(e.delete("own"))

	theirs := newCSIVolume(conn, "theirs", filepath.Join(e.dir, "clients"))
	for _, step := range []func(context.Context) error{theirs.create, theirs.attach, theirs.stage, theirs.publish} {
		e.must(step(e.ctx()))
	}
	spec, err := parseVolume(e.ctx(), e.host, volumeText("fake", "theirs", ""))
	e.must(err)
	spec.External, spec.Context = registry.ExternalID(theirs.id), theirs.context
	register := func() error { return errOf(e.host.RegisterVolume(e.ctx(), spec)) }
	e.wantConflict(register(), "client of the CSI endpoint", "NodeStageVolume at")
	for _, step := range []func(context.Context) error{theirs.unpublish, theirs.unstage, theirs.detach} {
		e.wantConflict(register(), "client of the CSI endpoint")
		e.must(step(e.ctx()))
	}
	e.must(theirs.attach(e.ctx())) // by a client that vanishes
	uses, _, err := e.host.EndpointUses(e.ctx(), host.EndpointQuery{Plugin: "fake"})
	if err != nil || len(uses) != 1 || uses[0].Call != registry.ControllerPublishRPC ||
		uses[0].CreateIndex == 0 {
		t.Errorf("uses %+v, %v", uses, err)
	}
	forget := func(confirm string) error {
		return e.host.ForgetEndpointUses(e.ctx(), "fake", registry.ExternalID(theirs.id),
			host.Force{By: "an operator", Confirm: confirm})
	}
	if err := forget(""); !errors.Is(err, host.ErrDenied) {
		t.Errorf("without a confirmation: %v", err)
	}
	e.must(theirs.detach(e.ctx()))
	e.must(theirs.attach(e.ctx()))
	e.must(forget(theirs.id))
	if err := forget(theirs.id); !errors.Is(err, host.ErrNotFound) {
		t.Errorf("once more: %v", err)
	}
	e.must(theirs.detach(e.ctx())) // the fake plugin keeps the attachment
	e.must(register())
	refused("stage", theirs.stage(e.ctx()))
	e.must(e.host.DeregisterVolume(e.ctx(), volumeName("theirs")))
	e.must(theirs.delete(e.ctx()))
	stop()
	e.stopPlugin(plugin)
}

// A client of an endpoint reaches CSI's services only, and no other of the shim.
func TestEndpointServesCSIOnly(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	plugin := e.addPlugin("alloc-p", csifake.Monolith)
	conn, stop := e.serveCSI()
	shim := e.activeShim()
	for _, method := range []string{"/plugin.GRPCController/Shutdown", "/holdfast.v1.Control/Quiesce",
		"/holdfast.v1.Volumes/Delete", "/grpc.health.v1.Health/Check"} {
		err := conn.Invoke(e.ctx(), method, &emptypb.Empty{}, &emptypb.Empty{})
		if status.Code(err) != codes.Unimplemented {
			t.Errorf("%s: %v", method, err)
		}
	}
	if now := e.activeShim(); now.PID != shim.PID || now.Generation != shim.Generation {
		t.Errorf("the shim was %+v and is %+v", shim, now)
	}
	stop()
	e.stopPlugin(plugin)
}

// A service that only a later CSI has passes a host that does not know it. The shim of this release does not know it
// either, and passes it without rules. With the shim of the next release its rules hold, without another host.
func TestNewerRPCPassesTheHost(t *testing.T) {
	slow(t)
	e := newEnv(t, allCaps...)
	versions := csifake.Versions()
	e.spec = versions[len(versions)-1]
	plugin := e.addPlugin("alloc-p", csifake.Monolith)
	conn, stop := e.serveCSI()
	e.must(e.create("own"))
	compact := func(volume string) error {
		request, reply := &csi.DeleteVolumeRequest{VolumeId: volume}, &csi.DeleteVolumeRequest{} // volume_id is field 1
		err := conn.Invoke(e.ctx(), "/csi.v1.Compaction/CompactVolume", request, reply)
		if err == nil && reply.VolumeId != volume {
			t.Errorf("the answer names volume %q, not %q", reply.VolumeId, volume)
		}
		return err
	}
	own := csifake.VolumeID("own")
	e.must(compact(own))
	e.must(compact("other"))
	_, next := releases()
	e.must(errOf(e.host.Swap(e.ctx(), next.binary)))
	if err := compact(own); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("with the next shim, of a volume of Holdfast's: %v", err)
	}
	e.must(compact("other"))
	if calls := e.calls("CompactVolume"); len(calls) != 3 {
		t.Errorf("the plugin got %q", answers(calls))
	}
	e.must(e.delete("own"))
	stop()
	e.stopPlugin(plugin)
}
