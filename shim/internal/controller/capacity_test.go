package controller

import (
	"errors"
	"testing"

	"holdfast/registry"
)

func TestCapacityIsAskedOfAControllerThatReportsIt(t *testing.T) {
	query := registry.CapacityQuery{Plugin: key.Plugin, Parameters: map[string]string{"tier": "cold"}}
	near := query
	near.Topology = registry.Topology{"zone": "a"}
	all := []registry.Capability{registry.GetCapacity, registry.PluginTopology}
	for name, c := range map[string]struct {
		caps  []registry.Capability
		query registry.CapacityQuery
		free  int64
		call  string
		kind  error
	}{
		"reported":         {all[:1], query, 5, "GetCapacity map[tier:cold] no topology", nil},
		"of a topology":    {all, near, 5, "GetCapacity map[tier:cold] zone=a", nil},
		"unsupported":      {nil, query, 5, "", registry.ErrUnsupported},
		"without topology": {all[:1], near, 5, "", registry.ErrUnsupported},
		"less than none":   {all, query, -1, "GetCapacity map[tier:cold] no topology", registry.ErrInternal},
	} {
		d := open(t, of(append([]registry.Capability{registry.CreateDelete}, c.caps...)...))
		d.free = c.free
		got, err := d.Controller.Capacity(t.Context(), c.query)
		if !errors.Is(err, c.kind) || c.kind == nil && (err != nil || got.Available != c.free) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		if c.call == "" {
			d.expect()
		} else {
			d.expect(c.call)
		}
	}
}
