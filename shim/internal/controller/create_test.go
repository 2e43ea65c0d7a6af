package controller

import (
	"testing"

	"holdfast/registry"
	"holdfast/registry/registrytest"
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
