package controller

import (
	"testing"

	"holdfast/registry"
)

// A volume that a client of the CSI endpoint uses is neither registered nor created.
func TestVolumeOfAnEndpointsClientIsRefused(t *testing.T) {
	use := registry.EndpointUse{Volume: key, Call: registry.NodePublishRPC, Target: "/target", Node: "n1"}
	known := spec()
	known.External = key.External
	d := open(t, of(registry.CreateDelete), use)
	wantErr(t, "registered", errOf(d.Register(t.Context(), known)), registry.ErrConflict, "")
	if _, found := d.stored(); found {
		t.Error("the volume has a record")
	}
	if _, err := d.Controller.Create(t.Context(), call, spec()); err == nil {
		t.Error("created")
	}
	if v, _ := d.stored(); v.State != registry.VolumeUncertain || v.External != "" {
		t.Errorf("the record of the creation: %+v", v)
	}
	d.drop(use.Key())
	if v, err := d.Controller.Create(t.Context(), call, spec()); err != nil || v.State != registry.VolumeReady {
		t.Errorf("after the end of the use: %+v, %v", v, err)
	}
}
