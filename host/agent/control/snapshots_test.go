package control

import (
	"context"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"holdfast/host"
	"holdfast/registry"
)

// If the time limit of a request ends, the error says how far the work on the snapshot has come, and how to resume.
func TestLateSnapshotSaysHowFarItIs(t *testing.T) {
	name := host.SnapshotName{Namespace: "default", ID: "s"}
	down := registry.Failure{RPC: registry.DeleteSnapshotRPC, Code: "UNAVAILABLE", Detail: "down"}
	for want, list := range map[string][]host.Snapshot{
		"no answer about snapshot default/s": nil,
		"is not taken yet":                   {{State: registry.SnapshotCreating}},
		"does not report ready_to_use yet; Holdfast keeps asking, see holdfast snapshot status": {
			{State: registry.SnapshotProcessing}},
		"is not deleted yet: DeleteSnapshot failed: UNAVAILABLE: down": {{State: registry.SnapshotDeleting,
			Failure: down}},
	} {
		k := snapshotRoutes{SnapshotKind: Snapshots,
			list: func(context.Context, host.SnapshotQuery) ([]host.Snapshot, host.Seq, error) { return list, 0, nil }}
		r := &http.Request{URL: &url.URL{RawQuery: "wait=1ms"}}
		_, err := callSnapshot(k, r.WithContext(t.Context()), name, func(ctx context.Context) (struct{}, error) {
			<-ctx.Done()
			return struct{}{}, context.Cause(ctx)
		})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "to resume") {
			t.Errorf("%v does not say %q", err, want)
		}
	}
}
