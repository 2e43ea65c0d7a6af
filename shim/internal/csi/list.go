package csi

import (
	"context"
	"strings"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"holdfast/registry"
)

// listRPC changes nothing.
const listRPC = registry.ListVolumesRPC

// pageSize is how many volumes are asked for at a time, so that a page of large ones fits into a message.
const pageSize = 256

// ListPage is one page of ListVolumes. What comes back is the plugin's word, unchecked.
func (f *Fleet) ListPage(ctx context.Context, at registry.InstanceKey, token string) (page Page, err error) {
	err = f.send(ctx, listRPC, at, veil{}, func(ctx context.Context, cc grpc.ClientConnInterface) error {
		reply, err := csi.NewControllerClient(cc).ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: pageSize, StartingToken: token})
		masks := sync.OnceValues(func() (*strings.Replacer, bool) { return f.memory(at.Plugin).unsaid(veil{}, true) })
		page.Next = reply.GetNextToken()
		for _, e := range reply.GetEntries() {
			entry := Entry{Volume: registry.ExternalID(e.GetVolume().GetVolumeId())}
			for _, node := range e.GetStatus().GetPublishedNodeIds() {
				entry.Nodes = append(entry.Nodes, registry.NodeID(node))
			}
			if status := e.GetStatus(); status != nil {
				entry.Condition = condition(status, masks)
			}
			page.Entries = append(page.Entries, entry)
		}
		return err
	})
	return page, err
}
