package host_test

import (
	"errors"
	"strings"
	"testing"

	"holdfast/host"
)

// What a shim says of a volume that cannot be measured reaches the caller, with its kind.
func TestVolumeStatsSayWhy(t *testing.T) {
	w := newWorld(t)
	w.plugin("a")
	if err := w.create("data", ""); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[host.VolumeName]struct {
		kind error
		says string
	}{
		{ID: "none"}:                       {host.ErrNotFound, "there is no volume none"},
		{ID: "../x"}:                       {host.ErrInvalid, "volume id"},
		{Namespace: "default", ID: "data"}: {host.ErrUnsupported, "node.GET_VOLUME_STATS"},
	} {
		if usage, _, err := w.host.VolumeStats(w.ctx(), name); !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.says) || usage != nil {
			t.Errorf("%v: %v, %v", name, usage, err)
		}
	}
}

// A repair is a mutating call, which a shim takes with an operation id only; a plan that is not the one asked for is not carried out.
func TestDoctorIsAsked(t *testing.T) {
	w := newWorld(t)
	if _, err := w.host.Doctor(w.ctx(), true, "no such plan"); !errors.Is(err, host.ErrConflict) && !errors.Is(err, host.ErrUnsupported) {
		t.Errorf("repair: %v", err)
	}
	if d, err := w.host.Doctor(w.ctx(), false, ""); d.Repaired || err != nil && !errors.Is(err, host.ErrUnsupported) {
		t.Errorf("%+v, %v", d, err)
	}
}
