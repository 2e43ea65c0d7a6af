package wire

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/prototext"

	"holdfast/registry"
)

// Texts and records for people have no secret of a mount flag, a parameter or a context. Requests to the shim have all
// of them.
func TestStatusShowsNoSecretInFlags(t *testing.T) {
	const canary = "canary-1234"
	flags := registry.FlagsOf([]string{"vers=4,hard", "username=u,password=" + canary})
	spec := registry.VolumeSpec{
		MountFlags: flags, Parameters: map[string]string{"fsType": "ext4", "adminPassword": canary},
		Context: map[string]string{"token": canary},
	}
	usage := registry.Usage{MountFlags: flags}
	status := registry.VolumeStatus{Volume: registry.Volume{VolumeSpec: spec},
		Holders: []registry.Holder{{Claim: registry.Claim{Usage: usage}}}}
	alloc := registry.AllocStatus{Volumes: []registry.AllocVolume{{Usage: usage}}}
	for what, shown := range map[string]string{
		"volume status": prototext.Format(VolumeProto(status)),
		"alloc status":  prototext.Format(AllocProto(alloc)),
	} {
		if strings.Contains(shown, canary) || !strings.Contains(shown, "username=u,password=***") ||
			!strings.Contains(shown, "vers=4,hard") {
			t.Errorf("%s: %s", what, shown)
		}
	}
	if got := VolumeSpec(VolumeSpecProto(spec)); got.MountFlags != flags || got.Parameters["adminPassword"] != canary {
		t.Errorf("a volume to be created is %+v", got)
	}
}
