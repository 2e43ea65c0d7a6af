package endpoint

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// otherNode is an Executors for which another node is the executor of each plugin.
type otherNode struct{}

func (otherNode) Check(registry.View, registry.ExecutorKey) (registry.Executor, error) {
	return registry.Executor{}, registry.Errorf(registry.ErrUnavailable, "node b is the executor, not node n")
}

func (o otherNode) Sending(context.Context, registry.ExecutorKey) (func(), error) {
	_, err := o.Check(registry.View{}, registry.ExecutorKey{})
	return func() {}, err
}

func (otherNode) OneInstance(registry.PluginID) bool { return true }

func (otherNode) Repeating(context.Context, registry.PluginID, registry.LateCall) error { return nil }

// TestOnlyTheExecutorPassesControllerCalls calls the endpoint of a node that is not the executor. The endpoint passes
// calls that only read, and calls of the node service. It refuses other calls, names the executor, and records no use.
func TestOnlyTheExecutorPassesControllerCalls(t *testing.T) {
	e := newEnv(t)
	e.Executors = otherNode{}
	registrytest.Put(t, e.State, registry.Executor{Plugin: key.Plugin, Holder: "b", Lease: 1})
	for name, effect := range effects {
		controller := strings.HasPrefix(name, "Controller/") || strings.HasPrefix(name, "GroupController/")
		if !controller || effect == effectRead {
			continue
		}
		// the first field of each of these requests is an ID or a name
		err := Status(e.call(t.Context(), name, &csi.ControllerPublishVolumeRequest{VolumeId: volume}))
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "node b is the executor") ||
			!strings.Contains(err.Error(), "use the CSI endpoint of that node") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if len(e.sent) > 0 || len(e.uses()) > 0 {
		t.Errorf("sent %v, and recorded %v", e.sent, e.uses())
	}
	for name, request := range map[string]proto.Message{
		"Controller/ListVolumes": &csi.ListVolumesRequest{},
		"Node/NodePublishVolume": &csi.NodePublishVolumeRequest{VolumeId: volume, TargetPath: target},
	} {
		if err := e.call(t.Context(), name, request); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	slices.Sort(e.sent)
	if want := []string{"ListVolumes to csi-controller", "NodePublishVolume to csi-node"}; !slices.Equal(e.sent, want) {
		t.Errorf("sent %v", e.sent)
	}
}
