package controller

import (
	"testing"

	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/csi"
)

// The next shim has to compute the hash of a creation that this one has left open. So only a new field may change this
// hash, not another order of the fields.
func TestHashOfAnOpenCreationStays(t *testing.T) {
	v := registry.Volume{VolumeSpec: registrytest.Filled[registry.VolumeSpec](t, 0), Created: true}
	const want = "74431e6212307684bc70253ab6f5ddfbf1414bcf5b94ad1f8fd8de7728fdbcf1"
	if got := createHash(v); got != want {
		t.Errorf("hash %q, want %q", got, want)
	}
}

// While an executor creates the volume of a job, the alloc may end at another node, which discards the volume. The
// outcome of the creation keeps that, and nobody can claim the volume any more.
func TestCreationKeepsADiscardOfAnotherNode(t *testing.T) {
	for _, usable := range []bool{true, false} {
		d := open(t, of(registry.CreateDelete))
		d.spoil = func(c *csi.Created) {
			v, _ := d.stored()
			v.DeleteWith = "a1"
			d.put(v)
			if !usable {
				c.Capacity = -1
			}
		}
		_, err := d.Controller.Create(t.Context(), call, spec())
		if v, _ := d.stored(); v.DeleteWith != "a1" || v.State == registry.VolumeReady || (err == nil) != usable {
			t.Errorf("usable %v: %s, deleted with %q, %v", usable, v.State, v.DeleteWith, err)
		}
	}
}
